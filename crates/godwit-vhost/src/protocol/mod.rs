//! The messages of a front end, and what they ask of a device.

pub mod device;
mod early;
mod handler;
pub(crate) mod server;
pub mod session;
