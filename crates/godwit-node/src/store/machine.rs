//! Virtual machines as they are stored.

use std::path::PathBuf;

use godwit_qemu::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::store::surpassed::Surpassed;

/// A VM as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmEntry {
    /// What tells it from other machines of its name, in hexadecimal; empty when an earlier version stored it.
    #[serde(default)]
    pub(crate) id: String,
    /// Counts the nodes that it was given to, from 1. It is that of the node that it was given to last.
    #[serde(default = "first")]
    pub(crate) epoch: u64,
    /// How it is started.
    pub(crate) machine: Machine,
    /// The socket of its QEMU's monitor.
    pub(crate) qmp: PathBuf,
    /// Where it came from.
    pub(crate) origin: VmOrigin,
    /// What was under way: a restart finishes or undoes it.
    pub(crate) mark: Option<VmMark>,
    /// What tells each of its disks from others of their names, in hexadecimal, while it arrives: others are not its own.
    #[serde(default)]
    pub(crate) disk_ids: Vec<String>,
    /// The node that it moved to.
    pub(crate) moved_to: Option<String>,
    /// The migration by which it did, in hexadecimal.
    #[serde(default)]
    pub(crate) left_by: Option<String>,
    /// Another node has had it, or its memory, since: it stands still here.
    #[serde(default)]
    pub(crate) surpassed: Option<Surpassed>,
    /// Its memory, when that is in a memory pool.
    #[serde(default)]
    pub(crate) memory: Option<PooledMemory>,
    /// The names that its NICs had before this node adopted it, in their order: its QEMU uses their sockets.
    #[serde(default)]
    pub(crate) named_nics: Vec<String>,
    /// Why its QEMU ended, when it has: a sentence's end.
    #[serde(default)]
    pub(crate) ended: Option<String>,
}

/// The memory of a VM in a memory pool: a segment of the VM's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PooledMemory {
    /// The pool.
    pub(crate) pool: String,
    /// The segment's id in hexadecimal; empty until it is allocated.
    pub(crate) id: String,
    /// Bytes.
    pub(crate) bytes: u64,
    /// The epoch of the title that was offered last.
    pub(crate) epoch: u64,
    /// Whom the segment goes to: stored with the machine's departure, before the segment says so.
    #[serde(default)]
    pub(crate) given_to: Option<String>,
}

impl VmEntry {
    /// Whether the VM's memory may be on its way here.
    pub(crate) const fn receives(&self) -> bool {
        matches!(
            self.mark,
            Some(VmMark::Incoming { .. } | VmMark::Pulling { .. })
        )
    }
}

/// Where a VM came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum VmOrigin {
    /// This node started it.
    Run,
    /// Somebody else started it, and this node took it over.
    Adopted,
    /// It came from another node.
    Received {
        /// Which node.
        from: String,
    },
}

/// Something under way that a restart must finish or undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum VmMark {
    /// Its QEMU is being started: a restart ends it and forgets the VM.
    Starting,
    /// It arrives. It may run once all its disks are this node's, which they are all or not at all.
    Incoming {
        /// Which migration, in hexadecimal.
        migration: String,
        /// Whether it is to run before all its memory is here.
        #[serde(default)]
        pulls: bool,
        /// Whether its guest ran at the source: it stands still here as it stood there otherwise.
        #[serde(default = "yes")]
        runs: bool,
    },
    /// It runs here, and its QEMU waits for the rest of its memory.
    Pulling {
        /// Which migration, in hexadecimal.
        migration: String,
        /// The node that has the rest.
        from: String,
    },
    /// It leaves, as long as its disks have not.
    Outgoing {
        /// Which migration, in hexadecimal.
        migration: String,
        /// The node it goes to.
        to: String,
        /// Whether its guest runs, but for the move.
        #[serde(default = "yes")]
        runs: bool,
    },
    /// It moved away, and this node's QEMU has the rest of its memory. That QEMU must last until the
    /// rest has moved, and must never run the guest.
    Giving {
        /// Which migration, in hexadecimal.
        migration: String,
    },
}

const fn yes() -> bool {
    true
}

const fn first() -> u64 {
    1
}
