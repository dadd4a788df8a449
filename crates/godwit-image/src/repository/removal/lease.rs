//! Leases keep operations that rely on chunks without a manifest and collections of such chunks apart.
//!
//! A push writes a lease and then looks for a collection. A collection writes a marker and then looks for leases. As
//! the store shows each write to every reader, at least one of the two sees the other and steps back. Both kinds of
//! objects are renewed every minute. An object that was not renewed for a quarter of an hour belongs to a dead owner.
//! Only the store's clock counts: the age is measured against an object that was just written.
//!
//! A directory that hosts share over a network shows a write to other hosts only after a time `T`, for which they cache
//! what they saw last. The collection waits for the caches, so that pushes need not:
//!
//! ```text
//! writes its marker at t, and looks for leases at t + 2T or later. A lease that it does not see is younger than t + T,
//!     and the lease's owner sees the marker at once.
//! lists the objects after another T: by then it sees the entries of all owners of leases.
//! removes, and deletes its marker after another T: by then no host sees a chunk that is gone.
//! ```
//!
//! If two collections write their markers within `T` of each other, the later marker stays, and the earlier collection
//! finds a foreign marker. Therefore neither renews a marker before this check.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::ObjectMeta;
use object_store::path::Path;

use crate::error::RepositoryError;
use crate::repository::Repository;

/// Time between two renewals of a lease.
const RENEWAL: Duration = Duration::from_secs(60);
/// Time without renewal after which a lease is dead.
const LIFETIME: Duration = Duration::from_secs(15 * 60);
/// The longest supported lag of caches: three times this lag and a renewal fit into a lifetime.
pub(in crate::repository) const LONGEST_LAG: Duration = Duration::from_secs(4 * 60);
/// Longest lease that is read, in bytes.
const LONGEST: u64 = 256;

const PUSHING: &str = "an image is being pushed, or a disk created from one";
const FOLDER: &str = "leases";
const COLLECTING: &str = "collecting";

/// A lease, renewed until dropped. [`Self::end`] removes the lease at once.
#[derive(Debug)]
pub(in crate::repository) struct Lease {
    repository: Repository,
    path: Path,
    /// The content, unique to this lease.
    mark: Arc<str>,
    /// True once the lease was found missing or expired: others may have taken the owner for dead, so the lease must
    /// not come back.
    lost: Arc<AtomicBool>,
    renewal: Option<tokio::task::JoinHandle<()>>,
}

impl Lease {
    async fn write(repository: &Repository, path: Path) -> Result<Self, RepositoryError> {
        let mark: Arc<str> = unique().into();
        repository.put(&path, mark.as_bytes().to_vec()).await?;
        Ok(Self {
            repository: repository.clone(),
            path,
            mark,
            lost: Arc::new(AtomicBool::new(false)),
            renewal: None,
        })
    }

    /// Starts the renewal.
    fn keep(mut self) -> Self {
        let (again, at) = (self.repository.clone(), self.path.clone());
        let (mark, gone) = (Arc::clone(&self.mark), Arc::clone(&self.lost));
        self.renewal = Some(tokio::spawn(async move {
            while !gone.load(Ordering::Relaxed) {
                tokio::time::sleep(RENEWAL).await;
                if let Err(error) = renew(&again, &at, &mark, &gone).await {
                    tracing::warn!(%error, "cannot renew a lease; trying on");
                }
            }
        }));
        self
    }

    /// Returns true if the object at the path is this lease. Writes nothing.
    async fn is_there(&self) -> Result<bool, RepositoryError> {
        let found = self.repository.get_with_meta(&self.path, LONGEST).await?;
        let own = found.is_some_and(|(bytes, _)| bytes == self.mark.as_bytes());
        if !own {
            self.lost.store(true, Ordering::Relaxed);
        }
        Ok(own)
    }

    /// Renews the lease. Returns true if the owner cannot have been taken for dead so far.
    pub(in crate::repository) async fn holds(&self) -> Result<bool, RepositoryError> {
        renew(&self.repository, &self.path, &self.mark, &self.lost).await?;
        Ok(!self.lost.load(Ordering::Relaxed))
    }

    /// Removes the lease. A lease that cannot be removed expires.
    pub(in crate::repository) async fn end(mut self) {
        self.stop();
        if self.lost.load(Ordering::Relaxed) {
            // The object at the path may be another owner's.
            return;
        }
        if let Err(error) = self.repository.delete(&self.path).await {
            tracing::warn!(%error, "cannot remove a lease; it ends by itself in a quarter of an hour");
        }
    }
}

