//! A repository: requests to the store and the meaning of the answers.

pub(crate) mod catalog;
pub(crate) mod progress;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod removal;
pub(crate) mod restore;
mod slow;
#[cfg(test)]
mod stale;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload};

use crate::chunk::ChunkId;
use crate::error::RepositoryError;
use crate::location::{Keys, Location};
use crate::manifest::{Manifest, ManifestId};
use crate::repository::slow::hedge::Hedge;

/// Parallel requests while chunks are moved.
pub(crate) const PARALLEL: usize = 16;

/// Time after which hosts that share a directory see each other's writes: NFS caches a directory for up to a minute.
const DIRECTORY_LAG: Duration = Duration::from_secs(60);

/// The longest wait for a short answer.
const LEAST_TIME: Duration = Duration::from_secs(30);
/// Lowest accepted rate of a store, in bytes per second.
const SLOWEST: u64 = 16 << 10;

/// A repository of images. Clones share their connections.
#[derive(Clone, Debug)]
pub struct Repository {
    store: Arc<dyn ObjectStore>,
    shown: Arc<str>,
    /// The directory of a repository that is a directory.
    directory: Option<Arc<std::path::Path>>,
    /// Time after which all hosts see a write.
    lag: Duration,
    /// The usual time of answers.
    hedge: Arc<Hedge>,
}

impl Repository {
    /// Opens the repository with the credentials of the environment. Sends no request to an S3 store.
    ///
    /// # Errors
    /// The directory is missing, or the configuration is invalid.
    pub fn open(location: &Location) -> Result<Self, RepositoryError> {
        Self::open_with(location, None)
    }

