//! State that saves a moving disk from being sent whole. The node that the disk left knows whether its image is still
//! the disk as it left. The node with the disk knows the blocks written since, and the blocks that differ from the base
//! image.
//!
//! Uncertain state is not used. An image counts only while its fingerprint is the same as when the disk left. The
//! fingerprint is forgotten, durably, before any write to the image. The set of written blocks is in the engine's
//! memory, and on disk only between an orderly end and the next start: see [`godwit_block::image::written`].
//!
//! A node whose disk was taken by the follower has an [activity log](ActiveAreas) instead of a fingerprint.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_block::image::notes::{activity, written};
use godwit_block::image::{Fingerprint, Image};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{MigrationId, Sectors};
use godwit_core::wire::{Features, Reply};
use godwit_core::{ActiveAreas, OlderCopy, Written};

use crate::disks::Disks;
use crate::disks::disk::{Activity, Disk};
use crate::disks::lifecycle::run::STORE_RETRY;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::config::NodeConfig;
use godwit_context::store::{DiskEntry, KeptImage, Store, StoreError};
use godwit_context::{Context, blocking};

/// The sets of blocks of a disk, each with a folder in the data directory.
#[derive(Clone, Copy, Debug)]
pub enum Blocks {
    /// Blocks written since the disk came.
    Written,
    /// Blocks that differ from the disk's base image.
    Different,
    /// Blocks that equal the base image and are not holes there.
    Same,
}

/// Returns the file of a disk's set.
fn file(config: &NodeConfig, blocks: Blocks, disk: &str) -> PathBuf {
    let folder = match blocks {
        Blocks::Written => "written",
        Blocks::Different => "differs",
        Blocks::Same => "same",
    };
    config.data_dir.join(folder).join(disk)
}

/// Returns the file in which an engine stores a set at its end, or nothing if the folder cannot be made. Blocks.
pub fn prepare(config: &NodeConfig, blocks: Blocks, disk: &str) -> Option<PathBuf> {
    let path = file(config, blocks, disk);
    let folder = path.parent()?;
    match std::fs::create_dir_all(folder) {
        Ok(()) => Some(path),
        Err(error) => {
            tracing::warn!(disk, folder = %folder.display(), %error, "cannot make a folder");
            None
        }
    }
}

/// Takes the set stored by the engine before this one. Blocks.
pub fn take(
    config: &NodeConfig,
    blocks: Blocks,
    disk: &str,
    record: &AuthorityRecord,
    image: &Image,
) -> Option<Written> {
    let path = file(config, blocks, disk);
    match written::take(&path, image.capacity, image.fingerprint()) {
        Ok(found) => found.filter(|_| record.ownership == Ownership::Serving),
        Err(error) => {
            tracing::warn!(disk, path = %path.display(), %error, "cannot tell what was written to the disk");
            None
        }
    }
}

/// Returns the file of a disk's activity log.
fn log_file(config: &NodeConfig, disk: &str) -> PathBuf {
    config.data_dir.join("activity").join(disk)
}

/// Makes an engine's activity log durable, or removes the stored one. Retries the latter until success: the log must not
/// outlast what it tells of. Returns true if the log is stored.
pub async fn store_log(disks: &Disks, disk: &Disk, mut log: Option<ActiveAreas>) -> bool {
    let path = log_file(&disks.context.config, &disk.name);
    let capacity = Sectors(disk.lock().entry.sectors);
    loop {
        let (path, wanted) = (path.clone(), log.take());
        let stores = wanted.is_some();
        let stored = blocking(move || match wanted {
            Some(log) => {
                path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
                activity::store(&path, capacity, &log)
            }
            None => activity::remove(&path),
        });
        let error = match stored.await {
            Ok(Ok(())) => return stores,
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.message,
        };
        tracing::error!(disk = disk.name, error, "cannot store the activity log");
        if !stores {
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY) => {}
                () = disks.context.closed() => return false,
            }
        }
    }
}

