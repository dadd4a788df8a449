//! The scenes of the benchmark.

pub(crate) mod choice;
pub(crate) mod many;
pub(crate) mod table;
pub(crate) mod thin;
