//! The state kept across restarts: disks, their authority records, past migrations, VMs, moves of processes, and
//! grants of protected machines.

mod database;
mod entries;
pub mod grants;
pub mod history;
mod ids;
pub mod machine;
mod nics;
pub mod process_moves;
pub mod surpassed;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use godwit_core::authority::AuthorityRecord;
use godwit_core::units::DiskId;
use godwit_qemu::machine::MachineNic;
use redb::{Database, ReadTransaction, ReadableTable, TableDefinition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use self::database::SharedDatabase;
use self::history::History;
use self::surpassed::Surpassed;
use crate::store::machine::VmEntry;
use crate::store::machine::protections::ProtectionEntry;
use godwit_api::{Migration, VmMigration};

/// The format of this build. A later format is refused.
const FORMAT: u64 = 1;

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const DISKS: TableDefinition<&str, &[u8]> = TableDefinition::new("disks");
const AUTHORITY: TableDefinition<&str, &[u8]> = TableDefinition::new("authority");
const VMS: TableDefinition<&str, &[u8]> = TableDefinition::new("vms");
const NICS: TableDefinition<&str, &[u8]> = TableDefinition::new("nics");
const PROTECTIONS: TableDefinition<&str, &[u8]> = TableDefinition::new("protections");
const PROCESS_MOVES: TableDefinition<&str, &[u8]> = TableDefinition::new("process_moves");
const GRANTS: TableDefinition<&str, &[u8]> = TableDefinition::new("grants");

/// A disk as stored, beside its authority record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskEntry {
    /// The id, which distinguishes disks of the same name; nothing if an earlier version stored the disk.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "ids")]
    pub id: Option<DiskId>,
    /// Path of the image.
    pub path: PathBuf,
    /// The disk's size in sectors.
    pub sectors: u64,
    /// True if the node manages the image.
    pub managed: bool,
    /// The other node of the last or current migration.
    pub counterpart: Option<String>,
    /// The node to which the disk was moved.
    pub moved_to: Option<String>,
    /// The change under way, which a restart finishes or undoes.
    pub mark: Option<Mark>,
    /// True if more than one party may have written to the disk since it came here. Decides the fate of forwarded
    /// writes with answers lost in a crash.
    #[serde(default)]
    pub shared: bool,
    /// The image from which the disk was created here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseImage>,
    /// Set if another node has had the disk since: this node, the owner by its own record, holds the disk's I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub surpassed: Option<Surpassed>,
    /// Set while the image of a departed disk still equals the disk as it left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<KeptImage>,
    /// Bandwidth limit of the last migration away from here, in bytes per second, including later pulls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth: Option<u64>,
    /// True if an operator declared the missing parts lost: requests no longer wait for these parts.
    #[serde(default)]
    pub abandoned: bool,
}

/// The image of a departed disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptImage {
    /// The migration by which the disk left, in hexadecimal.
    pub migration: String,
    /// The image's [`godwit_block::image::Fingerprint`] at the departure.
    pub fingerprint: [u64; 6],
}

/// The image from which a disk was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseImage {
    /// The name at the creation.
    pub image: String,
    /// The manifest's name, which identifies the content.
    pub manifest: String,
    /// The id that stands for a migration in the disk's record while a part of the image is missing here, in
    /// hexadecimal.
    pub fetch: String,
    /// True if all parts are fetched, not only the ones that are read.
    pub prefetch: bool,
    /// The time of the push under the name, like `2025-01-31T12:00:00Z`, according to the repository while the name
    /// stood for the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pushed: Option<String>,
}

/// A change under way, for a restart to finish or undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// The image is being made or copied in: a restart removes the image and the entry.
    Creating,
    /// The disk is being enlarged. A restart checks whether the image already is.
    Resizing {
        /// The new size in sectors.
        sectors: u64,
    },
    /// The disk is being received. If `new` and not accepted, a restart removes the image and the entry.
    Receiving {
        /// The migration, in hexadecimal.
        migration: String,
        /// True if the disk was unknown here before.
        new: bool,
    },
    /// The disk is being removed: a restart goes on.
    Removing,
}

impl DiskEntry {
    /// Returns the image from which the disk with this record still fetches.
    pub fn fetches(&self, record: &AuthorityRecord) -> Option<&BaseImage> {
        let lacks = record.lacks()?.to_string();
        self.base.as_ref().filter(|base| base.fetch == lacks)
    }

    /// Brings the entry in line with a new authority record; both are stored together.
    pub fn adopt(&mut self, record: &AuthorityRecord) {
        use godwit_core::authority::Ownership;
        self.surpassed
            .take_if(|surpassed| record.epoch.0 > surpassed.epoch);
        self.abandoned &= record.lacks().is_some();
        match record.ownership {
            Ownership::Serving => {
                self.moved_to = None;
                self.mark = None;
                self.kept = None;
            }
            Ownership::Departed { .. } => self.moved_to = self.counterpart.clone(),
            // Only an owner can be surpassed.
            Ownership::Vacant => self.surpassed = None,
            Ownership::Accepted { .. } | Ownership::Relinquished { .. } => {}
        }
    }
}

