//! The cases: programs that move, are refused, or are struck while they move.

pub(crate) mod checking;
pub(crate) mod compared;
pub(crate) mod container;
pub(crate) mod deaths;
pub(crate) mod holder;
pub(crate) mod plain;
pub(crate) mod programs;
pub(crate) mod refusals;
pub(crate) mod talkers;
