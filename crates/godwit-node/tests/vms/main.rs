//! Virtual machines through the API of a node: life and moves.

mod life;
mod moves;
#[path = "../support/mod.rs"]
mod support;
