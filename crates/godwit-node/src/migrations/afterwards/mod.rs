//! The work left after a disk has changed hands, or while its owner is in doubt.

pub(crate) mod forward;
pub(crate) mod pulling;
pub(crate) mod resolve;
