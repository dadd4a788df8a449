//! Rapid checkpoints of a protected machine (the replicable NIC paper, section 3.2): see [`godwit_protect::checkpoints`]
//! for the rules.
//!
//! - Primary: `capture.rs` stops the guest for each checkpoint and copies the changed pages; `records/` makes records of the
//!   copies, and differences of pages that were sent before; `sending.rs` sends checkpoints, and releases packets once they
//!   are acknowledged.
//! - Backup: `waiting.rs` is a QEMU that waits with the machine's memory, and lets the machine go on; `receiving.rs` gathers
//!   checkpoints, applies whole ones to that memory and to the disks, and acknowledges them.
//! - `primary.rs` and `backup.rs` tie these to the tasks of a protection.

mod backup;
mod capture;
mod figures;
mod memory;
mod primary;
mod receiving;
mod records;
mod sending;
mod waiting;

pub(super) use backup::Keeping;
pub(super) use capture::blockers;
pub(super) use receiving::Mark;
pub(super) use sending::Sending;
pub(super) use waiting::{Waiting, end_left, other_qemu};
