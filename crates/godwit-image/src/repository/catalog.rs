//! The catalog: the images of a repository and the manifests of their names.

use object_store::path::Path;
use object_store::{ObjectStore, PutMode};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::error::RepositoryError;
use crate::manifest::ManifestId;
use crate::name::ImageName;
use crate::repository::Repository;

/// Format of the entries.
const VERSION: u32 = 1;
/// Longest entry that is read, in bytes.
const LONGEST: u64 = 4096;

/// The catalog entry of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInfo {
    version: u32,
    /// The image's name.
    pub name: ImageName,
    /// The manifest's name. Equal names mean equal content.
    pub manifest: String,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// Stored bytes; the other bytes are zeroes.
    pub data_bytes: u64,
    /// The time of the push, like `2025-01-31T12:00:00Z`.
    pub created: String,
}

/// The result of a removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// The image.
    pub name: ImageName,
    /// The disks that still fetched from the image, as `NODE/DISK`.
    pub users: Vec<String>,
}

impl ImageInfo {
    pub(super) fn new(name: ImageName, id: ManifestId, size_bytes: u64, data_bytes: u64) -> Self {
        let now = OffsetDateTime::now_utc().replace_nanosecond(0);
        let now = now.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        Self {
            version: VERSION,
            name,
            manifest: id.to_string(),
            size_bytes,
            data_bytes,
            created: now.format(&Rfc3339).unwrap_or_default(),
        }
    }
}

/// An entry and the repository that it was read from.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) info: ImageInfo,
    repository: String,
}

impl Entry {
    pub(super) fn manifest(&self) -> Result<ManifestId, RepositoryError> {
        let id = self.info.manifest.parse();
        id.map_err(|()| RepositoryError::DamagedEntry {
            image: self.info.name.clone(),
            repository: self.repository.clone(),
            why: String::from("it names no manifest"),
        })
    }
}

impl Repository {
    /// Returns all images, sorted by name.
    ///
    /// # Errors
    /// The store fails, or an entry is damaged.
    pub async fn images(&self) -> Result<Vec<ImageInfo>, RepositoryError> {
        let mut images = Vec::new();
        for meta in self.list(&Path::from("images")).await? {
            let Some(name) = meta.location.filename().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.entry(&name).await {
                Ok(entry) => images.push(entry.info),
                // Removed meanwhile.
                Err(RepositoryError::NoImage { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        images.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(images)
    }

    /// Returns one image and the disks that fetch from this image.
    ///
    /// # Errors
    /// No image has this name, the entry is damaged, or the store fails.
    pub async fn image(
        &self,
        name: &ImageName,
    ) -> Result<(ImageInfo, Vec<String>), RepositoryError> {
        let entry = self.entry(name).await?;
        let users = self.users_of(entry.manifest()?).await?;
        Ok((entry.info, shown(&users)))
    }

    /// Removes an image's name. The next [`Self::collect`] removes chunks that no other image has.
    ///
    /// # Errors
    /// No image has this name; or, unless forced, disks fetch from the image; or the store fails.
    pub async fn remove(&self, name: &ImageName, force: bool) -> Result<Removed, RepositoryError> {
        let id = match self.entry(name).await {
            Ok(entry) => Some(entry.manifest()?),
            // An entry that cannot be read can still be removed.
            Err(RepositoryError::DamagedEntry { .. }) if force => None,
            Err(error) => return Err(error),
        };
        let mut users = Vec::new();
        if let Some(id) = id {
            let others = self.images().await?;
            let same = |other: &ImageInfo| other.name != *name && other.manifest == id.to_string();
            // If another name has the same content, the content stays.
            if !others.iter().any(same) {
                users = self.users_of(id).await?;
            }
        }
        if !users.is_empty() && !force {
            return Err(RepositoryError::InUse {
                image: name.clone(),
                users: shown(&users),
            });
        }
        self.delete(&image_path(name)).await?;
        if let Some(id) = id {
            for user in &users {
                self.end_use(id, user).await?;
            }
        }
        Ok(Removed {
            name: name.clone(),
            users: shown(&users),
        })
    }

    pub(super) async fn entry(&self, name: &ImageName) -> Result<Entry, RepositoryError> {
        let repository = self.shown.to_string();
        let Some(bytes) = self.get(&image_path(name), LONGEST).await? else {
            return Err(RepositoryError::NoImage {
                image: name.clone(),
                repository,
            });
        };
        let damaged = |why: String| RepositoryError::DamagedEntry {
            image: name.clone(),
            repository: repository.clone(),
            why,
        };
        let info: ImageInfo =
            serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if info.version != VERSION {
            let text = format!(
                "it has format {}, this version knows {VERSION}",
                info.version
            );
            return Err(damaged(text));
        }
        if info.name != *name {
            return Err(damaged(format!("it is about '{}'", info.name)));
        }
        Ok(Entry { info, repository })
    }

    /// Lets the name stand for the image. If two pushes of a new name race without `replace`, one of the two succeeds.
    pub(super) async fn put_entry(
        &self,
        info: &ImageInfo,
        replace: bool,
    ) -> Result<(), RepositoryError> {
        let json = serde_json::to_vec_pretty(info).unwrap_or_default();
        let path = image_path(&info.name);
        if !replace {
            self.is_there()?;
            let put = self
                .store
                .put_opts(&path, json.clone().into(), PutMode::Create.into());
            match put.await {
                Ok(_) => return Ok(()),
                Err(object_store::Error::AlreadyExists { .. }) => {
                    // The store may have taken this entry while the answer was lost.
                    if self.entry(&info.name).await?.info.manifest == info.manifest {
                        return Ok(());
                    }
                    return Err(RepositoryError::Exists {
                        image: info.name.clone(),
                        repository: self.shown.to_string(),
                    });
                }
                Err(error) => {
                    let failed = self.failed(&error);
                    if self.bears(&failed) {
                        return Err(failed);
                    }
                    // Some stores have no conditional put. The name was free before the chunks were sent.
                }
            }
        }
        self.put(&path, json).await
    }
}

fn shown(users: &[super::removal::uses::User]) -> Vec<String> {
    let shown = users
        .iter()
        .map(|user| format!("{}/{}", user.node, user.disk));
    shown.collect()
}

fn image_path(name: &ImageName) -> Path {
    Path::from_iter(["images", name.as_str()])
}
