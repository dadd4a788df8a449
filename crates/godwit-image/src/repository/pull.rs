//! Pulls: images from a repository into a file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::{TryStreamExt, stream};
use serde::Serialize;

use crate::chunk::CHUNK_BYTES;
use crate::error::RepositoryError;
use crate::name::ImageName;
use crate::repository::catalog::ImageInfo;
use crate::repository::progress::Progress;
use crate::repository::{PARALLEL, Repository};

/// The result of a pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pulled {
    /// The image.
    #[serde(flatten)]
    pub image: ImageInfo,
    /// The new file.
    pub path: PathBuf,
}

/// A file that is removed on drop unless kept.
#[derive(Debug)]
struct Unfinished<'a> {
    path: &'a Path,
    kept: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.kept {
            // No remedy for a failed removal.
            let _ = std::fs::remove_file(self.path);
        }
    }
}

impl Repository {
    /// Writes the image into a new raw file, with holes for zeroes. Each chunk is checked. If `cancel` completes first
    /// or the pull fails, the file is removed.
    ///
    /// # Errors
    /// No image has this name; the image or a chunk is missing or damaged; the file exists or cannot be written; or the
    /// store fails.
    pub async fn pull(
        &self,
        name: &ImageName,
        path: &Path,
        progress: &Progress,
        cancel: impl Future<Output = ()>,
    ) -> Result<Pulled, RepositoryError> {
        let entry = self.entry(name).await?;
        let manifest = self.manifest(entry.manifest()?).await?;
        progress.expect(manifest.data_bytes());
        let failed = |error: std::io::Error| RepositoryError::file("write", path, error);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(failed)?;
        let mut unfinished = Unfinished { path, kept: false };
        file.set_len(manifest.size()).map_err(failed)?;
        let file = Arc::new(file);
        let chunks = stream::iter(manifest.chunks().iter().map(Ok));
        let all = chunks.try_for_each_concurrent(PARALLEL, async |chunk| {
            let length = manifest.length(chunk.number);
            let bytes = self.chunk(chunk.id, length).await?;
            let (file, at) = (Arc::clone(&file), chunk.number * CHUNK_BYTES);
            let write = move || file.write_all_at(&bytes, at);
            blocking(write).await.map_err(failed)?;
            progress.add(length, length);
            Ok::<(), RepositoryError>(())
        });
        tokio::select! {
            all = all => all?,
            () = cancel => return Err(RepositoryError::Interrupted("there is no file")),
        }
        let folder = path.parent().unwrap_or(path).to_owned();
        let synced = blocking(move || {
            file.sync_all()?;
            File::open(folder)?.sync_all()
        });
        synced.await.map_err(failed)?;
        unfinished.kept = true;
        Ok(Pulled {
            image: entry.info,
            path: path.to_owned(),
        })
    }
}

async fn blocking(
    work: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> std::io::Result<()> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(std::io::Error::other)?
}
