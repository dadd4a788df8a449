//! Which disks still fetch from which image: their chunks must stay.

use object_store::path::{Path, PathPart};

use crate::error::RepositoryError;
use crate::manifest::{Manifest, ManifestId};
use crate::name::ImageName;
use crate::push_time::PushTime;
use crate::repository::Repository;

/// A disk that fetches from an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The node that serves it.
    pub node: String,
    /// What tells the node apart from another of the same name that uses the repository, too: letters and digits.
    pub node_id: String,
    /// Its name.
    pub disk: String,
}

/// What a disk fetches from, since that is noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    /// The manifest's name.
    pub id: ManifestId,
    /// The image.
    pub manifest: Manifest,
    /// When this content was pushed under the image's name, as long as the name stands for it.
    pub pushed: Option<PushTime>,
}

impl Repository {
    /// Notes that a disk fetches from the image, whose chunks stay from now on, and says what the image is.
    ///
    /// # Errors
    /// There is no such image, chunks are being collected, or the store does not do its part.
    pub async fn begin_use(&self, image: &ImageName, user: &User) -> Result<Used, RepositoryError> {
        self.is_in_use()?;
        let lease = self.lease().await?;
        let found = async {
            let entry = self.entry(image).await?;
            let id = entry.manifest()?;
            let manifest = self.manifest(id).await?;
            self.note_use(id, image, user).await?;
            Ok(Used {
                id,
                manifest,
                pushed: entry.info.created.parse().ok(),
            })
        };
        let found = found.await;
        lease.end().await;
        found
    }

    /// The same for an image's content, whatever its name stands for now.
    ///
    /// # Errors
    /// That is not there, chunks are being collected, or the store does not do its part.
    pub async fn begin_use_of(
        &self,
        id: ManifestId,
        image: &ImageName,
        user: &User,
    ) -> Result<Used, RepositoryError> {
        self.is_in_use()?;
        let lease = self.lease().await?;
        let found = async {
            let manifest = self.manifest(id).await?;
            let pushed = self.pushed(id, image).await?;
            self.note_use(id, image, user).await?;
            Ok(Used {
                id,
                manifest,
                pushed,
            })
        };
        let found = found.await;
        lease.end().await;
        found
    }

    /// When this content was pushed under the name; nothing when the name stands for something else, or for nothing.
    pub(super) async fn pushed(
        &self,
        id: ManifestId,
        image: &ImageName,
    ) -> Result<Option<PushTime>, RepositoryError> {
        match self.entry(image).await {
            Ok(entry) if entry.info.manifest == id.to_string() => {
                Ok(entry.info.created.parse().ok())
            }
            // What cannot be read is as little of use as what is not there.
            Ok(_) | Err(RepositoryError::NoImage { .. } | RepositoryError::DamagedEntry { .. }) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Notes that the disk fetches from this content. Only who has a lease may: it is there then, and stays.
    pub(super) async fn note_use(
        &self,
        id: ManifestId,
        image: &ImageName,
        user: &User,
    ) -> Result<(), RepositoryError> {
        let bytes = image.as_str().as_bytes().to_vec();
        self.put(&use_path(id, user), bytes).await
    }

    /// The disk needs the image no more.
    ///
    /// # Errors
    /// The store does not do its part.
    pub async fn end_use(&self, id: ManifestId, user: &User) -> Result<(), RepositoryError> {
        self.delete(&use_path(id, user)).await
    }

    /// The manifests that disks fetch from, and these disks.
    ///
    /// # Errors
    /// The store does not do its part.
    pub async fn uses(&self) -> Result<Vec<(ManifestId, User)>, RepositoryError> {
        let found = self.list(&Path::from("uses")).await?;
        let uses = found.iter().filter_map(|meta| {
            let parts: Vec<PathPart<'_>> = meta.location.parts().skip(1).collect();
            let [id, node, node_id, disk] = parts.as_slice() else {
                return None;
            };
            let user = User {
                node: node.as_ref().to_owned(),
                node_id: node_id.as_ref().to_owned(),
                disk: disk.as_ref().to_owned(),
            };
            Some((id.as_ref().parse().ok()?, user))
        });
        Ok(uses.collect())
    }

    /// Forgets all disks of the nodes of this name, of which none will fetch anything any more; what was forgotten.
    /// Nothing else removes the notes of a node that was destroyed.
    ///
    /// # Errors
    /// The store does not do its part.
    pub async fn forget_node(
        &self,
        node: &str,
    ) -> Result<Vec<(ManifestId, User)>, RepositoryError> {
        let mut its = self.uses().await?;
        its.retain(|(_, user)| user.node == node);
        for (id, user) in &its {
            self.end_use(*id, user).await?;
        }
        Ok(its)
    }

    pub(super) async fn users_of(&self, id: ManifestId) -> Result<Vec<User>, RepositoryError> {
        let all = self.uses().await?;
        let its = all.into_iter().filter(|(other, _)| *other == id);
        Ok(its.map(|(_, user)| user).collect())
    }
}

fn use_path(id: ManifestId, user: &User) -> Path {
    let id = id.to_string();
    Path::from_iter(["uses", &id, &user.node, &user.node_id, &user.disk])
}
