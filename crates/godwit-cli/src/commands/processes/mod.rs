//! Processes and containers.

mod cgroup;
pub(crate) mod container;
pub(crate) mod process;
