//! The scenes of the benchmark.

pub(crate) mod disk_limit;
pub(crate) mod idle_copy;
pub(crate) mod migrate;
pub(crate) mod steady;
pub(crate) mod vm;
