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
