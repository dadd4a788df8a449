//! Processes and containers.

pub(crate) mod container;
pub(crate) mod process;
