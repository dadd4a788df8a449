//! Orders of the host.

pub(crate) mod card;
pub(crate) mod commands;
pub(crate) mod ending;
pub(crate) mod options;
