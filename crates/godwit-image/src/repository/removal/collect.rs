//! Removal of chunks and manifests that no image needs any more.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::{TryStreamExt, stream};
use object_store::ObjectMeta;
use object_store::path::Path;
use serde::Serialize;

use crate::chunk::ChunkId;
use crate::error::RepositoryError;
use crate::manifest::ManifestId;
use crate::repository::removal::lease::Lease;
use crate::repository::{PARALLEL, Repository, manifest_path};

/// Chunks removed between two checks of the lease: a few seconds' worth.
const AT_ONCE: usize = 256;

/// The counts of a collection, also of a dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// Manifests without an image or a disk.
    pub manifests: u64,
    /// Chunks that no manifest names.
    pub chunks: u64,
    /// Bytes of the removed chunks.
    pub bytes: u64,
    /// Chunks that stay.
    pub kept_chunks: u64,
}

impl Repository {
    /// Removes chunks and manifests that neither an image nor a disk refers to; without `really` only counts. Never
    /// removes a chunk to which another operation may be about to refer, even at a host that sees this host's writes
    /// late: see [`Self::collecting_waits`].
    ///
    /// # Errors
    /// An image is being pushed; the entry or manifest of an image is missing or damaged, so that the needed chunks are
    /// unknown; or the store fails.
    pub async fn collect(&self, really: bool) -> Result<Collected, RepositoryError> {
        let lag = if really { self.lag } else { Duration::ZERO };
        let marker = self.begin_collecting(lag).await?;
        tokio::time::sleep(lag).await;
        let collected = self.sweep(really, &marker).await;
        // Waits after a failure too: some chunks may be gone.
        tokio::time::sleep(lag).await;
        marker.end().await;
        collected
    }

    /// Fails if this collection may have been taken for dead: others could then rely on the chunks that this one
    /// removes.
    async fn still_collects(&self, marker: &Lease) -> Result<(), RepositoryError> {
        match marker.holds().await? {
            true => Ok(()),
            false => {
                Err(self.busy("this gc stood still for too long and was given up; run it again"))
            }
        }
    }

    async fn sweep(&self, really: bool, marker: &Lease) -> Result<Collected, RepositoryError> {
        let manifests = self.list(&Path::from("manifests")).await?;
        let chunks = self.list(&Path::from("chunks")).await?;
        let mut roots: HashSet<ManifestId> = HashSet::new();
        for image in self.list(&Path::from("images")).await? {
            let name = image.location.filename().and_then(|name| name.parse().ok());
            let Some(name) = name else { continue };
            match self.entry(&name).await {
                Ok(entry) => _ = roots.insert(entry.manifest()?),
                // Removed meanwhile.
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
        if really {
            self.still_collects(marker).await?;
        }
        let mut collected = Collected::default();
        let mut doomed = Vec::new();
        // Manifests go first: a manifest without chunks is worse than chunks without a manifest.
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
                // An object with another kind of name is not a chunk.
                None => {}
            }
        }
        for some in doomed.chunks(AT_ONCE).filter(|_| really) {
            self.still_collects(marker).await?;
            stream::iter(some.iter().map(Ok))
                .try_for_each_concurrent(PARALLEL, async |path| self.delete(path).await)
                .await?;
        }
        Ok(collected)
    }
}

fn named<T: std::str::FromStr>(meta: &ObjectMeta) -> Option<T> {
    meta.location.filename()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[tokio::test]
    async fn who_stood_still_for_too_long_removes_nothing_more() {
        let folder = tempfile::tempdir().expect("a folder");
        let chunk = folder.path().join(format!("chunks/{}", "ab".repeat(32)));
        std::fs::create_dir_all(folder.path().join("chunks")).expect("a folder");
        std::fs::write(&chunk, b"nobody names it").expect("written");
        let location = folder.path().to_str().expect("text").parse();
        let location: crate::Location = location.expect("a directory");
        let repository = Repository::open(&location).expect("opened");
        let repository = repository.with_lag(Duration::ZERO).expect("short");
        let marker = repository.begin_collecting(Duration::ZERO);
        let marker = marker.await.expect("it begins");
        let make_old = || {
            let file = std::fs::File::open(folder.path().join("collecting")).expect("its file");
            let old = SystemTime::now() - Duration::from_secs(3600);
            file.set_modified(old).expect("made old");
        };
        make_old();
        let error = repository.sweep(true, &marker).await.expect_err("refused");
        assert!(error.to_string().contains("stood still"), "{error}");
        assert!(chunk.exists());
        // The lease that was left behind expires.
        drop(marker);
        make_old();
        let collected = repository.collect(true).await.expect("another one does");
        assert_eq!(collected.chunks, 1);
        assert!(!chunk.exists());
    }
}
