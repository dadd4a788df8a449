//! Disks, front ends, and the engine that drives a migration controller.

pub mod engine;
pub mod image;
pub mod nbd;
pub mod virtio_block;
