//! Tells the repository of disks that were created from an image while it was away: from then on what they need stays
//! there. What was removed before that is put back, from this node's disks and from other nodes.

use std::sync::Arc;

use godwit_image::{ImageName, ManifestChunk, ManifestId, RepositoryError, User};

use crate::disks::disk::Disk;
use crate::failpoint;
use crate::images::creation::manifest_of;
use crate::images::peers::{self, Part, giving};
use crate::images::told::{Repository, Told};
use crate::images::{body, serving, uses};
use crate::node::{Node, blocking};
use crate::store::BaseImage;
use godwit_api::{ErrorBody, ErrorCode};

/// Tells of all of them.
///
/// # Errors
/// One could not be told of now: that is to be tried again soon.
pub(super) async fn note(node: &Arc<Node>) -> Result<(), ErrorBody> {
    let mut all = Ok(());
    for disk in node.disks.all() {
        if let Some((base, told)) = late(node, &disk)
            && let Err(error) = note_one(node, &disk, &base, told).await
        {
            all = Err(error);
        }
    }
    all
}

/// What the disk fetches from, if the repository does not know that.
fn late(node: &Node, disk: &Disk) -> Option<(BaseImage, Told)> {
    let inner = disk.lock();
    let base = inner.entry.fetches(&inner.record)?;
    let told = node.images.told(&disk.name, base)?;
    (!told.is_noted()).then(|| (base.clone(), told))
}

async fn note_one(
    node: &Arc<Node>,
    disk: &Disk,
    base: &BaseImage,
    told: Told,
) -> Result<(), ErrorBody> {
    let (Some(id), Ok(image)) = (manifest_of(base), base.image.parse::<ImageName>()) else {
        return Ok(());
    };
    let repository = node.images.repository()?;
    let user = uses::user(node, &disk.name).await?;
    // What is noted of a disk that is removed meanwhile is removed when this has ended.
    let pushed = match repository.begin_use_of(id, &image, &user).await {
        Ok(used) => used.pushed,
        Err(RepositoryError::NoManifest { .. } | RepositoryError::DamagedManifest { .. }) => {
            put_back(node, id, &image, &user).await?;
            None
        }
        Err(error) => return Err(body(&error)),
    };
    failpoint::reach(String::from("image::late-use")).await;
    let told = Told {
        pushed: pushed.map_or(told.pushed, |pushed| pushed.to_string()),
        repository: match pushed {
            Some(_) => Repository::Agrees,
            None => Repository::Disagrees,
        },
        ..told
    };
    match told.warning(&base.image, true) {
        None => tracing::info!(disk = disk.name, "the repository knows what the disk needs"),
        Some(warning) => tracing::warn!(
            disk = disk.name,
            warning,
            "the repository knows what the disk needs"
        ),
    }
    let _keeping = node.images.keeping.lock().await;
    if node.images.told(&disk.name, base).is_none() {
        // It was removed, and another has its name.
        return Ok(());
    }
    let (keeper, name) = (Arc::clone(node), disk.name.clone());
    let kept = blocking(move || keeper.images.told.keep(&name, told)).await?;
    kept.map_err(|error| {
        let text = format!(
            "disk {}: cannot store that the repository knows of it: {error}",
            disk.name
        );
        ErrorBody::new(ErrorCode::Internal, text)
    })
}

/// Puts back what the repository has not of the image any more, and notes that the disk needs it.
async fn put_back(
    node: &Arc<Node>,
    id: ManifestId,
    image: &ImageName,
    user: &User,
) -> Result<(), ErrorBody> {
    let manifest = serving::manifest(node, id).await.map_err(|why| {
        let text = format!("what image '{image}' consists of cannot be put back: {why}");
        ErrorBody::new(ErrorCode::Conflict, text)
    })?;
    let find = |chunk: ManifestChunk| {
        let (node, manifest) = (Arc::clone(node), Arc::clone(&manifest));
        let part = Part {
            manifest: id,
            number: chunk.number,
            id: chunk.id,
            length: manifest.length(chunk.number),
        };
        async move {
            failpoint::reach(String::from("image::put-back")).await;
            let own = {
                let node = Arc::clone(&node);
                blocking(move || giving::own_chunk(&node, id, &manifest, part.number)).await
            };
            match own.ok().flatten().and_then(|bytes| part.right(bytes)) {
                Some(bytes) => Some(bytes),
                None => peers::chunk_of_others(&node, part).await,
            }
        }
    };
    let repository = node.images.repository()?;
    let done = repository.put_back(&manifest, image, user, find).await;
    let done = done.map_err(|error| body(&error))?;
    tracing::warn!(
        disk = user.disk,
        image = image.as_str(),
        manifest = %id,
        chunks = done.chunks,
        bytes = done.bytes,
        lost = done.lost,
        "put back what was removed from the repository before it knew that the disk needs it"
    );
    Ok(())
}
