//! The messages of a front end, and the commands for the device.

pub mod device;
mod handler;
mod own;
pub(crate) mod server;
pub mod session;
