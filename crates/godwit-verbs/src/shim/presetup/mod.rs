//! Pre-setup (the RDMA live-migration paper, section 3.2): objects for a process are made at the destination while the
//! process still runs at the source.
//!
//! 1. The process lists its objects (`plan`).
//! 2. A holder at the destination makes completion queues, shared receive queues and queue pairs from the plan
//!    (`holding`). The holder keeps the kernel's answers and prevents mapping the queues (`commands`, `libibverbs`).
//! 3. The holder's queue pairs and new ones of the partners (`moving::preparing`) are connected to each other, while
//!    the old ones work.
//! 4. The restored process gets the device's file and the kernel's answers, and thereby its objects. Memory is
//!    registered only then: the kernel pins the pages of the process that asks.
//!
//! Pre-setup is for devices whose queues lie in memory of the kernel, like soft-RoCE's. For a device whose queues lie
//! in the process's memory, this memory must exist first: the objects are made after the restore.

mod commands;
mod holding;
mod libibverbs;
mod plan;

pub(crate) use commands::Answer;
pub(super) use commands::repeat;
pub use holding::{
    HandedOver, HeldPair, connect_held, hand_over, hold, is_holder, serve_as_holder,
};
pub(super) use plan::as_told;
pub use plan::{Plan, Planned, plan};
