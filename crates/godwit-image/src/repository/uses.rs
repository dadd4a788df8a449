//! Which disks still fetch from which image: their chunks must stay.

use object_store::path::{Path, PathPart};

use crate::error::RepositoryError;
use crate::manifest::{Manifest, ManifestId};
use crate::name::ImageName;
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

impl Repository {
    /// Notes that a disk fetches from the image, whose chunks stay from now on, and says what the image is.
    ///
    /// # Errors
    /// There is no such image, chunks are being collected, or the store does not do its part.
    pub async fn begin_use(
        &self,
        image: &ImageName,
        user: &User,
    ) -> Result<(ManifestId, Manifest), RepositoryError> {
        let lease = self.lease().await?;
        let found = async {
            let id = self.entry(image).await?.manifest()?;
            let manifest = self.manifest(id).await?;
            let bytes = image.as_str().as_bytes().to_vec();
            self.put(&use_path(id, user), bytes).await?;
            Ok((id, manifest))
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
    ) -> Result<Manifest, RepositoryError> {
        let lease = self.lease().await?;
        let found = async {
            let manifest = self.manifest(id).await?;
            let bytes = image.as_str().as_bytes().to_vec();
            self.put(&use_path(id, user), bytes).await?;
            Ok(manifest)
        };
        let found = found.await;
        lease.end().await;
        found
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
