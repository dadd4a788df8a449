//! The missing parts of a disk that changed hands before its whole content had arrived. The record of these parts is
//! stored beside the node's other state, and loaded when the disk is started.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_block::engine::{EngineHandle, MissingSnapshot};
use godwit_block::image::notes::missing::{self, MissingNotes};
use godwit_core::Missing;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::Sectors;

use crate::disks::Disks;
use crate::disks::disk::Disk;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::config::NodeConfig;

/// Time between two attempts to store.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// Returns the file for a disk of this name.
fn file(config: &NodeConfig, disk: &str) -> PathBuf {
    config.data_dir.join("missing").join(disk)
}

/// Returns the file for a new disk, after making its folder. Blocks.
///
/// # Errors
/// The folder cannot be made.
pub fn prepare(config: &NodeConfig, disk: &str) -> std::io::Result<PathBuf> {
    let path = file(config, disk);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(path)
}

/// Stores the missing parts and tells the engine. Retries until success or the node's end.
pub async fn store(
    disks: Arc<Disks>,
    disk: Arc<Disk>,
    engine: EngineHandle,
    snapshot: MissingSnapshot,
) {
    let snapshot = Arc::new(snapshot);
    let capacity = Sectors(disk.lock().entry.sectors);
    loop {
        let (path, it) = (
            file(&disks.context.config, &disk.name),
            Arc::clone(&snapshot),
        );
        let stored = blocking(move || -> std::io::Result<Option<MissingNotes>> {
            let Some(first) = &it.first else {
                return missing::store(&path, capacity, &it.pieces).map(|()| None);
            };
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let at_source = first.at_source.as_deref();
            let (pieces, heat) = (&it.pieces, &first.heat);
            missing::create(&path, capacity, it.migration, pieces, heat, at_source).map(Some)
        });
        let error = match stored.await {
            Ok(Ok(notes)) => return engine.missing_stored(notes),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.message,
        };
        tracing::error!(
            disk = disk.name,
            error,
            "cannot store what the disk lacks; trying again"
        );
        tokio::select! {
            () = tokio::time::sleep(STORE_RETRY) => {}
            () = disks.context.closed() => return,
        }
    }
}

/// Loads the missing parts of a disk, if the authority record has a remainder.
///
/// # Errors
/// This node serves the disk, and the file cannot be read.
pub fn load(
    config: &NodeConfig,
    disk: &str,
    capacity: Sectors,
    record: &AuthorityRecord,
) -> Result<Option<(Missing, MissingNotes)>, ErrorBody> {
    let serves = record.ownership == Ownership::Serving;
    let accepted = matches!(record.ownership, Ownership::Accepted { .. });
    let Some(migration) = record.remainder.filter(|_| serves || accepted) else {
        return Ok(None);
    };
    let path = file(config, disk);
    let why = match missing::load(&path, capacity, migration) {
        Ok(Some(found)) => return Ok(Some(found)),
        // The source has not been told of the acceptance, and goes on serving.
        Ok(None) if accepted => return Ok(None),
        Ok(None) => String::from("there is nothing of this migration"),
        Err(error) => error.to_string(),
    };
    let text = format!(
        "disk {disk} lacks a part, which is not here yet, and {} does not say which: {why}",
        path.display()
    );
    Err(ErrorBody::new(ErrorCode::Internal, text)
        .hint("bring that file back as it was, and start the node again"))
}

/// Removes the file of a disk that is whole, or did not come after all.
pub async fn forget(disks: &Disks, disk: &Disk) {
    let path = file(&disks.context.config, &disk.name);
    let shown = path.display().to_string();
    match blocking(move || missing::remove(&path)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(disk = disk.name, path = shown, %error, "cannot remove what nobody needs");
        }
        Err(error) => tracing::warn!(disk = disk.name, %error, "cannot remove what nobody needs"),
    }
}
