//! What helps at a shell.

pub(crate) mod completions;
pub(crate) mod manual;
