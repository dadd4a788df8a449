//! Disks, front ends, and the engine that drives a migration controller.

pub mod engine;
pub mod image;
pub mod nbd;

mod memory;
mod ring;
mod stream;
