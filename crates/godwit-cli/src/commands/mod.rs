//! What each command does.

pub(crate) mod certs;
mod console;
pub(crate) mod container;
pub(crate) mod disk;
pub(crate) mod image;
mod job;
pub(crate) mod memory_pool;
pub(crate) mod moves;
pub(crate) mod nic;
pub(crate) mod node;
pub(crate) mod peer;
pub(crate) mod process;
pub(crate) mod shell;
pub(crate) mod vm;
