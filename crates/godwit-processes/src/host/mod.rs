//! Changes to the host for a moving process.

pub mod address;
pub mod checks;
pub mod criu;
pub mod family;
pub mod files;
pub mod runc;
pub mod subject;
pub mod tcp;
pub mod threads;
