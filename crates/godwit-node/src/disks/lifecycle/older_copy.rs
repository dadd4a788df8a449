//! What is kept so that a disk that comes back need not be sent whole: where it left, that its image still is what the
//! disk was then; where it is, what was written since.
//!
//! Both are to be certain, or not to be relied on. An image counts only while its fingerprint is the one that it had
//! when the disk had left, and is forgotten, durably, before anybody may write to it. What was written is in the
//! engine's memory, and on disk only between an orderly end and the next start: see [`godwit_block::image::written`].

use std::path::PathBuf;
use std::sync::Arc;

use godwit_block::image::{Fingerprint, Image, written};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::MigrationId;
use godwit_core::{OlderCopy, Written};

use crate::config::NodeConfig;
use crate::disks::disk::{Activity, Disk};
use crate::node::{Node, blocking};
use crate::store::{DiskEntry, KeptImage, StoreError};

/// Where it is stored what was written to a disk of this name.
fn file(config: &NodeConfig, disk: &str) -> PathBuf {
    config.data_dir.join("written").join(disk)
}

/// Where an engine is to store at its end what was written; nothing when there can be no such file. Blocks.
pub(crate) fn prepare(config: &NodeConfig, disk: &str) -> Option<PathBuf> {
    let path = file(config, disk);
    let folder = path.parent()?;
    match std::fs::create_dir_all(folder) {
        Ok(()) => Some(path),
        Err(error) => {
            tracing::warn!(disk, folder = %folder.display(), %error, "cannot make a folder");
            None
        }
    }
}

/// Takes what an engine before this one stored of what was written to the image. Blocks.
pub(crate) fn take_written(
    config: &NodeConfig,
    disk: &str,
    record: &AuthorityRecord,
    image: &Image,
) -> Option<Written> {
    let path = file(config, disk);
    match written::take(&path, image.capacity, image.fingerprint()) {
        Ok(found) => found.filter(|_| record.ownership == Ownership::Serving),
        Err(error) => {
            tracing::warn!(disk, path = %path.display(), %error, "cannot tell what was written to the disk");
            None
        }
    }
}

/// The disk is removed.
pub(crate) async fn forget(node: &Node, disk: &Disk) {
    let path = file(&node.config, &disk.name);
    // One that stays is of another image than the next disk's.
    let _ = blocking(move || std::fs::remove_file(path)).await;
}

/// Remembers that the image is what the disk was when it left by this migration, as long as it has this fingerprint.
/// Without that a move back costs more.
pub(crate) async fn keep(
    node: &Node,
    disk: &Disk,
    migration: MigrationId,
    fingerprint: Fingerprint,
) {
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
    if let Err(error) = node.store.put_disk(&disk.name, &entry, record).await {
        tracing::warn!(disk = disk.name, %error, "cannot store that the disk's image may be of use");
    }
}

/// What this node, which no longer has the disk, holds of it. Blocks.
pub(crate) fn held(entry: &DiskEntry, record: &AuthorityRecord) -> OlderCopy {
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

/// The image is about to be written to.
///
/// # Errors
/// That cannot be stored, so nobody may write there.
pub(crate) async fn spoil(node: &Node, disk: &Arc<Disk>) -> Result<(), StoreError> {
    let (entry, record) = {
        let mut inner = disk.lock();
        if inner.entry.kept.take().is_none() {
            return Ok(());
        }
        (inner.entry.clone(), inner.record)
    };
    node.store.put_disk(&disk.name, &entry, record).await
}
