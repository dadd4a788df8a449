//! The messages of a front end, and what they ask of a device.

pub mod device;
mod handler;
mod own;
pub(crate) mod server;
pub mod session;
