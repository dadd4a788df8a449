//! The messages between the nodes of a protection.
//!
//! ```text
//!  primary                                    backup
//!    │── Offer ────────────────────────────────► │ looks for blockers, stores the machine
//!    │ ◄──────────────────────── Ready or Refused ─│
//!    │── Beats, on a second connection ────────► │
//!    │ ═══════════ disks, each a migration of its own ═════════►
//!    │── Checkpoints, on a third connection, once all disks follow: memory, then checkpoint 1
//!    │ ◄────────────────────────────── Following ─│ all disks follow, and checkpoint 1 is whole
//!    │   pairs with the witness                   │
//!    │── Paired ───────────────────────────────► │
//!    │── Ping ────────────────────────────────► │ on both connections
//!    │ ◄──────────────────────────────────── Pong ─│
//! ```

use godwit_api::WhenAlone;
use godwit_protect::{Grant, Member};
use serde::{Deserialize, Serialize};

use crate::vms::control::Link;
use crate::vms::messages::MachineOffer;

/// The first message on a connection.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Opening {
    /// Offer a machine to its backup.
    Offer(Box<ProtectionOffer>),
    /// Beats alone follow.
    Beats,
    /// Checkpoints follow: see `checkpoints/records/mod.rs`.
    Checkpoints,
    /// Answer who has the machine. Whoever does not have the machine gives the chance to take it up.
    Question,
    /// Answer who has the machine, and change nothing.
    Look,
}

/// The offer of a machine to its backup.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ProtectionOffer {
    /// The machine.
    pub(crate) machine: MachineOffer,
    /// Checkpoints a second. `None` if the machine would be started anew, and its memory is not sent.
    #[serde(default)]
    pub(crate) checkpoints_per_second: Option<u32>,
    /// The epoch of each disk at the primary.
    pub(crate) disk_epochs: Vec<u64>,
    /// The receiver's name in the pair.
    pub(crate) you: Member,
    /// The newest grant that the primary knows.
    pub(crate) known: Grant,
    pub(crate) witness: Option<String>,
    pub(crate) when_alone: WhenAlone,
    pub(crate) timeout_ms: u64,
    pub(crate) max_bandwidth: Option<u64>,
}

/// A message of the primary.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Say {
    /// Keeps the connection.
    Beat,
    /// To be answered at once.
    Ping(u64),
    /// The machine is protected under this grant.
    Paired(Grant),
    /// The machine has died, although its node lives: the backup is to take it.
    MachineDied,
    /// The protection has ended in order.
    Ended,
}

/// A message of the backup.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Hear {
    /// Keeps the connection.
    Beat,
    /// The disks can come.
    Ready,
    /// The blockers of the protection.
    Refused(Vec<String>),
    /// All disks follow.
    Following,
    /// The answer to a ping.
    Pong(u64),
    /// The disks do not follow any more, with the reason.
    Behind(String),
    /// The answer to [`Opening::Question`].
    Word {
        /// The newest grant that the node knows.
        grant: Grant,
        /// True if the machine belongs to the node.
        took: bool,
    },
}

/// The primary's end of a connection.
pub(crate) type PrimaryLink = Link<Say, Hear>;
/// The backup's end of a connection.
pub(crate) type BackupLink = Link<Hear, Say>;

pub(crate) fn primary_link(connection: godwit_peers::PeerConnection) -> PrimaryLink {
    Link::open(connection, || Say::Beat, |hear| matches!(hear, Hear::Beat))
}

pub(crate) fn backup_link(connection: godwit_peers::PeerConnection) -> BackupLink {
    Link::open(connection, || Hear::Beat, |say| matches!(say, Say::Beat))
}
