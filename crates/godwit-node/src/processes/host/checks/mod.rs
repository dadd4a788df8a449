//! Reasons against a move of a process.

pub(crate) mod unmovable;
pub(in crate::processes::host) mod watched;
