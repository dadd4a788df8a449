//! Shell completions and manual pages.

pub(crate) mod completions;
pub(crate) mod manual;
