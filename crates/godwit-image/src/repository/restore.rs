//! Puts an image's content back into a repository that has lost it, for a disk that needs it still: one that began while
//! the repository was away, so that nothing there told of it.

use bytes::Bytes;
use futures_util::future::join_all;

use crate::error::RepositoryError;
use crate::manifest::{Manifest, ManifestChunk};
use crate::name::ImageName;
use crate::push_time::PushTime;
use crate::repository::uses::User;
use crate::repository::{Repository, chunk_path, manifest_path};

/// Chunks that are looked for, and sent, at once: the disk's own guest uses the same storage and the same link.
const AT_ONCE: usize = 4;

/// What was put back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// Chunks that were sent.
    pub chunks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Chunks that the repository has not, and nobody else has either: who reads them waits for a push that has them.
    pub lost: u64,
    /// When this content was pushed under the image's name, if that stands for it.
    pub pushed: Option<PushTime>,
}

impl Repository {
    /// Notes that a disk fetches from this content, and puts back before that what the repository has not of it.
    /// `find` gives the chunk of such a number, and must have checked it; nothing when nobody has it.
    ///
    /// When it is dropped, or fails, nothing is noted; chunks that were sent stay until the next [`Self::collect`].
    ///
    /// # Errors
    /// Chunks are being collected, or the store does not do its part.
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
            // Chunks that were sent may be gone if this was taken for dead.
            if !lease.holds().await? {
                return Err(self.busy("chunks were removed by gc meanwhile"));
            }
            let (id, bytes) = manifest.encode();
            // The manifest comes after its chunks: where it is, they are there, as far as anybody has them.
            self.put(&manifest_path(id), bytes).await?;
            self.note_use(id, image, user).await?;
            done.pushed = self.pushed(id, image).await?;
            Ok(done)
        };
        let done = done.await;
        lease.end().await;
        done
    }

    /// How many bytes were sent; nothing when nobody has the chunk.
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
