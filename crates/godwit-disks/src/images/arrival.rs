//! A disk offered by another node on an image: blocks not sent by the source are fetched here.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::{Bytes, SECTOR_SIZE};
use godwit_core::wire::{Hello, Offer, OfferedImage, Refusal, RefusalCode};
use godwit_image::{ImageName, Used};
use tokio::sync::{MutexGuard, oneshot};

use crate::disks::disk::Disk;
use crate::disks::lifecycle::older_copy;
use crate::images::Images;
use crate::images::{body, uses};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::store::BaseImage;

/// Time limit for the repository to describe the image. The source waits meanwhile.
const ANSWER: Duration = Duration::from_secs(15);

/// An image whose chunks stay in the repository. The disk with this image must be known before the note is dropped.
pub struct Noted<'a> {
    /// The image and the disk's place in it.
    pub base: BaseImage,
    _noting: MutexGuard<'a, ()>,
}

/// Notes in the repository that the disk will need the image, and keeps the image's manifest.
///
/// # Errors
/// The repository lacks the image or cannot be asked now, or the image does not fit the disk.
pub async fn note<'a>(
    images: &'a Arc<Images>,
    hello: &Hello,
    offer: &Offer,
    offered: &OfferedImage,
) -> Result<Noted<'a>, ErrorBody> {
    let disk = &hello.disk;
    let invalid = |what: &str| {
        let text = format!("disk {disk} was offered on an image, and {what}");
        ErrorBody::new(ErrorCode::Invalid, text)
    };
    let image: ImageName = offered
        .image
        .parse()
        .map_err(|_| invalid("that has no name"))?;
    let id = (offered.manifest.parse()).map_err(|()| invalid("nothing says which"))?;
    let repository = images.repository()?;
    let asked = async {
        let noting = images.noting.lock().await;
        let user = uses::user(images, disk).await?;
        let found = repository.begin_use_of(id, &image, &user).await;
        let used = found.map_err(|error| body(&error))?;
        Ok::<_, ErrorBody>((noting, used))
    };
    let Ok(found) = tokio::time::timeout(ANSWER, asked).await else {
        let text = format!(
            "the repository {} does not answer within {} s",
            repository.shown(),
            ANSWER.as_secs()
        );
        return Err(ErrorBody::new(ErrorCode::Conflict, text));
    };
    let (
        noting,
        Used {
            manifest, pushed, ..
        },
    ) = found?;
    let size = Bytes(offer.capacity.0.saturating_mul(SECTOR_SIZE));
    if size.0 < manifest.size() {
        images.release();
        return Err(invalid(&format!("has {size}, less than its image")));
    }
    let keeper = Arc::clone(images);
    let kept = blocking(move || keeper.manifests.keep(&manifest)).await?;
    kept.map_err(|error| {
        let text = format!("disk {disk}: cannot store what it has to fetch: {error}");
        ErrorBody::new(ErrorCode::Internal, text)
    })?;
    Ok(Noted {
        base: BaseImage {
            image: image.to_string(),
            manifest: id.to_string(),
            // Blocks not sent by the source are missing in the name of the migration.
            fetch: hello.migration.to_string(),
            prefetch: offered.prefetch,
            pushed: pushed.map(|pushed| pushed.to_string()),
        },
        _noting: noting,
    })
}

/// Tells the source that this node cannot reach the image. The source can tell this refusal from all others, and may
/// send the whole disk instead.
pub fn refusal(error: ErrorBody) -> Refusal {
    Refusal {
        code: RefusalCode::Unknown,
        text: error.message,
    }
}

/// Makes the disk's image one hole: old content must not show where nothing is sent.
///
/// # Errors
/// The file system knows no holes, the image is not managed by the node, or a write of an earlier move is still under
/// way.
pub async fn empty(images: &Images, disk: &Arc<Disk>) -> Result<(), ErrorBody> {
    let (path, sectors, managed) = {
        let entry = &disk.lock().entry;
        (entry.path.clone(), entry.sectors, entry.managed)
    };
    let failed = |code, why: &dyn std::fmt::Display| {
        let text = format!(
            "the image {} of disk {} cannot be emptied: {why}",
            path.display(),
            disk.name
        );
        ErrorBody::new(code, text)
    };
    if !managed {
        let why = "it is not the node's own: remove the disk there first";
        return Err(failed(ErrorCode::Exists, &why));
    }
    let engine = disk
        .engine()
        .ok_or_else(|| failed(ErrorCode::Busy, &"its thread has ended"))?;
    let (reply, answer) = oneshot::channel();
    engine.give_up_image(Box::new(move |may| {
        // The caller may be gone.
        let _ = reply.send(may);
    }));
    if !answer.await.unwrap_or(false) {
        let why = "something of an earlier move is still being written to it";
        return Err(failed(ErrorCode::Busy, &why));
    }
    older_copy::spoil(&images.context, disk)
        .await
        .map_err(|error| failed(ErrorCode::Internal, &error))?;
    let emptied = path.clone();
    let emptied = blocking(move || -> std::io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        let file = std::fs::OpenOptions::new().write(true).open(emptied)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, flags, 0, sectors * SECTOR_SIZE)?;
        file.sync_all()
    });
    (emptied.await?).map_err(|error| failed(ErrorCode::Exists, &error))
}
