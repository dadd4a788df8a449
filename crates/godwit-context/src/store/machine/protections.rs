//! Protections of virtual machines as stored.

use godwit_api::WhenAlone;
use godwit_protect::{Grant, Member, PrimaryRecord};
use godwit_qemu::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::store::{PROTECTIONS, Store, StoreError};

/// The protection of a VM, at either of its nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectionEntry {
    /// The id, the same at both nodes and at the witness, in hexadecimal.
    pub id: String,
    /// The other node.
    pub peer: String,
    /// This node's name in the pair.
    pub me: Member,
    /// The witness as given by the user, if any.
    pub witness: Option<String>,
    /// The decision of a node that is alone and has no witness.
    pub when_alone: WhenAlone,
    /// Milliseconds of silence after which the other node counts as lost.
    pub timeout_ms: u64,
    /// Limit of each disk's synchronization, in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// The backup's pool for the disks.
    pub pool: Option<String>,
    /// Checkpoints a second. `None` if the machine would be started anew.
    #[serde(default)]
    pub checkpoints_per_second: Option<u32>,
    /// This node's part.
    pub part: ProtectionPart,
}

/// A node's part in a protection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProtectionPart {
    /// The node runs the machine.
    Primary(PrimaryRecord),
    /// The node takes over.
    Backup(Box<BackupEntry>),
}

/// The knowledge of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupEntry {
    /// The newest known grant.
    pub known: Grant,
    /// The machine's id.
    pub machine_id: String,
    /// The epoch of the machine at its primary.
    pub epoch: u64,
    /// The configuration of the machine.
    pub machine: Machine,
}

impl ProtectionEntry {
    /// Returns the record of a primary.
    pub const fn primary(&self) -> Option<&PrimaryRecord> {
        match &self.part {
            ProtectionPart::Primary(record) => Some(record),
            ProtectionPart::Backup(_) => None,
        }
    }

    /// Returns the knowledge of a backup.
    pub fn backup(&self) -> Option<&BackupEntry> {
        match &self.part {
            ProtectionPart::Primary(_) => None,
            ProtectionPart::Backup(backup) => Some(backup),
        }
    }
}

impl Store {
    /// Stores the protection of a VM.
    pub async fn put_protection(
        &self,
        vm: &str,
        entry: &ProtectionEntry,
    ) -> Result<(), StoreError> {
        self.put(PROTECTIONS, vm, entry).await
    }

    /// Removes the protection of a VM.
    pub async fn remove_protection(&self, vm: &str) -> Result<(), StoreError> {
        let vm = vm.to_owned();
        self.database
            .write(move |write| {
                write.open_table(PROTECTIONS)?.remove(vm.as_str())?;
                Ok(())
            })
            .await
    }
}
