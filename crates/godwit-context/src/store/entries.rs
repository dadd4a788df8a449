//! Entries of disks: stored together with the authority record, or changed alone.

use std::path::PathBuf;

use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{DiskId, Sectors};
use redb::ReadableTable;

use super::{AUTHORITY, DISKS, DiskEntry, Store, StoreError, json};

impl DiskEntry {
    /// Returns the entry of a disk that begins at this node, in a file that the node did not make.
    pub fn new(id: DiskId, path: PathBuf, sectors: Sectors) -> Self {
        Self {
            id: Some(id),
            path,
            sectors: sectors.0,
            managed: false,
            counterpart: None,
            moved_to: None,
            shared: false,
            base: None,
            surpassed: None,
            kept: None,
            max_bandwidth: None,
            abandoned: false,
            mark: None,
        }
    }
}

impl Store {
    /// Stores a disk and its authority record in one step.
    pub async fn put_disk(
        &self,
        name: &str,
        entry: &DiskEntry,
        record: AuthorityRecord,
    ) -> Result<(), StoreError> {
        let name = name.to_owned();
        let entry = json(&name, entry)?;
        self.database
            .write(move |write| {
                write
                    .open_table(DISKS)?
                    .insert(name.as_str(), entry.as_slice())?;
                write
                    .open_table(AUTHORITY)?
                    .insert(name.as_str(), record.to_bytes().as_slice())?;
                Ok(())
            })
            .await
    }

    /// Changes the stored entry of a disk, but not its authority record, which may be stored anew at the same time.
    /// Does nothing for an unknown disk.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn change_disk(
        &self,
        name: &str,
        change: impl Fn(&mut DiskEntry) + Send + 'static,
    ) -> Result<(), StoreError> {
        let name = name.to_owned();
        self.database
            .write(move |write| {
                let mut disks = write.open_table(DISKS)?;
                let stored = disks
                    .get(name.as_str())?
                    .and_then(|entry| serde_json::from_slice::<DiskEntry>(entry.value()).ok());
                let changed = stored.and_then(|mut entry| {
                    change(&mut entry);
                    serde_json::to_vec(&entry).ok()
                });
                if let Some(changed) = changed {
                    disks.insert(name.as_str(), changed.as_slice())?;
                }
                Ok(())
            })
            .await
    }
}
