//! Restores an image's content that the repository has lost and a disk still needs. Such a disk began while the
//! repository was away, so that the repository had no record of the use.

use bytes::Bytes;
use futures_util::future::join_all;

use crate::error::RepositoryError;
use crate::manifest::{Manifest, ManifestChunk};
use crate::name::ImageName;
use crate::push_time::PushTime;
use crate::repository::removal::uses::User;
use crate::repository::{Repository, chunk_path, manifest_path};

/// Chunks checked and sent in parallel. The disk's own guest uses the same storage and the same link.
const AT_ONCE: usize = 4;

/// The result of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// Chunks that were sent.
    pub chunks: u64,
    /// Bytes of the chunks that were sent.
    pub bytes: u64,
    /// Chunks that neither the repository nor `find` has. Reads of these chunks wait for a push that contains them.
    pub lost: u64,
    /// The time of this content's push, if the image's name stands for this content.
    pub pushed: Option<PushTime>,
}

impl Repository {
    /// Records that a disk fetches from this content, after a restore of the chunks that the repository lacks. `find`
    /// returns a checked chunk, or none if no copy exists.
    ///
    /// A restore that is dropped or fails records nothing. Chunks already sent stay until the next [`Self::collect`].
    ///
    /// # Errors
    /// Chunks are being collected, or the store fails.
    pub async fn put_back<F>(
        &self,
        manifest: &Manifest,
        image: &ImageName,
        user: &User,
        find: impl Fn(ManifestChunk) -> F,
    ) -> Result<PutBack, RepositoryError>
    where
        F: Future<Output = Option<Bytes>>,
    {
        self.is_in_use()?;
        let lease = self.lease().await?;
        let done = async {
            let mut done = PutBack::default();
            for some in manifest.chunks().chunks(AT_ONCE) {
                let sent = some
                    .iter()
                    .map(|chunk| self.put_chunk_back(*chunk, manifest, &find));
                for sent in join_all(sent).await {
                    match sent? {
                        Some(0) => {}
                        Some(bytes) => {
                            done.chunks += 1;
                            done.bytes += bytes;
                        }
                        None => done.lost += 1,
                    }
                }
            }
            // If this restore was taken for dead, the chunks that were sent may be gone.
            if !lease.holds().await? {
                return Err(self.busy("chunks were removed by gc meanwhile"));
            }
            let (id, bytes) = manifest.encode();
            // The manifest follows its chunks: a stored manifest has all chunks of which a copy exists.
            self.put(&manifest_path(id), bytes).await?;
            self.note_use(id, image, user).await?;
            done.pushed = self.pushed(id, image).await?;
            Ok(done)
        };
        let done = done.await;
        lease.end().await;
        done
    }

    /// Returns the number of bytes sent; none if no copy of the chunk exists.
    async fn put_chunk_back<F>(
        &self,
        chunk: ManifestChunk,
        manifest: &Manifest,
        find: &impl Fn(ManifestChunk) -> F,
    ) -> Result<Option<u64>, RepositoryError>
    where
        F: Future<Output = Option<Bytes>>,
    {
        let length = manifest.length(chunk.number);
        let there = self.head(&chunk_path(chunk.id)).await?;
        if there.is_some_and(|meta| meta.size == length) {
            return Ok(Some(0));
        }
        match find(chunk).await {
            Some(bytes) => self.put_chunk(chunk.id, bytes, false).await.map(Some),
            None => Ok(None),
        }
    }
}
