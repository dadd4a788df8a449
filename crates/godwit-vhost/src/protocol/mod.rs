//! The messages of a front end, and the commands for the device.

pub mod device;
mod handler;
mod memory;
mod own;
pub(crate) mod server;
pub mod session;
