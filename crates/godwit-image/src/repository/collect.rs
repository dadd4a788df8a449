//! Removes what no image has any more.

use std::collections::HashSet;

use futures_util::{TryStreamExt, stream};
use object_store::ObjectMeta;
use object_store::path::Path;
use serde::Serialize;

use crate::chunk::ChunkId;
use crate::error::RepositoryError;
use crate::manifest::ManifestId;
use crate::repository::{PARALLEL, Repository, manifest_path};

/// What was removed, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// Manifests that no image and no disk refers to.
    pub manifests: u64,
    /// Chunks that no manifest names.
    pub chunks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Chunks that stay.
    pub kept_chunks: u64,
}

impl Repository {
    /// Removes chunks and manifests that neither an image nor a disk refers to; without `really` it only counts
    /// them. Nothing is removed that somebody may be about to refer to.
    ///
    /// # Errors
    /// An image is being pushed; an image's entry or manifest is missing or damaged, so that nobody knows what it
    /// needs; or the store does not do its part.
    pub async fn collect(&self, really: bool) -> Result<Collected, RepositoryError> {
        let marker = self.begin_collecting().await?;
        let collected = self.sweep(really).await;
        marker.end().await;
        collected
    }

    async fn sweep(&self, really: bool) -> Result<Collected, RepositoryError> {
        let manifests = self.list(&Path::from("manifests")).await?;
        let chunks = self.list(&Path::from("chunks")).await?;
        let mut roots: HashSet<ManifestId> = HashSet::new();
        for image in self.list(&Path::from("images")).await? {
            let name = image.location.filename().and_then(|name| name.parse().ok());
            let Some(name) = name else { continue };
            match self.entry(&name).await {
                Ok(entry) => _ = roots.insert(entry.manifest()?),
                // It was removed meanwhile.
                Err(RepositoryError::NoImage { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        roots.extend(self.uses().await?.into_iter().map(|(id, _)| id));
        let mut kept: HashSet<ChunkId> = HashSet::new();
        for id in &roots {
            let manifest = self.manifest(*id).await?;
            kept.extend(manifest.chunks().iter().map(|chunk| chunk.id));
        }
        let mut collected = Collected::default();
        let mut doomed = Vec::new();
        // First the manifests: one whose chunks are gone would be worse than chunks that nobody names.
        for manifest in &manifests {
            let id = named(manifest);
            if id.is_some_and(|id| !roots.contains(&id)) {
                collected.manifests += 1;
                if really && let Some(id) = id {
                    self.delete(&manifest_path(id)).await?;
                }
            }
        }
        for chunk in &chunks {
            match named::<ChunkId>(chunk) {
                Some(id) if kept.contains(&id) => collected.kept_chunks += 1,
                Some(_) => {
                    collected.chunks += 1;
                    collected.bytes += chunk.size;
                    doomed.push(chunk.location.clone());
                }
                // What has another name is not a chunk, and not ours.
                None => {}
            }
        }
        if really {
            stream::iter(doomed.into_iter().map(Ok))
                .try_for_each_concurrent(PARALLEL, async |path| self.delete(&path).await)
                .await?;
        }
        Ok(collected)
    }
}

fn named<T: std::str::FromStr>(meta: &ObjectMeta) -> Option<T> {
    meta.location.filename()?.parse().ok()
}
