//! What each command does.

pub(crate) mod certs;
pub(crate) mod completions;
mod console;
pub(crate) mod disk;
mod follow;
mod job;
pub(crate) mod manual;
pub(crate) mod migrate;
pub(crate) mod migration;
pub(crate) mod node;
pub(crate) mod peer;
pub(crate) mod vm;
mod vm_migrate;
