//! Pre-setup (the RDMA live-migration paper, section 3.2): what a process will need at its destination is made there
//! while the process still runs at its source.
//!
//! 1. The process says what it has (`plan`).
//! 2. A holder at the destination makes completion queues, shared receive queues and queue pairs from that
//!    (`holding`). It keeps what the kernel answered and lets nobody map the queues (`commands`, `libibverbs`).
//! 3. The holder's queue pairs and new ones of the partners (`moving::preparing`) are connected to each other, while
//!    the old ones work.
//! 4. The restored process gets the device's file and the kernel's answers, and its objects are there. Memory is
//!    registered only then: the kernel pins the pages of the process that asks.
//!
//! This is for devices whose queues lie in memory of the kernel's, as soft-RoCE's do. One whose queues lie in the
//! process's memory cannot be asked before that memory is there: its objects are made after the restore.

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
