//! Puts back into the repository the lost parts of a disk's image, from this node's disks and from other nodes. Repeats
//! until the repository has all parts or the disk needs the image no more.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_image::{ImageName, ManifestChunk, PutBack, User};

use crate::disks::disk::Disk;
use crate::images::Images;
use crate::images::creation::manifest_of;
use crate::images::peers::{self, Part, Silent, giving};
use crate::images::uses::{self, late};
use crate::images::{body, serving};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_context::store::BaseImage;

/// Time before chunks not found at any node are looked for again.
const LOST_RETRY: Duration = Duration::from_secs(60);
/// Time between two attempts while the repository does not keep the image for the disk.
const RETRY: Duration = Duration::from_secs(2);

/// The images being put back.
#[derive(Debug, Default)]
pub(in crate::images) struct PuttingBack {
    /// The disks concerned, by the `fetch` id of their entries.
    fetches: Mutex<HashSet<String>>,
    /// Held for each attempt, to allow one at a time: guests use the same links.
    turn: tokio::sync::Mutex<()>,
}

impl PuttingBack {
    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.fetches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running task for this disk; removed from the set on drop.
struct Seen {
    images: Arc<Images>,
    fetch: String,
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.images.putting_back.lock().remove(&self.fetch);
        // Removes the note of a removed disk, and tells the repository of the rest.
        self.images.release();
    }
}

/// Begins a task unless this disk has one. Returns at once.
pub(in crate::images) fn begin(images: &Arc<Images>, disk: &Arc<Disk>, base: &BaseImage) {
    let fetch = base.fetch.clone();
    if !images.putting_back.lock().insert(fetch.clone()) {
        return;
    }
    let (images, disk) = (Arc::clone(images), Arc::clone(disk));
    let seen = Seen { images, fetch };
    godwit_context::spawn(async move {
        tokio::select! {
            () = until_all_is_there(&seen, &disk) => {}
            () = seen.images.context.closed() => {}
        }
    });
}

async fn until_all_is_there(seen: &Seen, disk: &Disk) {
    let Seen { images, fetch } = seen;
    let mut said = None;
    loop {
        let after = match once(images, disk, fetch).await {
            Ok(0) => return,
            Ok(_) => {
                said = None;
                LOST_RETRY
            }
            Err(error) => {
                let why = error.to_string();
                if said.as_ref() != Some(&why) {
                    tracing::warn!(
                        disk = disk.name,
                        error = why,
                        "cannot put back what the repository has lost of the disk's image; trying on"
                    );
                    said = Some(why);
                }
                RETRY
            }
        };
        tokio::time::sleep(after).await;
    }
}

/// Returns the number of chunks not found at any node; 0 also if the disk needs the image no more.
async fn once(images: &Arc<Images>, disk: &Disk, fetch: &str) -> Result<u64, ErrorBody> {
    let _turn = images.putting_back.turn.lock().await;
    let Some((base, told)) = late::late(images, disk).filter(|(it, _)| it.fetch == fetch) else {
        return Ok(0);
    };
    let user = uses::user(images, &disk.name).await?;
    let done = put_back(images, &base, &user).await?;
    late::keep(images, disk, &base, told, done.pushed, done.lost).await?;
    Ok(done.lost)
}

/// Puts back the parts lost by the repository, and notes the disk's need of the image.
async fn put_back(
    images: &Arc<Images>,
    base: &BaseImage,
    user: &User,
) -> Result<PutBack, ErrorBody> {
    let (Some(id), Ok(image)) = (manifest_of(base), base.image.parse::<ImageName>()) else {
        let text = format!("disk {}: its entry names no image", user.disk);
        return Err(ErrorBody::new(ErrorCode::Internal, text));
    };
    let manifest = serving::manifest(images, id).await.map_err(|why| {
        let text = format!("what image '{image}' consists of cannot be put back: {why}");
        ErrorBody::new(ErrorCode::Conflict, text)
    })?;
    let silent = Silent::default();
    let find = |chunk: ManifestChunk| {
        let (images, manifest, silent) = (Arc::clone(images), Arc::clone(&manifest), &silent);
        let part = Part {
            manifest: id,
            number: chunk.number,
            id: chunk.id,
            length: manifest.length(chunk.number),
        };
        async move {
            failpoint::reach(String::from("image::put-back")).await;
            let own = {
                let images = Arc::clone(&images);
                blocking(move || giving::own_chunk(&images, id, &manifest, part.number)).await
            };
            match own.ok().flatten().and_then(|bytes| part.right(bytes)) {
                Some(bytes) => Some(bytes),
                None => peers::chunk_of_others(&images, part, silent).await,
            }
        }
    };
    let repository = images.repository()?;
    let done = repository.put_back(&manifest, &image, user, find).await;
    let done = done.map_err(|error| body(&error))?;
    if done.chunks == 0 {
        return Ok(done);
    }
    tracing::warn!(
        disk = user.disk,
        image = image.as_str(),
        manifest = %id,
        chunks = done.chunks,
        bytes = done.bytes,
        lost = done.lost,
        "put back what was removed from the repository before it knew that the disk needs it"
    );
    Ok(done)
}
