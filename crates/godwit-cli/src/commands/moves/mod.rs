//! Moves of disks and machines: started, followed, cancelled.

pub(crate) mod follow;
pub(crate) mod migrate;
pub(crate) mod migration;
pub(crate) mod vm_migrate;