/// Everything in the store.
#[derive(Debug)]
pub struct Contents {
    /// Name, entry and record of each disk.
    pub disks: Vec<(String, DiskEntry, AuthorityRecord)>,
    /// Migrations by their number, oldest first.
    pub migrations: Vec<(u64, Migration)>,
    /// Name and entry of each VM.
    pub vms: Vec<(String, VmEntry)>,
    /// NICs with names of their own.
    pub nics: Vec<(String, MachineNic)>,
    /// Protections by the name of their VM.
    pub protections: Vec<(String, ProtectionEntry)>,
    /// Moves of VMs by their number, oldest first.
    pub vm_migrations: Vec<(u64, VmMigration)>,
}

/// The reason why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store cannot be opened.
    #[error("cannot open the store {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of redb.
        source: redb::Error,
    },
    /// A later version wrote the store.
    #[error("the store has format {found}, this version knows {FORMAT}: run the newer godwit")]
    Format {
        /// The format found.
        found: u64,
    },
    /// Reading or writing failed.
    #[error("the store failed: {0}")]
    Database(#[from] redb::Error),
    /// An entry is not valid for this version.
    #[error("the store's entry {key:?} is damaged: {why}")]
    Damaged {
        /// The entry.
        key: String,
        /// The error.
        why: String,
    },
    /// The store is closed, because the node ends.
    #[error("the store is closed")]
    Ended,
}

/// The store. Clones share the database; every write is durable when its future is ready.
#[derive(Clone, Debug)]
pub struct Store {
    database: SharedDatabase,
}

impl Store {
    /// Opens or creates the store. Blocks.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let database = SharedDatabase::open(path, prepare)?;
        Ok(Self { database })
    }

    /// Closes the store: later users get errors. Blocks.
    pub fn close(&self) {
        self.database.close();
    }

    /// Reads everything. Blocks.
    pub fn load(&self) -> Result<Contents, StoreError> {
        let read = self.database.begin_read()?;
        let authority = read.open_table(AUTHORITY).map_err(redb::Error::from)?;
        let mut disks = Vec::new();
        for (name, entry) in rows(&read, DISKS, "disk", str::to_owned)? {
            let record = authority
                .get(name.as_str())
                .map_err(redb::Error::from)?
                .and_then(|bytes| AuthorityRecord::from_bytes(bytes.value().try_into().ok()?))
                .ok_or_else(|| StoreError::Damaged {
                    key: format!("disk {name}"),
                    why: String::from("its authority record is missing or wrong"),
                })?;
            disks.push((name, entry, record));
        }
        Ok(Contents {
            disks,
            migrations: history::load(&read)?,
            vms: rows(&read, VMS, "VM", str::to_owned)?,
            nics: rows(&read, NICS, "NIC", str::to_owned)?,
            protections: rows(&read, PROTECTIONS, "protection", str::to_owned)?,
            vm_migrations: history::load(&read)?,
        })
    }

    /// Removes a disk.
    pub async fn remove_disk(&self, name: &str) -> Result<(), StoreError> {
        let name = name.to_owned();
        self.database
            .write(move |write| {
                write.open_table(DISKS)?.remove(name.as_str())?;
                write.open_table(AUTHORITY)?.remove(name.as_str())?;
                Ok(())
            })
            .await
    }

    /// Stores a VM.
    pub async fn put_vm(&self, name: &str, entry: &VmEntry) -> Result<(), StoreError> {
        self.put(VMS, name, entry).await
    }

    /// Stores the value of a name in a table.
    async fn put(
        &self,
        table: TableDefinition<'static, &'static str, &'static [u8]>,
        name: &str,
        value: &impl Serialize,
    ) -> Result<(), StoreError> {
        let bytes = json(name, value)?;
        let name = name.to_owned();
        self.database
            .write(move |write| {
                let mut table = write.open_table(table)?;
                table.insert(name.as_str(), bytes.as_slice())?;
                Ok(())
            })
            .await
    }

    /// Stores the owner of disks together with the VM that uses them and the VM's protection, in one step.
    pub async fn put_group(
        &self,
        disks: &[(String, DiskEntry, AuthorityRecord)],
        vm: &str,
        entry: &VmEntry,
        protection: Option<&ProtectionEntry>,
    ) -> Result<(), StoreError> {
        let vm = vm.to_owned();
        let entry = json(&vm, entry)?;
        let protection = protection.map(|entry| json(&vm, entry)).transpose()?;
        let disks = disks
            .iter()
            .map(|(name, entry, record)| Ok((name.clone(), json(name, entry)?, *record)))
            .collect::<Result<Vec<_>, StoreError>>()?;
        self.database
            .write(move |write| {
                let mut entries = write.open_table(DISKS)?;
                let mut records = write.open_table(AUTHORITY)?;
                for (name, entry, record) in &disks {
                    entries.insert(name.as_str(), entry.as_slice())?;
                    records.insert(name.as_str(), record.to_bytes().as_slice())?;
                }
                write
                    .open_table(VMS)?
                    .insert(vm.as_str(), entry.as_slice())?;
                if let Some(protection) = &protection {
                    write
                        .open_table(PROTECTIONS)?
                        .insert(vm.as_str(), protection.as_slice())?;
                }
                Ok(())
            })
            .await
    }

    /// Removes a VM.
    pub async fn remove_vm(&self, name: &str) -> Result<(), StoreError> {
        let name = name.to_owned();
        self.database
            .write(move |write| {
                write.open_table(VMS)?.remove(name.as_str())?;
                Ok(())
            })
            .await
    }
}

