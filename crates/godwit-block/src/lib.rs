//! Disks, front ends, and the engine that drives a migration controller.

pub mod engine;
pub mod image;
pub mod nbd;
pub mod tls;
pub mod vhost_user;

mod memory;
mod ring;
mod stream;
mod zeroes;
