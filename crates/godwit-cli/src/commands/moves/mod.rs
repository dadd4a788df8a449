//! Moves of disks and VMs: start, follow, cancel.

pub(crate) mod follow;
pub(crate) mod migrate;
pub(crate) mod migration;
pub(crate) mod vm_migrate;
