//! The memory of VMs: segments in memory pools, and moves between the pool and this node's own memory while the guest
//! runs.

pub(crate) mod adopted;
pub(crate) mod blockers;
pub(crate) mod mover;
pub(crate) mod page_tables;
pub(crate) mod pooled;
pub(crate) mod qemu_fits;
pub(crate) mod released;
pub(crate) mod relocated;