/// Returns the stored activity log of a disk with this ownership. Blocks.
///
/// # Errors
/// The log may exist and cannot be read.
pub fn log(
    config: &NodeConfig,
    disk: &Disk,
    of: Ownership,
) -> Result<Option<ActiveAreas>, ErrorBody> {
    let (ownership, capacity) = {
        let inner = disk.lock();
        (inner.record.ownership, Sectors(inner.entry.sectors))
    };
    if ownership != of {
        return Ok(None);
    }
    let path = log_file(config, &disk.name);
    activity::load(&path, capacity).map_err(|error| {
        let (disk, path) = (&disk.name, path.display());
        let text = format!("cannot read the activity log {path} of disk {disk}: {error}");
        ErrorBody::new(ErrorCode::Internal, text)
            .hint("remove the file: the disk is then compared when it is synchronized")
    })
}

/// Removes the sets and the log of a removed disk.
pub async fn forget(disks: &Disks, disk: &Disk) {
    let config = &disks.context.config;
    let sets = [Blocks::Written, Blocks::Different, Blocks::Same];
    let paths = sets.map(|blocks| file(config, blocks, &disk.name));
    let log = log_file(config, &disk.name);
    // A remaining file belongs to another image than the next disk's.
    let _ = blocking(move || (paths.map(std::fs::remove_file), activity::remove(&log))).await;
}

/// Records that the image equals the disk as it left by this migration, while the image has this fingerprint. Without
/// the record, a move back costs more.
pub async fn keep(disks: &Disks, disk: &Disk, migration: MigrationId, fingerprint: Fingerprint) {
    let (entry, record) = {
        let mut inner = disk.lock();
        let left = inner.record.ownership == (Ownership::Departed { migration });
        if !left || matches!(inner.activity, Activity::Incoming(_) | Activity::Removing) {
            return;
        }
        inner.entry.kept = Some(KeptImage {
            migration: migration.to_string(),
            fingerprint: fingerprint.0,
        });
        (inner.entry.clone(), inner.record)
    };
    if let Err(error) = disks
        .context
        .store
        .put_disk(&disk.name, &entry, record)
        .await
    {
        tracing::warn!(disk = disk.name, %error, "cannot store that the disk's image may be of use");
    }
}

/// Returns the older copy of the disk at this node, which no longer owns the disk. Blocks.
pub fn held(entry: &DiskEntry, record: &AuthorityRecord) -> OlderCopy {
    let Ownership::Departed { migration } = record.ownership else {
        return OlderCopy::Unknown;
    };
    let is_as_it_was = entry.kept.as_ref().is_some_and(|kept| {
        kept.migration == migration.to_string()
            && Fingerprint::of_file(&entry.path) == Some(Fingerprint(kept.fingerprint))
    });
    match is_as_it_was {
        true => OlderCopy::Since(migration),
        false => OlderCopy::Unknown,
    }
}

/// Returns the acceptance of an offer by a node with these features. An image of which nothing else is known may have a
/// log.
pub(crate) async fn accepted(
    context: &Arc<Context>,
    disk: &Arc<Disk>,
    features: Features,
    older_copy: OlderCopy,
) -> Reply {
    if older_copy != OlderCopy::Unknown || !features.contain(Features::ACTIVITY) {
        return Reply::Accepted(older_copy);
    }
    let (context, disk) = (Arc::clone(context), Arc::clone(disk));
    let log = blocking(move || log(&context.config, &disk, Ownership::Vacant));
    match log.await {
        Ok(Ok(Some(log))) => Reply::AcceptedBut(log),
        _ => Reply::Accepted(older_copy),
    }
}

