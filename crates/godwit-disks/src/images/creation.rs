//! A new disk from an image: usable at once, whatever has to be fetched.

use std::sync::Arc;

use godwit_block::image::notes::missing;
use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{Bytes, Sectors};
use godwit_image::{ImageName, Manifest, ManifestId, PushTime};
use tokio::sync::MutexGuard;

use crate::disks::disk::Disk;
use crate::disks::lifecycle::{create, lacking};
use crate::disks::storage::image;
use crate::images::Images;
use crate::images::blocks::{pieces, words};
use crate::images::uses::told::{self, Told};
use crate::images::{NoAnswer, peers, uses};
use godwit_api::{CreateDisk, ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::ids::new_id;
use godwit_context::store::BaseImage;
use godwit_peers::names;

/// Time limit for the repository to describe an image.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(30);

/// Creates a disk, from an image if the request names one.
///
/// # Errors
/// The name or size is not valid, the name is taken, or the image cannot be made or used.
pub async fn create_disk(
    images: &Arc<Images>,
    request: CreateDisk,
) -> Result<Arc<Disk>, ErrorBody> {
    let Some(image) = &request.image else {
        return create::create(&images.disks, request).await;
    };
    names::check("disk", &request.name)?;
    if request.path.is_some() || request.preallocate {
        let text = format!("disk {}: it is made from image {image}", request.name);
        return Err(ErrorBody::new(ErrorCode::Invalid, text)
            .hint("leave --path and --preallocate out, or --image"));
    }
    let image = image.clone();
    create(
        images,
        request.name,
        &image,
        request.size_bytes,
        request.prefetch,
    )
    .await
}

/// Creates and serves the disk; `size` is the image's size, or larger.
///
/// # Errors
/// The image does not exist or cannot be used now, the size does not fit, or any error of a creation.
pub async fn create(
    images: &Arc<Images>,
    name: String,
    from: &str,
    size: Option<u64>,
    prefetch: bool,
) -> Result<Arc<Disk>, ErrorBody> {
    let image: ImageName = from
        .parse()
        .map_err(|error: String| ErrorBody::new(ErrorCode::Invalid, error))?;
    if !images.has_repository() {
        // Returns the error about the missing repository.
        images.repository()?;
    }
    // The image tells the size. Until then the disk has the smallest possible size.
    let path = image::managed_path(&images.context.config.disks_dir(), &name);
    let disk = create::reserve(&images.disks, name, path, Sectors(1)).await?;
    let made = match fill(images, &disk, &image, size, prefetch).await {
        Ok(made) => made,
        Err(error) => {
            let error = create::undo(&images.disks, &disk, error).await;
            lacking::forget(&images.disks, &disk).await;
            images.release();
            return Err(error);
        }
    };
    create::finish_as(&images.disks, &disk, made.file, made.record).await?;
    tracing::info!(
        disk = disk.name,
        image = image.as_str(),
        bytes = made.size,
        to_fetch = made.to_fetch,
        "created the disk from an image"
    );
    if made.is_late {
        // The repository is to be told as soon as possible.
        images.release();
    }
    Ok(disk)
}

/// The content and the state of a new disk.
struct Made {
    file: godwit_block::image::Image,
    record: AuthorityRecord,
    size: u64,
    to_fetch: u64,
    /// True if the repository does not know of the disk.
    is_late: bool,
}

async fn fill(
    images: &Arc<Images>,
    disk: &Arc<Disk>,
    image: &ImageName,
    size: Option<u64>,
    prefetch: bool,
) -> Result<Made, ErrorBody> {
    let Begun {
        id,
        manifest,
        pushed,
        told,
        _noting,
    } = begin(images, disk, image).await?;
    let size = size.unwrap_or(manifest.size());
    if size < manifest.size() {
        let text = format!(
            "disk {} cannot have {}: image '{image}' has {}",
            disk.name,
            Bytes(size),
            Bytes(manifest.size())
        );
        return Err(ErrorBody::new(ErrorCode::Invalid, text)
            .hint("leave the size out to take the image's own, or give a larger one"));
    }
    let sectors = create::checked_sectors(&disk.name, size)?;
    let fetch = new_id()?;
    let to_fetch = manifest.data_bytes();
    let lacks = to_fetch > 0;
    let told = told.map(|(by, pushed)| Told {
        fetch: fetch.to_string(),
        by,
        pushed: pushed.to_string(),
        repository: told::Repository::Away,
        lost: 0,
    });
    let _keeping = images.keeping.lock().await;
    {
        let mut inner = disk.lock();
        inner.entry.sectors = sectors.0;
        inner.entry.base = Some(BaseImage {
            image: image.to_string(),
            manifest: id.to_string(),
            fetch: fetch.to_string(),
            prefetch,
            pushed: pushed.map(|pushed| pushed.to_string()),
        });
    }
    let (name, path) = (disk.name.clone(), disk.lock().entry.path.clone());
    let images = Arc::clone(images);
    let is_late = told.is_some();
    let file = blocking(move || {
        let failed = |error: std::io::Error| {
            let text = format!("disk {name}: cannot store what it has to fetch: {error}");
            ErrorBody::new(ErrorCode::Internal, text)
                .hint("see whether the node's data directory has space")
        };
        images.manifests.keep(&manifest).map_err(failed)?;
        if let Some(told) = told {
            // Kept before the disk exists: every disk unknown to the repository needs this note.
            images.told.keep(&name, told).map_err(failed)?;
        }
        let file = image::create(&name, &path, Bytes(size))?;
        let map = lacking::prepare(&images.context.config, &name).map_err(failed)?;
        let pieces = pieces(&words(&manifest, sectors));
        missing::create(&map, sectors, fetch, &pieces, &[], None).map_err(failed)?;
        Ok(file)
    });
    let mut record = AuthorityRecord::created();
    record.remainder = lacks.then_some(fetch);
    Ok(Made {
        file: file.await.flatten()?,
        record,
        size,
        to_fetch,
        is_late,
    })
}

/// An image from which a disk may begin.
struct Begun<'a> {
    id: ManifestId,
    manifest: Manifest,
    /// The time of the push, if the repository told.
    pushed: Option<PushTime>,
    /// The node that answered instead of the repository, and the time of the push in its answer.
    told: Option<(String, PushTime)>,
    /// Held until the manifest is kept: the note for an earlier disk must not be removed meanwhile.
    _noting: Option<MutexGuard<'a, ()>>,
}

