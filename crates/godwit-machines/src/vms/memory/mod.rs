//! The memory of VMs: segments in memory pools, and moves between the pool and this node's own memory while the guest
//! runs.

pub mod adopted;
pub mod blockers;
pub mod mover;
pub mod page_tables;
pub mod pooled;
pub mod pools;
pub mod qemu_fits;
pub mod released;
pub mod relocated;
