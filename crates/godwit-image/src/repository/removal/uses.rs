//! Uses: the disks that still fetch from an image. The chunks of these images must stay.

use object_store::path::{Path, PathPart};

use crate::error::RepositoryError;
use crate::manifest::{Manifest, ManifestId};
use crate::name::ImageName;
use crate::push_time::PushTime;
use crate::repository::Repository;

/// A disk that fetches from an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The node that serves the disk.
    pub node: String,
    /// Tells the node apart from another node of the same name at this repository: letters and digits.
    pub node_id: String,
    /// The disk's name.
    pub disk: String,
}

/// The recorded image of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    /// The manifest's name.
    pub id: ManifestId,
    /// The manifest.
    pub manifest: Manifest,
    /// The time of this content's push, while the image's name stands for this content.
    pub pushed: Option<PushTime>,
}

impl Repository {
    /// Records that a disk fetches from the image and returns the image. The image's chunks stay from now on.
    ///
    /// # Errors
    /// No image has this name, chunks are being collected, or the store fails.
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

    /// Like [`Self::begin_use`] for an image's content, regardless of the present meaning of the name.
    ///
    /// # Errors
    /// The content is missing, chunks are being collected, or the store fails.
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

    /// Returns the time of this content's push under the name; none if the name stands for other content or is free.
    pub(in crate::repository) async fn pushed(
        &self,
        id: ManifestId,
        image: &ImageName,
    ) -> Result<Option<PushTime>, RepositoryError> {
        match self.entry(image).await {
            Ok(entry) if entry.info.manifest == id.to_string() => {
                Ok(entry.info.created.parse().ok())
            }
            // An unreadable entry counts as a missing one.
            Ok(_) | Err(RepositoryError::NoImage { .. } | RepositoryError::DamagedEntry { .. }) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Records that the disk fetches from this content. Requires a lease: the content then exists and stays.
    pub(in crate::repository) async fn note_use(
        &self,
        id: ManifestId,
        image: &ImageName,
        user: &User,
    ) -> Result<(), RepositoryError> {
        let bytes = image.as_str().as_bytes().to_vec();
        self.put(&use_path(id, user), bytes).await
    }

    /// Removes the record that a disk fetches from the image.
    ///
    /// # Errors
    /// The store fails.
    pub async fn end_use(&self, id: ManifestId, user: &User) -> Result<(), RepositoryError> {
        self.delete(&use_path(id, user)).await
    }

    /// Returns all disks with the manifests that they fetch from.
    ///
    /// # Errors
    /// The store fails.
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

    /// Forgets all disks of the nodes of this name and returns the removed records. None of these disks may fetch any
    /// more. Records of a destroyed node are removed in no other way.
    ///
    /// # Errors
    /// The store fails.
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

    pub(in crate::repository) async fn users_of(
        &self,
        id: ManifestId,
    ) -> Result<Vec<User>, RepositoryError> {
        let all = self.uses().await?;
        let its = all.into_iter().filter(|(other, _)| *other == id);
        Ok(its.map(|(_, user)| user).collect())
    }
}

fn use_path(id: ManifestId, user: &User) -> Path {
    let id = id.to_string();
    Path::from_iter(["uses", &id, &user.node, &user.node_id, &user.disk])
}
