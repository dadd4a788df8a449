//! Changes to the host for a moving process.

pub(crate) mod address;
pub(crate) mod checks;
pub(crate) mod criu;
pub(crate) mod family;
pub(crate) mod files;
pub(crate) mod runc;
pub(crate) mod subject;
pub(crate) mod tcp;
pub(crate) mod threads;