/// Notes in the repository that the disk will need the image. While the repository is away, asks other nodes for the
/// image's manifest.
async fn begin<'a>(
    images: &'a Arc<Images>,
    disk: &Disk,
    image: &ImageName,
) -> Result<Begun<'a>, ErrorBody> {
    // Other messages to the repository take their own time.
    let noting = images.noting.lock().await;
    let asked = async {
        let repository = images.open()?;
        let user = uses::user(images, &disk.name).await?;
        let used = repository.begin_use(image, &user).await?;
        Ok::<_, NoAnswer>(used)
    };
    let away = match tokio::time::timeout(ANSWER, asked).await {
        Ok(Ok(used)) => {
            return Ok(Begun {
                id: used.id,
                manifest: used.manifest,
                pushed: used.pushed,
                told: None,
                _noting: Some(noting),
            });
        }
        Ok(Err(NoAnswer::Away(away))) => away,
        Ok(Err(NoAnswer::Refused(error))) => return Err(error),
        Err(_) => {
            let text = format!("{} for {} s", images.slowness(), ANSWER.as_secs());
            ErrorBody::new(ErrorCode::Conflict, text)
                .hint("is it running, and reachable from the node? Try again when it is")
        }
    };
    drop(noting);
    match peers::named(images, image).await {
        Ok(named) => {
            tracing::warn!(
                disk = disk.name,
                image = image.as_str(),
                manifest = %named.id,
                pushed = %named.pushed,
                by = named.by,
                why = away.message,
                "another node tells what the image is; the repository will be told of the disk when it is back"
            );
            Ok(Begun {
                id: named.id,
                manifest: named.manifest,
                pushed: None,
                told: Some((named.by, named.pushed)),
                _noting: None,
            })
        }
        Err(error) => Err(ErrorBody {
            message: format!("{}; and {}", away.message, error.message),
            ..away
        }),
    }
}

/// Returns the manifest named by a disk's entry.
pub(super) fn manifest_of(base: &BaseImage) -> Option<ManifestId> {
    base.manifest.parse().ok()
}
