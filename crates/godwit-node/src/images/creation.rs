//! A new disk from an image: there at once, whatever has to be fetched.

use std::sync::Arc;

use godwit_block::image::missing;
use godwit_core::Missing;
use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{Bytes, Sectors};
use godwit_image::{CHUNK_BYTES, ImageName, Manifest, ManifestId};

use crate::disks::disk::Disk;
use crate::disks::lifecycle::{create, lacking};
use crate::disks::storage::image;
use crate::images::{body, uses};
use crate::migrations::options::new_id;
use crate::node::{Node, blocking};
use crate::store::BaseImage;
use godwit_api::{ErrorBody, ErrorCode};

/// How long the repository may take to say what an image is.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(30);

/// Sectors of a block, of which a disk has all or nothing.
pub(super) const BLOCK: u64 = 8;

/// Creates the disk and serves it; `size` is that of the image, or larger.
///
/// # Errors
/// There is no such image, or it cannot be used now; or the size does not fit; or what any creation may meet.
pub(crate) async fn create(
    node: &Arc<Node>,
    name: String,
    from: &str,
    size: Option<u64>,
    prefetch: bool,
) -> Result<Arc<Disk>, ErrorBody> {
    let image: ImageName = from
        .parse()
        .map_err(|error: String| ErrorBody::new(ErrorCode::Invalid, error))?;
    node.images.repository()?;
    // The image tells the size, so until then the disk has the smallest that there is.
    let path = image::managed_path(&node.config.disks_dir(), &name);
    let disk = create::reserve(node, name, path, Sectors(1)).await?;
    let made = match fill(node, &disk, &image, size, prefetch).await {
        Ok(made) => made,
        Err(error) => {
            let error = create::undo(node, &disk, error).await;
            lacking::forget(node, &disk).await;
            node.images.release();
            return Err(error);
        }
    };
    create::finish_as(node, &disk, made.file, made.record).await?;
    tracing::info!(
        disk = disk.name,
        image = image.as_str(),
        bytes = made.size,
        to_fetch = made.to_fetch,
        "created the disk from an image"
    );
    Ok(disk)
}

/// What a new disk begins with.
struct Made {
    file: godwit_block::image::Image,
    record: AuthorityRecord,
    size: u64,
    to_fetch: u64,
}

async fn fill(
    node: &Arc<Node>,
    disk: &Arc<Disk>,
    image: &ImageName,
    size: Option<u64>,
    prefetch: bool,
) -> Result<Made, ErrorBody> {
    let repository = node.images.repository()?;
    let asked = async {
        // Until the manifest is kept, so that nobody removes it, or the note, for the sake of an earlier disk.
        let noting = node.images.noting.lock().await;
        let user = uses::user(node, &disk.name).await?;
        let found = repository.begin_use(image, &user).await;
        let (id, manifest) = found.map_err(|error| body(&error))?;
        Ok::<_, ErrorBody>((noting, id, manifest))
    };
    let (_noting, id, manifest) = match tokio::time::timeout(ANSWER, asked).await {
        Ok(found) => found?,
        Err(_) => {
            let text = format!(
                "the repository {} does not answer within {} s",
                repository.shown(),
                ANSWER.as_secs()
            );
            return Err(ErrorBody::new(ErrorCode::Conflict, text)
                .hint("is it running, and reachable from the node? Try again when it is"));
        }
    };
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
    {
        let mut inner = disk.lock();
        inner.entry.sectors = sectors.0;
        inner.entry.base = Some(BaseImage {
            image: image.to_string(),
            manifest: id.to_string(),
            fetch: fetch.to_string(),
            prefetch,
        });
    }
    let (name, path) = (disk.name.clone(), disk.lock().entry.path.clone());
    let node = Arc::clone(node);
    let file = blocking(move || {
        let failed = |error: std::io::Error| {
            let text = format!("disk {name}: cannot store what it has to fetch: {error}");
            ErrorBody::new(ErrorCode::Internal, text)
                .hint("see whether the node's data directory has space")
        };
        node.images.manifests.keep(&manifest).map_err(failed)?;
        let file = image::create(&name, &path, Bytes(size))?;
        let map = lacking::prepare(&node.config, &name).map_err(failed)?;
        let heat = vec![0; Missing::heat_length(sectors)];
        missing::create(
            &map,
            sectors,
            fetch,
            &words(&manifest, sectors),
            &heat,
            None,
        )
        .map_err(failed)?;
        Ok(file)
    });
    let mut record = AuthorityRecord::created();
    record.remainder = lacks.then_some(fetch);
    Ok(Made {
        file: file.await.flatten()?,
        record,
        size,
        to_fetch,
    })
}

/// A bit for each block that the image has data for.
pub(super) fn words(manifest: &Manifest, capacity: Sectors) -> Vec<u64> {
    let mut words = vec![0; Missing::word_length(capacity)];
    for chunk in manifest.chunks() {
        let start = chunk.number * CHUNK_BYTES / 512;
        let end = start + manifest.length(chunk.number) / 512;
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            words[(block / 64) as usize] |= 1 << (block % 64);
        }
    }
    words
}

/// The name of a manifest, as a disk's entry has it.
pub(super) fn manifest_of(base: &BaseImage) -> Option<ManifestId> {
    base.manifest.parse().ok()
}

#[cfg(test)]
mod tests {
    use godwit_image::{ChunkId, ManifestChunk};

    use super::*;

    #[test]
    fn what_an_image_has_is_missing_at_first_and_its_holes_are_not() {
        let chunk = |number| ManifestChunk {
            number,
            id: ChunkId([1; 32]),
        };
        // The last chunk has one sector, in a block that the image cuts short.
        let size = 3 * CHUNK_BYTES + 512;
        let manifest = Manifest::new(size, vec![chunk(1), chunk(3)]).expect("valid");
        let same = words(&manifest, Sectors(size / 512));
        assert_eq!(same, [0, u64::MAX, 0, 1]);
        let larger = words(&manifest, Sectors(8 * CHUNK_BYTES / 512));
        assert_eq!(larger, [0, u64::MAX, 0, 1, 0, 0, 0, 0]);
    }
}
