//! Moves between two engines.

pub(crate) mod after_a_move;
pub(crate) mod checkpoints;
pub(crate) mod compression;
pub(crate) mod double_writes;
pub(crate) mod forwarding;
pub(crate) mod migrate;
pub(crate) mod pause;
pub(crate) mod pulls;
