//! Rapid checkpoints (the replicable NIC paper, section 3.2, and Remus): the machine runs in *epochs*, and each epoch
//! ends with a checkpoint, which the backup keeps whole or not at all.
//!
//! ```text
//!  primary                                              backup
//!  runs epoch n, packets held back
//!  stops, captures checkpoint n, goes on with epoch n+1
//!    │══ pages, device state, end of checkpoint n ══════► │ keeps them apart
//!    │══ disks' writes of epoch n, mark n ══════════════► │ keeps them apart, per disk
//!    │                                    n is whole:     │ applies memory and disks
//!    │ ◄─────────────────────────────── acknowledges n ── │
//!  releases the packets of epoch n
//! ```
//!
//! A packet leaves only after the checkpoint of its epoch is acknowledged, so no client has seen a state that the backup
//! does not have. The backup goes on from its last whole checkpoint, and drops the later ones.
//!
//! # Rules
//!
//! Both nodes of a checkpointed machine carry the orders of the protection out as follows. `tests/checkpoint_model` tries
//! every order of events under these rules, and finds breaks of them.
//!
//! - The stop for a capture waits for the answers to all requests of the guest. A write that is on the disk of a
//!   checkpoint has its answer in the memory of that checkpoint.
//! - Packets are held back from the stop for the first checkpoint of a session, before the witness is asked to pair the
//!   nodes. The backup calls [`Backup::in_sync`] when the first checkpoint is whole, before acknowledging the checkpoint.
//!   The primary calls [`Primary::in_sync`] on that acknowledgement.
//! - [`Order::Hold`]: packets stay held, the disks hold their answers, and acknowledgements count no more. The guest may run:
//!   without an acknowledgement nobody sees its work, so the primary needs no lease.
//! - [`Order::GoAlone`]: the session ends, and all packets leave. [`Order::End`]: nothing leaves any more.
//! - A primary's process that starts again beside its machine holds the packets until [`Order::GoAlone`], unless
//!   [`PrimaryRecord::alone`] is set.
//! - [`Order::Sever`]: no further part is taken. [`Order::Take`]: the machine goes on with memory and disks of the last whole
//!   checkpoint.
//!
//! An acknowledgement that is on its way during a takeover may release packets of the old primary after the takeover. The
//! new owner has the state of these packets too.
//!
//! [`Backup::in_sync`]: crate::Backup::in_sync
//! [`Primary::in_sync`]: crate::Primary::in_sync
//! [`PrimaryRecord::alone`]: crate::PrimaryRecord::alone
//! [`Order::Hold`]: crate::Order::Hold
//! [`Order::GoAlone`]: crate::Order::GoAlone
//! [`Order::End`]: crate::Order::End
//! [`Order::Sever`]: crate::Order::Sever
//! [`Order::Take`]: crate::Order::Take

mod backup;
mod primary;

use core::fmt;

use serde::{Deserialize, Serialize};

pub use backup::{Gathering, OutOfOrder};
pub use primary::{Acknowledged, Checkpoints, Step};

/// Number of a checkpoint, and of the epoch that the checkpoint ends. The first of a session is 1.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Checkpoint(pub u64);

impl Checkpoint {
    /// Returns the next number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
