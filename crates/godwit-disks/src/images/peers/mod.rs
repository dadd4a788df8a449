//! Parts of images from other nodes. A node in need of a chunk, or a manifest, asks other nodes, and then the
//! repository. Every part is checked by its hash, so no node has to be trusted.

mod asking;
pub mod giving;
mod idle;
mod messages;
mod names;
mod places;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use godwit_api::ErrorBody;
use godwit_image::{ChunkId, Manifest, ManifestId};

pub(crate) use self::asking::Asked;
pub(in crate::images) use self::asking::Silent;
use self::messages::Question;
pub(super) use self::names::named;
use crate::images::Images;
use crate::images::body;

/// The place of a chunk in an image, and its hash.
#[derive(Clone, Copy, Debug)]
pub(in crate::images) struct Part {
    pub(in crate::images) manifest: ManifestId,
    pub(in crate::images) number: u64,
    pub(in crate::images) id: ChunkId,
    /// In bytes.
    pub(in crate::images) length: u64,
}

impl Part {
    /// Returns the bytes if they are the chunk.
    pub(in crate::images) fn right(&self, bytes: Bytes) -> Option<Bytes> {
        let right = bytes.len() as u64 == self.length && ChunkId::of(&bytes) == self.id;
        right.then_some(bytes)
    }
}

/// Bytes of chunks by their source, since the node started.
#[derive(Debug, Default)]
pub struct Fetched {
    from_disks: AtomicU64,
    from_peers: AtomicU64,
    from_repository: AtomicU64,
}

impl Fetched {
    /// Returns the sources and their bytes.
    pub fn all(&self) -> [(&'static str, u64); 3] {
        [
            ("disks", self.from_disks.load(Ordering::Relaxed)),
            ("peers", self.from_peers.load(Ordering::Relaxed)),
            ("repository", self.from_repository.load(Ordering::Relaxed)),
        ]
    }
}

/// Returns a chunk's checked bytes: from another disk of this node, another node, or the repository.
///
/// # Errors
/// The repository's reason why the chunk cannot be had now.
pub(super) async fn chunk(images: &Arc<Images>, part: Part) -> Result<Bytes, ErrorBody> {
    let fetched = &images.fetched;
    let count = |counter: &AtomicU64, bytes: &Bytes| {
        counter.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    };
    if let Some(bytes) = giving::of_another_disk(images, part).await {
        count(&fetched.from_disks, &bytes);
        return Ok(bytes);
    }
    let question = Question::Chunk {
        manifest: part.manifest,
        number: part.number,
    };
    let right = |bytes| part.right(bytes);
    let repository = async {
        let found = images.repository()?.chunk(part.id, part.length).await;
        found.map_err(|error| body(&error))
    };
    let (bytes, from) = places::first(
        places::WAITS,
        asking::quick(images, question, right),
        repository,
        asking::patient(images, question, right),
    )
    .await?;
    let counter = match from {
        places::From::Peers => &fetched.from_peers,
        places::From::Repository => &fetched.from_repository,
    };
    count(counter, &bytes);
    Ok(bytes)
}

/// Returns a chunk's checked bytes from any other node with the chunk, except nodes in `silent`.
pub(super) async fn chunk_of_others(
    images: &Arc<Images>,
    part: Part,
    silent: &Silent,
) -> Option<Bytes> {
    let question = Question::Chunk {
        manifest: part.manifest,
        number: part.number,
    };
    asking::every(images, question, |bytes| part.right(bytes), silent).await
}

/// Returns an image's manifest from another node or from the repository.
///
/// # Errors
/// The repository's reason why the manifest cannot be had now.
pub(super) async fn manifest(images: &Arc<Images>, id: ManifestId) -> Result<Manifest, ErrorBody> {
    let question = Question::Manifest(id);
    let right = |bytes: Bytes| Manifest::decode(id, &bytes).ok();
    let repository = async {
        let found = images.repository()?.manifest(id).await;
        found.map_err(|error| body(&error))
    };
    let (manifest, _) = places::first(
        places::WAITS,
        asking::quick(images, question, right),
        repository,
        asking::patient(images, question, right),
    )
    .await?;
    Ok(manifest)
}
