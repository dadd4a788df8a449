//! Keeps what relies on chunks that no manifest names yet, and what removes such chunks, out of each other's way.
//!
//! Who pushes writes a lease, and then looks whether chunks are being collected; who collects says so, and then
//! looks whether there are leases. As the store shows each write to all who ask after it, at least one of two sees
//! the other and steps back. Both kinds of objects are written again every minute. One that was not for a
//! quarter of an hour is its dead owner's: the age is told by the store's clock alone, since it is compared with an
//! object that was just written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::ObjectMeta;
use object_store::path::Path;

use crate::error::RepositoryError;
use crate::repository::Repository;

/// How often a lease is written again.
const RENEWAL: Duration = Duration::from_secs(60);
/// After how long without that it counts no more.
const LIFETIME: Duration = Duration::from_secs(15 * 60);

const FOLDER: &str = "leases";
const COLLECTING: &str = "collecting";

/// A lease, renewed until it is dropped; [`Self::end`] removes it at once.
#[derive(Debug)]
pub(super) struct Lease {
    repository: Repository,
    path: Path,
    /// It was seen to be away: somebody took its owner for dead, and it must not come back.
    lost: Arc<AtomicBool>,
    renewal: tokio::task::JoinHandle<()>,
}

impl Lease {
    async fn write(repository: &Repository, path: Path) -> Result<Self, RepositoryError> {
        repository.put(&path, Vec::new()).await?;
        let lost = Arc::new(AtomicBool::new(false));
        let (again, at, gone) = (repository.clone(), path.clone(), Arc::clone(&lost));
        let renewal = tokio::spawn(async move {
            while !gone.load(Ordering::Relaxed) {
                tokio::time::sleep(RENEWAL).await;
                if let Err(error) = renew(&again, &at, &gone).await {
                    tracing::warn!(%error, "cannot renew a lease; trying on");
                }
            }
        });
        Ok(Self {
            repository: repository.clone(),
            path,
            lost,
            renewal,
        })
    }

    /// Renews it. Whether nobody can have taken its owner for dead until now.
    pub(super) async fn holds(&self) -> Result<bool, RepositoryError> {
        renew(&self.repository, &self.path, &self.lost).await?;
        Ok(!self.lost.load(Ordering::Relaxed))
    }

    /// Removes it. One that cannot be removed ends by itself.
    pub(super) async fn end(self) {
        self.renewal.abort();
        if self.lost.load(Ordering::Relaxed) {
            // What is there now may be somebody else's.
            return;
        }
        if let Err(error) = self.repository.delete(&self.path).await {
            tracing::warn!(%error, "cannot remove a lease; it ends by itself in a quarter of an hour");
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

impl Repository {
    /// Begins to rely on chunks that no manifest names.
    pub(super) async fn lease(&self) -> Result<Lease, RepositoryError> {
        let lease = Lease::write(self, Path::from(format!("{FOLDER}/{}", unique()))).await?;
        let collecting = async {
            let Some(collecting) = self.head(&Path::from(COLLECTING)).await? else {
                return Ok(false);
            };
            let own = self.head(&lease.path).await?;
            Ok(own.is_none_or(|own| is_alive(&collecting, &own)))
        };
        match collecting.await {
            Ok(false) => Ok(lease),
            Ok(true) => {
                lease.end().await;
                Err(self.busy("chunks that no image has are being removed (gc)"))
            }
            Err(error) => {
                lease.end().await;
                Err(error)
            }
        }
    }

    /// Begins to remove chunks that no manifest names.
    pub(super) async fn begin_collecting(&self) -> Result<Lease, RepositoryError> {
        let path = Path::from(COLLECTING);
        let before = self.head(&path).await?;
        let probe = Path::from(format!("{FOLDER}/probe-{}", unique()));
        if let Some(before) = before {
            // Only this tells what time it is at the store.
            self.put(&probe, Vec::new()).await?;
            let now = self.head(&probe).await;
            self.delete(&probe).await?;
            if now?.is_none_or(|now| is_alive(&before, &now)) {
                return Err(self.busy("another gc runs"));
            }
        }
        let marker = Lease::write(self, path).await?;
        match self.no_leases(&marker).await {
            Ok(()) => Ok(marker),
            Err(error) => {
                marker.end().await;
                Err(error)
            }
        }
    }

    async fn no_leases(&self, marker: &Lease) -> Result<(), RepositoryError> {
        let own = self.head(&marker.path).await?;
        for lease in self.list(&Path::from(FOLDER)).await? {
            if own.as_ref().is_none_or(|own| is_alive(&lease, own)) {
                return Err(self.busy("an image is being pushed, or a disk created from one"));
            }
            self.delete(&lease.location).await?;
        }
        Ok(())
    }

    pub(super) fn busy(&self, why: &str) -> RepositoryError {
        RepositoryError::Busy {
            repository: self.shown.to_string(),
            why: why.to_owned(),
        }
    }
}

/// Writes a lease again. One that is away was removed as a dead owner's, for instance while this host was suspended, and
/// one that is older than it may be could have been taken for that: written again it looks as if it had been there all
/// the time, so it is noted that it has not.
async fn renew(
    repository: &Repository,
    path: &Path,
    lost: &AtomicBool,
) -> Result<(), RepositoryError> {
    let before = repository.head(path).await?;
    if before.is_some() {
        repository.put(path, Vec::new()).await?;
    }
    let after = repository.head(path).await?;
    let held = before
        .zip(after)
        .is_some_and(|(before, after)| is_alive(&before, &after));
    if !held {
        lost.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Whether this was written not long before that.
fn is_alive(this: &ObjectMeta, that: &ObjectMeta) -> bool {
    let age = that.last_modified.signed_duration_since(this.last_modified);
    age.to_std().is_ok_and(|age| age < LIFETIME) || age < Default::default()
}

/// A name that nobody else has.
fn unique() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.as_nanos());
    let mut random = [0; 16];
    // Without randomness the time and the process tell enough apart.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    let number = u128::from_le_bytes(random);
    format!("{nanos:x}-{:x}-{number:032x}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lease_that_was_taken_for_a_dead_ones_does_not_come_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let location = folder.path().to_str().expect("text").parse();
        let location: crate::Location = location.expect("a directory");
        let repository = Repository::open(&location).expect("opened");
        let lease = repository.lease().await.expect("a lease");
        renew(&repository, &lease.path, &lease.lost)
            .await
            .expect("renewed");
        assert!(lease.holds().await.expect("an answer"));
        let old = std::time::SystemTime::now() - LIFETIME - RENEWAL;
        let file = std::fs::File::open(folder.path().join(lease.path.as_ref())).expect("its file");
        file.set_modified(old).expect("made old");
        assert!(
            !lease.holds().await.expect("an answer"),
            "somebody may have taken its owner for dead"
        );
        let lease = repository.lease().await.expect("another");
        repository.delete(&lease.path).await.expect("removed");
        renew(&repository, &lease.path, &lease.lost)
            .await
            .expect("an answer");
        assert!(!lease.holds().await.expect("an answer"));
    }
}