/// Makes the tables of a new store, and checks the format of an existing one.
fn prepare(database: &Database) -> Result<(), StoreError> {
    let write = database.begin_write().map_err(redb::Error::from)?;
    {
        let mut meta = write.open_table(META).map_err(redb::Error::from)?;
        let found = meta
            .get("format")
            .map_err(redb::Error::from)?
            .map(|format| format.value());
        match found {
            None => {
                meta.insert("format", FORMAT).map_err(redb::Error::from)?;
            }
            Some(FORMAT) => {}
            Some(found) => return Err(StoreError::Format { found }),
        }
        write.open_table(DISKS).map_err(redb::Error::from)?;
        write.open_table(AUTHORITY).map_err(redb::Error::from)?;
        write
            .open_table(Migration::TABLE)
            .map_err(redb::Error::from)?;
        write.open_table(VMS).map_err(redb::Error::from)?;
        write.open_table(NICS).map_err(redb::Error::from)?;
        write
            .open_table(VmMigration::TABLE)
            .map_err(redb::Error::from)?;
        write.open_table(PROCESS_MOVES).map_err(redb::Error::from)?;
        write.open_table(PROTECTIONS).map_err(redb::Error::from)?;
        write.open_table(GRANTS).map_err(redb::Error::from)?;
    }
    write.commit().map_err(redb::Error::from)?;
    Ok(())
}

/// Reads the keys and values of a table. An error names an entry by `what` and the key.
fn rows<K: redb::Key + 'static, N: Display, V: DeserializeOwned>(
    read: &ReadTransaction,
    table: TableDefinition<'static, K, &'static [u8]>,
    what: &str,
    own: impl Fn(K::SelfType<'_>) -> N,
) -> Result<Vec<(N, V)>, StoreError> {
    let table = read.open_table(table).map_err(redb::Error::from)?;
    let mut rows = Vec::new();
    for item in table.iter().map_err(redb::Error::from)? {
        let (key, value) = item.map_err(redb::Error::from)?;
        let key = own(key.value());
        let value = serde_json::from_slice(value.value()).map_err(|error| StoreError::Damaged {
            key: format!("{what} {key}"),
            why: error.to_string(),
        })?;
        rows.push((key, value));
    }
    Ok(rows)
}

fn json(key: &str, value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(value).map_err(|error| StoreError::Damaged {
        key: key.to_owned(),
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_core::authority::Ownership;
    use godwit_core::units::{Epoch, MigrationId, Sectors};

    fn entry() -> DiskEntry {
        let path = PathBuf::from("/images/root.raw");
        DiskEntry {
            managed: true,
            counterpart: Some(String::from("b")),
            ..DiskEntry::new(DiskId([4; 16]), path, Sectors(2048))
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_stored_is_there_after_reopening() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store");
        let record = AuthorityRecord {
            epoch: Epoch(7),
            ownership: Ownership::Departed {
                migration: MigrationId([9; 16]),
            },
            remainder: None,
        };
        let mut stored = entry();
        stored.adopt(&record);
        assert_eq!(stored.moved_to.as_deref(), Some("b"));
        {
            let store = Store::open(&path).expect("opens");
            store
                .put_disk("root", &stored, record)
                .await
                .expect("stores");
            store
                .put_disk("gone", &entry(), AuthorityRecord::created())
                .await
                .expect("stores");
            store.remove_disk("gone").await.expect("removes");
            // The thread of the last write may still hold the database.
            store.close();
        }
        let contents = Store::open(&path)
            .expect("opens again")
            .load()
            .expect("loads");
        assert_eq!(contents.disks, [(String::from("root"), stored, record)]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_damaged_record_is_an_error_that_names_the_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store")).expect("opens");
        store
            .put_disk("root", &entry(), AuthorityRecord::created())
            .await
            .expect("stores");
        store
            .database
            .write(|write| {
                write
                    .open_table(AUTHORITY)?
                    .insert("root", [7_u8; 3].as_slice())?;
                Ok(())
            })
            .await
            .expect("writes");
        let error = store.load().expect_err("the record is damaged").to_string();
        assert!(error.contains("disk root"), "{error}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_later_format_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store");
        {
            let store = Store::open(&path).expect("opens");
            store
                .database
                .write(|write| {
                    write.open_table(META)?.insert("format", FORMAT + 1)?;
                    Ok(())
                })
                .await
                .expect("writes");
            store.close();
        }
        assert!(matches!(
            Store::open(&path),
            Err(StoreError::Format { found: 2 })
        ));
    }
}
