//! Reasons against a move of a process.

pub mod unmovable;
pub(in crate::host) mod watched;
