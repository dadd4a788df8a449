//! Virtual machines as stored.

pub mod protections;

use std::path::PathBuf;

use godwit_qemu::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::store::surpassed::Surpassed;

/// A VM as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmEntry {
    /// The id, which distinguishes VMs of the same name, in hexadecimal; empty if an earlier version stored the VM.
    #[serde(default)]
    pub id: String,
    /// Number of owners of the VM so far, from 1: the epoch of the latest owner.
    #[serde(default = "first")]
    pub epoch: u64,
    /// The configuration of the machine.
    pub machine: Machine,
    /// The socket of QEMU's monitor.
    pub qmp: PathBuf,
    /// The way in which the machine came to this node.
    pub origin: VmOrigin,
    /// The change under way, which a restart finishes or undoes.
    pub mark: Option<VmMark>,
    /// The ids of the disks, in hexadecimal, while the VM arrives: disks with other ids are not the VM's.
    #[serde(default)]
    pub disk_ids: Vec<String>,
    /// The node to which the VM moved.
    pub moved_to: Option<String>,
    /// The migration by which the VM left, in hexadecimal.
    #[serde(default)]
    pub left_by: Option<String>,
    /// Set if another node has had the VM, or the VM's memory, since: the VM stands still here.
    #[serde(default)]
    pub surpassed: Option<Surpassed>,
    /// The VM's memory, if in a memory pool.
    #[serde(default)]
    pub memory: Option<PooledMemory>,
    /// The names of the NICs from before the VM's adoption by this node, in order: QEMU uses the NICs' sockets.
    #[serde(default)]
    pub named_nics: Vec<String>,
    /// The reason for the end of QEMU, if ended, as the end of a sentence.
    #[serde(default)]
    pub ended: Option<String>,
}

/// The memory of a VM in a memory pool: a segment of the VM's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledMemory {
    /// The pool's name.
    pub pool: String,
    /// The segment's id in hexadecimal; empty until the segment is allocated.
    pub id: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The epoch of the last offered title.
    pub epoch: u64,
    /// The next owner of the segment, stored with the machine's departure, before the segment is handed over.
    #[serde(default)]
    pub given_to: Option<String>,
}

impl VmEntry {
    /// Returns true if the VM's memory may be on its way here.
    pub const fn receives(&self) -> bool {
        matches!(
            self.mark,
            Some(VmMark::Incoming { .. } | VmMark::Pulling { .. })
        )
    }
}

/// The origin of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmOrigin {
    /// This node started the VM.
    Run,
    /// Another program started the VM, and this node adopted it.
    Adopted,
    /// The VM came from another node.
    Received {
        /// The node.
        from: String,
    },
}

/// A change under way, for a restart to finish or undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmMark {
    /// QEMU is being started: a restart ends QEMU and forgets the VM.
    Starting,
    /// This node has taken the VM over from a lost node: a restart starts QEMU anew.
    Taken,
    /// The VM arrives. The VM may run once this node owns all disks, which change hands together or not at all.
    Incoming {
        /// The migration, in hexadecimal.
        migration: String,
        /// True if the VM is to run before all its memory is here.
        #[serde(default)]
        pulls: bool,
        /// True if the guest ran at the source. Otherwise the guest stands still here too.
        #[serde(default = "yes")]
        runs: bool,
    },
    /// The VM runs here, and QEMU waits for the rest of its memory.
    Pulling {
        /// The migration, in hexadecimal.
        migration: String,
        /// The node with the rest.
        from: String,
    },
    /// The VM leaves, as long as its disks have not left.
    Outgoing {
        /// The migration, in hexadecimal.
        migration: String,
        /// The destination.
        to: String,
        /// True if the guest would run without the move.
        #[serde(default = "yes")]
        runs: bool,
    },
    /// The VM moved away, and this node's QEMU has the rest of its memory. QEMU must last until the rest has moved, and
    /// must never run the guest.
    Giving {
        /// The migration, in hexadecimal.
        migration: String,
    },
}

const fn yes() -> bool {
    true
}

const fn first() -> u64 {
    1
}
