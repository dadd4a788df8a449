//! Tells the repository of disks created from an image while the repository was away. From then on the repository keeps
//! the chunks of these disks.

use std::sync::Arc;

use godwit_image::{ImageName, PushTime, RepositoryError};

use crate::disks::disk::Disk;
use crate::images::Images;
use crate::images::body;
use crate::images::creation::manifest_of;
use crate::images::uses::told::{Repository, Told};
use crate::images::uses::{self, put_back};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_context::store::BaseImage;

/// Tells the repository of all such disks. If a manifest was removed before, [`put_back`] restores the manifest and
/// tells of the disk.
///
/// # Errors
/// The repository could not be told of a disk now; to be tried again soon.
pub(super) async fn note(images: &Arc<Images>) -> Result<(), ErrorBody> {
    let mut all = Ok(());
    for disk in images.disks.all() {
        let Some((base, told)) = late(images, &disk) else {
            continue;
        };
        if told.is_noted() {
            put_back::begin(images, &disk, &base);
        } else if let Err(error) = note_one(images, &disk, &base, told).await {
            all = Err(error);
        }
    }
    all
}

/// Returns the base image of a disk still fetching, if the repository does not know of the disk, or has lost chunks of
/// the image.
pub(super) fn late(images: &Images, disk: &Disk) -> Option<(BaseImage, Told)> {
    let inner = disk.lock();
    let base = inner.entry.fetches(&inner.record)?;
    let told = images.told(&disk.name, base)?;
    (!told.is_noted() || told.lost > 0).then(|| (base.clone(), told))
}

async fn note_one(
    images: &Arc<Images>,
    disk: &Arc<Disk>,
    base: &BaseImage,
    told: Told,
) -> Result<(), ErrorBody> {
    let (Some(id), Ok(image)) = (manifest_of(base), base.image.parse::<ImageName>()) else {
        return Ok(());
    };
    let repository = images.repository()?;
    let user = uses::user(images, &disk.name).await?;
    // If the disk is removed meanwhile, `release` removes its note afterwards.
    let pushed = match repository.begin_use_of(id, &image, &user).await {
        Ok(used) => used.pushed,
        Err(RepositoryError::NoManifest { .. } | RepositoryError::DamagedManifest { .. }) => {
            put_back::begin(images, disk, base);
            return Ok(());
        }
        Err(error) => return Err(body(&error)),
    };
    keep(images, disk, base, told, pushed, 0).await
}

/// Keeps the result of telling the repository. `pushed` is the time of the push if the name stands for this manifest,
/// and `lost` is the number of lost chunks.
///
/// # Errors
/// The note cannot be stored.
pub(super) async fn keep(
    images: &Arc<Images>,
    disk: &Disk,
    base: &BaseImage,
    told: Told,
    pushed: Option<PushTime>,
    lost: u64,
) -> Result<(), ErrorBody> {
    failpoint::reach(String::from("image::late-use")).await;
    let told = Told {
        pushed: pushed.map_or(told.pushed, |pushed| pushed.to_string()),
        repository: match pushed {
            Some(_) => Repository::Agrees,
            None => Repository::Disagrees,
        },
        lost,
        ..told
    };
    if images.told(&disk.name, base).as_ref() == Some(&told) {
        return Ok(());
    }
    match told.warning(&base.image, true) {
        None => tracing::info!(disk = disk.name, "the repository knows what the disk needs"),
        Some(warning) => tracing::warn!(
            disk = disk.name,
            warning,
            "the repository knows what the disk needs"
        ),
    }
    let _keeping = images.keeping.lock().await;
    if images.told(&disk.name, base).is_none() {
        // The disk was removed, and another disk has its name.
        return Ok(());
    }
    let (keeper, name) = (Arc::clone(images), disk.name.clone());
    let kept = blocking(move || keeper.told.keep(&name, told)).await?;
    kept.map_err(|error| {
        let text = format!(
            "disk {}: cannot store that the repository knows of it: {error}",
            disk.name
        );
        ErrorBody::new(ErrorCode::Internal, text)
    })
}
