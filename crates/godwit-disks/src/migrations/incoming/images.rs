//! The images of arriving disks.

use std::sync::Arc;

use godwit_core::units::{Bytes, Sectors};
use godwit_core::wire::{Offer, Refusal, RefusalCode};

use super::{internal, refusal};
use crate::disks::disk::Disk;
use crate::disks::lifecycle::run;
use crate::disks::storage::image;
use crate::migrations::Migrations;
use godwit_context::blocking;

/// Makes a new image in place of the stale one.
pub(super) async fn replace_image(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    offer: &Offer,
) -> Result<(), Refusal> {
    run::stop(disk).await;
    let (entry, record) = {
        let mut inner = disk.lock();
        inner.entry.sectors = offer.capacity.0;
        (inner.entry.clone(), inner.record)
    };
    migrations
        .context
        .store
        .put_disk(&disk.name, &entry, record)
        .await
        .map_err(|error| internal(migrations, disk, &error))?;
    let path = entry.path;
    blocking(move || image::delete(&path))
        .await
        .map_err(refusal)?
        .map_err(|error| internal(migrations, disk, &error))?;
    open_new_image(migrations, disk, offer.allocated).await
}

/// Makes the image for a copy of a disk whose image occupies `allocated` bytes, and starts the disk.
pub(super) async fn open_new_image(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    allocated: u64,
) -> Result<(), Refusal> {
    let (path, size) = {
        let inner = disk.lock();
        (
            inner.entry.path.clone(),
            Sectors(inner.entry.sectors).bytes(),
        )
    };
    let (name, owner) = (disk.name.clone(), migrations.context.config.name.clone());
    let made = blocking(move || image::create_copy(&owner, &name, &path, Bytes(size.0), allocated))
        .await
        .flatten();
    made.and_then(|made| run::start(&migrations.disks, disk, made))
        .map_err(refusal)
}

/// Takes the device of a disk, which must be at least as large, and starts the disk.
pub(super) async fn open_device(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
) -> Result<(), Refusal> {
    let (path, size) = {
        let inner = disk.lock();
        (inner.entry.path.clone(), Sectors(inner.entry.sectors))
    };
    let name = disk.name.clone();
    let opened = blocking(move || image::open(&name, &path)).await.flatten();
    let opened = opened.map_err(refusal)?;
    // Volumes come in whole extents: the excess is left alone.
    if opened.capacity < size {
        return Err(Refusal {
            code: RefusalCode::Invalid,
            text: format!(
                "the device {} at node '{}' has {}, and disk {} {}: make it at least as large",
                disk.lock().entry.path.display(),
                migrations.context.config.name,
                opened.capacity.bytes(),
                disk.name,
                size.bytes()
            ),
        });
    }
    run::start(&migrations.disks, disk, opened).map_err(refusal)
}