impl Lease {
    fn stop(&mut self) {
        if let Some(renewal) = self.renewal.take() {
            renewal.abort();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The state of a lease's owner.
#[derive(Debug)]
enum Standing {
    Alive(Path),
    Dead(Path),
}

impl Repository {
    /// Begins to rely on chunks that no manifest names.
    pub(in crate::repository) async fn lease(&self) -> Result<Lease, RepositoryError> {
        let lease = Lease::write(self, Path::from(format!("{FOLDER}/{}", unique()))).await?;
        let collecting = async {
            let Some(collecting) = self.head(&Path::from(COLLECTING)).await? else {
                return Ok(false);
            };
            let own = self.head(&lease.path).await?;
            Ok(own.is_none_or(|own| is_alive(&collecting, &own)))
        };
        match collecting.await {
            Ok(false) => Ok(lease.keep()),
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

    /// Begins to remove chunks that no manifest names. Other hosts see a write after `lag` at the latest.
    pub(in crate::repository) async fn begin_collecting(
        &self,
        lag: Duration,
    ) -> Result<Lease, RepositoryError> {
        let path = Path::from(COLLECTING);
        // Only a fresh write tells the time at the store.
        let probe = Path::from(format!("{FOLDER}/probe-{}", unique()));
        self.put(&probe, Vec::new()).await?;
        let free = self.is_free(&path, &probe).await;
        self.delete(&probe).await?;
        free?;
        let marker = Lease::write(self, path).await?;
        tokio::time::sleep(2 * lag).await;
        let alone = async {
            if !marker.is_there().await? {
                return Err(self.busy("another gc runs"));
            }
            let now = self.head(&marker.path).await?;
            for lease in self.leases(now.as_ref()).await? {
                match lease {
                    Standing::Alive(_) => return Err(self.busy(PUSHING)),
                    Standing::Dead(path) => self.delete(&path).await?,
                }
            }
            Ok(())
        };
        match alone.await {
            Ok(()) => Ok(marker.keep()),
            Err(error) => {
                marker.end().await;
                Err(error)
            }
        }
    }

    /// Refuses at once if leases or another collection are visible: waiting for caches would keep pushes away in vain.
    async fn is_free(&self, marker: &Path, probe: &Path) -> Result<(), RepositoryError> {
        let now = self.head(probe).await?;
        if let Some(before) = self.head(marker).await?
            && now.as_ref().is_none_or(|now| is_alive(&before, now))
        {
            return Err(self.busy("another gc runs"));
        }
        let mut leases = self.leases(now.as_ref()).await?.into_iter();
        match leases.any(|lease| matches!(lease, Standing::Alive(path) if path != *probe)) {
            true => Err(self.busy(PUSHING)),
            false => Ok(()),
        }
    }

    /// Returns all leases and their states at the time of the latest write, `now`.
    async fn leases(&self, now: Option<&ObjectMeta>) -> Result<Vec<Standing>, RepositoryError> {
        let leases = self.list(&Path::from(FOLDER)).await?.into_iter();
        let standing = |lease: ObjectMeta| match now.is_none_or(|now| is_alive(&lease, now)) {
            true => Standing::Alive(lease.location),
            false => Standing::Dead(lease.location),
        };
        Ok(leases.map(standing).collect())
    }

    pub(in crate::repository) fn busy(&self, why: &str) -> RepositoryError {
        RepositoryError::Busy {
            repository: self.shown.to_string(),
            why: why.to_owned(),
        }
    }
}

/// Renews a lease. A missing lease was removed as a dead owner's, for instance while this host was suspended. An
/// expired lease could have been taken for a dead owner's. A renewal would hide the gap, so `lost` records the gap.
async fn renew(
    repository: &Repository,
    path: &Path,
    mark: &str,
    lost: &AtomicBool,
) -> Result<(), RepositoryError> {
    let before = repository.get_with_meta(path, LONGEST).await?;
    // The object of another owner is left alone.
    let before = before.and_then(|(bytes, meta)| (bytes == mark.as_bytes()).then_some(meta));
    if before.is_some() {
        repository.put(path, mark.as_bytes().to_vec()).await?;
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

/// Returns true if `this` was written less than [`LIFETIME`] before `that`, or later.
fn is_alive(this: &ObjectMeta, that: &ObjectMeta) -> bool {
    let age = that.last_modified.signed_duration_since(this.last_modified);
    age.to_std().is_ok_and(|age| age < LIFETIME) || age < Default::default()
}

/// Returns a unique name.
fn unique() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.as_nanos());
    let mut random = [0; 16];
    // Without randomness, the time and the process id are unique enough.
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
        assert!(lease.holds().await.expect("renewed"));
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
        assert!(!lease.holds().await.expect("an answer"));
        assert!(!lease.holds().await.expect("it does not come back"));
        let lease = repository.lease().await.expect("another");
        repository.put(&lease.path, vec![1]).await.expect("taken");
        assert!(!lease.holds().await.expect("an answer"));
        let path = folder.path().join(lease.path.as_ref());
        lease.end().await;
        assert_eq!(std::fs::read(path).expect("it stays"), [1]);
    }
}
