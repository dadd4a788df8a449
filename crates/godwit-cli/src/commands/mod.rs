//! The commands.

pub(crate) mod certs;
pub(crate) mod disk;
pub(crate) mod image;
mod job;
pub(crate) mod moves;
pub(crate) mod node;
pub(crate) mod peer;
pub(crate) mod processes;
pub(crate) mod shell;
pub(crate) mod vms;