    /// Opens the repository with these credentials.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn open_with(location: &Location, keys: Option<&Keys>) -> Result<Self, RepositoryError> {
        Ok(Self {
            store: location.open(keys)?,
            shown: location.to_string().into(),
            directory: match location {
                Location::Directory(path) => Some(path.as_path().into()),
                Location::S3 { .. } => None,
            },
            lag: match location {
                Location::Directory(_) => DIRECTORY_LAG,
                Location::S3 { .. } => Duration::ZERO,
            },
            hedge: Arc::default(),
        })
    }

    /// Returns the same repository, in which other hosts see a write after `lag` at the latest.
    ///
    /// # Errors
    /// The lag is longer than [`Self::collect`] supports.
    pub fn with_lag(self, lag: Duration) -> Result<Self, RepositoryError> {
        if lag > removal::lease::LONGEST_LAG {
            return Err(RepositoryError::Open {
                repository: self.shown.to_string(),
                why: format!(
                    "caches that lag for more than {} s are not supported",
                    removal::lease::LONGEST_LAG.as_secs()
                ),
            });
        }
        Ok(Self { lag, ..self })
    }

    /// The total wait of [`Self::collect`] for the caches of other hosts.
    pub const fn collecting_waits(&self) -> Duration {
        self.lag.saturating_mul(4)
    }

    /// The location, for display.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Fetches a chunk of `length` bytes and checks the hash.
    ///
    /// # Errors
    /// The chunk is missing or damaged, or the store fails.
    pub async fn chunk(&self, id: ChunkId, length: u64) -> Result<Bytes, RepositoryError> {
        let path = chunk_path(id);
        let ask = || {
            let (this, path) = (self.clone(), path.clone());
            async move { this.get(&path, length).await }.boxed()
        };
        let found = match &self.directory {
            Some(_) => ask().await?,
            None => self.hedge.first(ask).await?,
        };
        let Some(bytes) = found else {
            return Err(RepositoryError::NoChunk {
                chunk: id,
                repository: self.shown.to_string(),
            });
        };
        if bytes.len() as u64 != length || ChunkId::of(&bytes) != id {
            return Err(RepositoryError::DamagedChunk {
                chunk: id,
                repository: self.shown.to_string(),
            });
        }
        Ok(bytes)
    }

    /// Fetches a manifest and checks the hash.
    ///
    /// # Errors
    /// The manifest is missing or damaged, or the store fails.
    pub async fn manifest(&self, id: ManifestId) -> Result<Manifest, RepositoryError> {
        let found = self.get(&manifest_path(id), Manifest::MAX_BYTES).await?;
        let Some(bytes) = found else {
            return Err(RepositoryError::NoManifest {
                manifest: id,
                repository: self.shown.to_string(),
            });
        };
        Manifest::decode(id, &bytes).map_err(|why| RepositoryError::DamagedManifest {
            manifest: id,
            repository: self.shown.to_string(),
            why,
        })
    }

    /// Returns an object, if present. An object longer than `most` bytes is returned empty.
    async fn get(&self, path: &Path, most: u64) -> Result<Option<Bytes>, RepositoryError> {
        let found = self.get_with_meta(path, most).await?;
        Ok(found.map(|(bytes, _)| bytes))
    }

    /// Like [`Self::get`], with the store's metadata.
    async fn get_with_meta(
        &self,
        path: &Path,
        most: u64,
    ) -> Result<Option<(Bytes, ObjectMeta)>, RepositoryError> {
        self.in_time(most, async { self.get_at_ease(path, most).await })
            .await
    }

    async fn get_at_ease(
        &self,
        path: &Path,
        most: u64,
    ) -> Result<Option<(Bytes, ObjectMeta)>, RepositoryError> {
        let answer = match self.store.get(path).await {
            Err(object_store::Error::NotFound { .. }) => return self.is_there().map(|()| None),
            answer => answer.map_err(|error| self.failed(&error))?,
        };
        let meta = answer.meta.clone();
        if meta.size > most {
            // The caller's check of the content fails.
            return Ok(Some((Bytes::new(), meta)));
        }
        let bytes = answer.bytes().await.map_err(|error| self.failed(&error))?;
        Ok(Some((bytes, meta)))
    }

    async fn put(&self, path: &Path, bytes: impl Into<PutPayload>) -> Result<(), RepositoryError> {
        // The put would create a missing directory.
        self.is_there()?;
        let bytes = bytes.into();
        let length = bytes.content_length() as u64;
        let put = async {
            let put = self.store.put(path, bytes).await;
            put.map(|_| ()).map_err(|error| self.failed(&error))
        };
        self.in_time(length, put).await
    }

    /// Gives up on an S3 store that takes much longer than a slow link for so many bytes.
    async fn in_time<T>(
        &self,
        bytes: u64,
        work: impl Future<Output = Result<T, RepositoryError>>,
    ) -> Result<T, RepositoryError> {
        if self.directory.is_some() {
            return work.await;
        }
        let limit = LEAST_TIME + Duration::from_secs(bytes / SLOWEST);
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            Err(RepositoryError::Down {
                repository: self.shown.to_string(),
                why: format!("an answer did not come whole within {} s", limit.as_secs()),
            })
        })
    }

    async fn head(&self, path: &Path) -> Result<Option<ObjectMeta>, RepositoryError> {
        match self.store.head(path).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => self.is_there().map(|()| None),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Fails if the whole directory is missing, rather than one object.
    fn is_there(&self) -> Result<(), RepositoryError> {
        match &self.directory {
            Some(directory) if !directory.is_dir() => Err(RepositoryError::Down {
                repository: self.shown.to_string(),
                why: String::from("there is no such directory now"),
            }),
            _ => Ok(()),
        }
    }

    /// Fails if no image was ever pushed here. An empty directory may be a mount point without its file system: reads
    /// would find no image, and writes would be hidden by the next mount.
    fn is_in_use(&self) -> Result<(), RepositoryError> {
        self.is_there()?;
        let has = |directory: &std::path::Path| {
            let mut folders = ["images", "manifests", "chunks"].iter();
            folders.any(|folder| directory.join(folder).is_dir())
        };
        match &self.directory {
            Some(directory) if !has(directory) => Err(RepositoryError::Down {
                repository: self.shown.to_string(),
                why: String::from(
                    "the directory has no images: is it mounted, or was nothing pushed yet?",
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Removes an object. A missing object is no error.
    async fn delete(&self, path: &Path) -> Result<(), RepositoryError> {
        match self.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Lists all objects in a folder.
    async fn list(&self, folder: &Path) -> Result<Vec<ObjectMeta>, RepositoryError> {
        self.is_there()?;
        let found: Vec<ObjectMeta> = self
            .store
            .list(Some(folder))
            .try_collect()
            .await
            .map_err(|error| self.failed(&error))?;
        Ok(found)
    }

    fn failed(&self, error: &object_store::Error) -> RepositoryError {
        if self.directory.is_none() {
            return RepositoryError::store(&self.shown, error);
        }
        match self.is_there() {
            // The directory answers: full, unreadable or unwritable.
            Ok(()) => RepositoryError::directory(&self.shown, error),
            Err(away) => away,
        }
    }
}

fn chunk_path(id: ChunkId) -> Path {
    let name = id.to_string();
    Path::from(format!("chunks/{}/{name}", &name[..2]))
}

fn manifest_path(id: ManifestId) -> Path {
    Path::from(format!("manifests/{id}"))
}
