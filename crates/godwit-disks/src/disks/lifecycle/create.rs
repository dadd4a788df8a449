//! New disks: empty ones, and existing images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{Bytes, DiskId, Sectors};

use crate::disks::Disks;
use crate::disks::disk::{Activity, Disk};
use crate::disks::storage::image;
use godwit_api::{CreateDisk, ErrorBody, ErrorCode, ImageFormat};
use godwit_context::blocking;
use godwit_context::ids::random_id;
use godwit_context::store::{DiskEntry, Mark};
use godwit_peers::names;

/// Creates a disk and serves it.
///
/// # Errors
/// The name or size is not valid, the name is taken, or the image cannot be made or used.
pub async fn create(disks: &Arc<Disks>, request: CreateDisk) -> Result<Arc<Disk>, ErrorBody> {
    names::check("disk", &request.name)?;
    match (request.path, request.size_bytes) {
        (Some(path), _) if request.preallocate => Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!("disk {}: {path} is used as it is", request.name),
        )
        .hint("leave --preallocate out, or let the node make an image of its own")),
        (Some(path), size) => {
            let path = PathBuf::from(path);
            attach(disks, request.name, path, size, request.format).await
        }
        (None, Some(size)) => create_managed(disks, request.name, size, request.preallocate).await,
        (None, None) => Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!("disk {} has neither a size nor a path", request.name),
        )
        .hint("give a size for a new image, or the path of an image that exists")),
    }
}

async fn create_managed(
    disks: &Arc<Disks>,
    name: String,
    size: u64,
    preallocate: bool,
) -> Result<Arc<Disk>, ErrorBody> {
    let sectors = checked_sectors(&name, size)?;
    let path = image::managed_path(&disks.context.config.disks_dir(), &name);
    let disk = reserve(disks, name, path, sectors).await?;
    let made = {
        let (name, path) = (disk.name.clone(), disk.lock().entry.path.clone());
        let here = disks.context.config.name.clone();
        blocking(move || {
            if preallocate {
                image::create_full(&here, &name, &path, Bytes(size))
            } else {
                image::create(&name, &path, Bytes(size))
            }
        })
        .await
        .flatten()
    };
    match made {
        Ok(made) => finish(disks, &disk, made).await?,
        Err(error) => return Err(undo(disks, &disk, error).await),
    }
    tracing::info!(disk = disk.name, bytes = size, "created the disk");
    Ok(disk)
}

/// Returns the number of sectors of a disk of this size.
///
/// # Errors
/// [`ErrorCode::Invalid`] unless the size is a positive multiple of 512.
pub(crate) fn checked_sectors(name: &str, size: u64) -> Result<Sectors, ErrorBody> {
    match Bytes(size).sectors() {
        Some(sectors) if sectors > 0 => Ok(Sectors(sectors)),
        _ => Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!(
                "disk {name} cannot have {}: a size is a positive multiple of 512 bytes",
                Bytes(size)
            ),
        )
        .hint(match size.max(1).checked_next_multiple_of(512) {
            Some(next) => format!("the next size that fits is {next} bytes"),
            None => String::from("choose a smaller size"),
        })),
    }
}

/// Takes the name and stores the mark of an unfinished creation. From now on a crash leaves nothing behind.
pub async fn reserve(
    disks: &Arc<Disks>,
    name: String,
    path: PathBuf,
    sectors: Sectors,
) -> Result<Arc<Disk>, ErrorBody> {
    let id = DiskId(random_id()?);
    let entry = DiskEntry {
        managed: true,
        mark: Some(Mark::Creating),
        ..DiskEntry::new(id, path, sectors)
    };
    let record = AuthorityRecord::created();
    let disk = Disk::new(name, entry.clone(), record, Activity::Creating);
    disks.insert(&disk)?;
    // A file not owned by a disk of this node must not be replaced. Once the mark is stored, a restart would delete the
    // file.
    let stored = if entry.path.exists() {
        Err(ErrorBody::new(
            ErrorCode::Exists,
            format!(
                "disk {}: {} exists already",
                disk.name,
                entry.path.display()
            ),
        )
        .hint("move the file away, or use it with 'godwit disk create --path'"))
    } else {
        disks
            .context
            .store
            .put_disk(&disk.name, &entry, record)
            .await
            .map_err(|e| stored_badly(&disk, &e))
    };
    if let Err(error) = stored {
        disks.remove(&disk.name);
        return Err(error);
    }
    Ok(disk)
}