/// Forgets the fingerprint and the log of an image before a write.
///
/// # Errors
/// The change cannot be stored, so writes must not begin.
pub(crate) async fn spoil(context: &Context, disk: &Disk) -> Result<(), ErrorBody> {
    let path = log_file(&context.config, &disk.name);
    let removed = blocking(move || activity::remove(&path)).await?;
    let failed = |error: &dyn std::fmt::Display| {
        let text = format!("cannot write to the image of disk {}: {error}", disk.name);
        ErrorBody::new(ErrorCode::Internal, text)
    };
    removed.map_err(|error| failed(&error))?;
    let spoilt = spoil_fingerprint(&context.store, disk).await;
    spoilt.map_err(|error| failed(&error))
}

async fn spoil_fingerprint(store: &Store, disk: &Disk) -> Result<(), StoreError> {
    let (entry, record) = {
        let inner = disk.lock();
        if inner.entry.kept.is_none() {
            return Ok(());
        }
        let entry = DiskEntry {
            kept: None,
            ..inner.entry.clone()
        };
        (entry, inner.record)
    };
    store.put_disk(&disk.name, &entry, record).await?;
    // Not earlier: a retry after a failure must store the change again.
    disk.lock().entry.kept = None;
    Ok(())
}

#[cfg(test)]
mod tests {
    use godwit_core::units::Epoch;

    use super::*;

    const LEFT: MigrationId = MigrationId([4; 16]);

    fn record(ownership: Ownership) -> AuthorityRecord {
        AuthorityRecord {
            epoch: Epoch(3),
            ownership,
            remainder: None,
        }
    }

    /// Returns the entry of a departed disk with this image.
    fn entry(image: PathBuf) -> DiskEntry {
        let fingerprint = Fingerprint::of_file(&image).expect("a file");
        DiskEntry {
            id: None,
            path: image,
            sectors: 8,
            managed: true,
            counterpart: Some(String::from("b")),
            moved_to: Some(String::from("b")),
            mark: None,
            shared: false,
            base: None,
            surpassed: None,
            kept: Some(KeptImage {
                migration: LEFT.to_string(),
                fingerprint: fingerprint.0,
            }),
            max_bandwidth: None,
            abandoned: false,
        }
    }

    fn image(folder: &tempfile::TempDir) -> PathBuf {
        let path = folder.path().join("image");
        std::fs::write(&path, [0; 4096]).expect("an image");
        path
    }

    #[test]
    fn an_image_counts_for_the_migration_by_which_the_disk_left_and_while_nobody_has_touched_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = entry(image(&folder));
        let departed = |migration| record(Ownership::Departed { migration });
        assert_eq!(held(&entry, &departed(LEFT)), OlderCopy::Since(LEFT));
        let another = departed(MigrationId([5; 16]));
        assert_eq!(held(&entry, &another), OlderCopy::Unknown);
        // This node had accepted the disk, but the disk stayed at the source.
        assert_eq!(held(&entry, &record(Ownership::Vacant)), OlderCopy::Unknown);
        // The modification time must differ even with a coarse clock.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&entry.path, [1; 4096]).expect("written");
        assert_eq!(held(&entry, &departed(LEFT)), OlderCopy::Unknown);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nobody_writes_to_an_image_before_it_is_stored_that_it_counts_no_more() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store");
        let departed = record(Ownership::Departed { migration: LEFT });
        let entry = entry(image(&folder));
        let disk = Disk::new(String::from("d"), entry.clone(), departed, Activity::Idle);
        let store = Store::open(&path).expect("opens");
        store
            .put_disk("d", &entry, departed)
            .await
            .expect("it is stored");
        store.close();
        // Every attempt fails.
        for _ in 0..2 {
            spoil_fingerprint(&store, &disk)
                .await
                .expect_err("nothing is stored");
        }
        let store = Store::open(&path).expect("opens again");
        spoil_fingerprint(&store, &disk)
            .await
            .expect("it is stored");
        let stored = store.load().expect("loads").disks;
        assert_eq!(stored[0].1.kept, None);
        assert_eq!(disk.lock().entry.kept, None);
    }
}