/// Serves the disk, whose image is complete.
pub async fn finish(
    disks: &Arc<Disks>,
    disk: &Arc<Disk>,
    made: godwit_block::image::Image,
) -> Result<(), ErrorBody> {
    finish_as(disks, disk, made, AuthorityRecord::created()).await
}

/// Serves the disk with this record, which tells whether the image is complete.
pub(crate) async fn finish_as(
    disks: &Arc<Disks>,
    disk: &Arc<Disk>,
    made: godwit_block::image::Image,
    record: AuthorityRecord,
) -> Result<(), ErrorBody> {
    let mut entry = disk.lock().entry.clone();
    entry.mark = None;
    if let Err(error) = disks
        .context
        .store
        .put_disk(&disk.name, &entry, record)
        .await
    {
        drop(made);
        return Err(undo(disks, disk, stored_badly(disk, &error)).await);
    }
    {
        let mut inner = disk.lock();
        inner.entry = entry;
        inner.record = record;
    }
    let started = crate::disks::lifecycle::run::start(disks, disk, made);
    if let Err(error) = &started {
        disk.lock().problem = Some(error.message.clone());
    }
    disk.end(Activity::Creating);
    started
}

/// Removes the leftovers of an unfinished creation, and returns its error.
pub(crate) async fn undo(disks: &Arc<Disks>, disk: &Arc<Disk>, error: ErrorBody) -> ErrorBody {
    let path = disk.lock().entry.path.clone();
    // A file from before the creation is not the node's to delete.
    let ours = error.code != ErrorCode::Exists;
    let deleted = blocking(move || if ours { image::delete(&path) } else { Ok(()) }).await;
    if let Err(error) = disks.context.store.remove_disk(&disk.name).await {
        tracing::error!(disk = disk.name, %error, "cannot forget the disk that was not created");
    }
    if let Ok(Err(error)) = deleted {
        tracing::error!(disk = disk.name, %error, "cannot delete the unfinished image");
    }
    disks.remove(&disk.name);
    error
}

async fn attach(
    disks: &Arc<Disks>,
    name: String,
    path: PathBuf,
    size: Option<u64>,
    format: Option<ImageFormat>,
) -> Result<Arc<Disk>, ErrorBody> {
    names::check_path(&format!("disk {name}"), &path)?;
    if let Some(other) = user_of(disks, &path) {
        return Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!(
                "disk {name}: {} is the image of disk {other}",
                path.display()
            ),
        )
        .hint("two disks cannot share an image"));
    }
    let opened = {
        let (name, path) = (name.clone(), path.clone());
        blocking(move || {
            image::check_format(&name, &path, format)?;
            image::open(&name, &path)
        })
        .await
        .flatten()?
    };
    if let Some(size) = size
        && opened.capacity.bytes().0 != size
    {
        return Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!(
                "disk {name}: {} has {}, not {}",
                path.display(),
                opened.capacity.bytes(),
                Bytes(size)
            ),
        )
        .hint("leave the size out to take the image's own"));
    }
    let entry = DiskEntry::new(DiskId(random_id()?), path, opened.capacity);
    let record = AuthorityRecord::created();
    let disk = Disk::new(name, entry.clone(), record, Activity::Creating);
    disks.insert(&disk)?;
    let started = match disks
        .context
        .store
        .put_disk(&disk.name, &entry, record)
        .await
    {
        Ok(()) => crate::disks::lifecycle::run::start(disks, &disk, opened),
        Err(error) => Err(stored_badly(&disk, &error)),
    };
    if let Err(error) = started {
        if let Err(error) = disks.context.store.remove_disk(&disk.name).await {
            tracing::error!(disk = disk.name, %error, "cannot forget the disk");
        }
        disks.remove(&disk.name);
        return Err(error);
    }
    disk.end(Activity::Creating);
    tracing::info!(disk = disk.name, path = %entry.path.display(), "attached the image");
    Ok(disk)
}

/// Returns the disk with this image.
pub(in crate::disks) fn user_of(disks: &Arc<Disks>, path: &Path) -> Option<String> {
    let identity = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path)
            .ok()
            .map(|metadata| (metadata.dev(), metadata.ino()))
    };
    let wanted = identity(path)?;
    disks
        .all()
        .into_iter()
        .find(|disk| identity(&disk.lock().entry.path) == Some(wanted))
        .map(|disk| disk.name.clone())
}

/// Converts a failure to store a disk for the API.
pub fn stored_badly(disk: &Disk, error: &godwit_context::store::StoreError) -> ErrorBody {
    ErrorBody::new(
        ErrorCode::Internal,
        format!("disk {} cannot be stored: {error}", disk.name),
    )
    .hint("see the node's log, and whether its data directory has space")
}
