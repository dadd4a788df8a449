//! Fetches chunks, each once for any number of callers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use godwit_image::{ChunkId, Location, RepositoryError};
use tokio::sync::OnceCell;

use crate::images::Images;
use crate::images::peers::{self, Part};
use godwit_api::ErrorBody;

/// Chunks kept in memory: 16 MiB. A disk asks for a chunk in up to four parts, and disks of machines that start
/// together ask for the same chunks.
const KEPT: usize = 64;

type Cell = Arc<OnceCell<Bytes>>;

/// The chunks requested last.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    recent: Mutex<VecDeque<(ChunkId, Cell)>>,
}

impl Chunks {
    /// Returns the cell that has or will have the chunk once fetched.
    fn cell(&self, id: ChunkId) -> Cell {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let at = recent.iter().position(|(other, _)| *other == id);
        let entry = at.and_then(|at| recent.remove(at));
        let entry = entry.unwrap_or_else(|| (id, Cell::default()));
        let cell = Arc::clone(&entry.1);
        recent.push_back(entry);
        if recent.len() > KEPT {
            recent.pop_front();
        }
        cell
    }

    /// Returns the chunk's checked bytes: from memory, or by `fetch`.
    ///
    /// # Errors
    /// The chunk cannot be had now.
    async fn once(
        &self,
        id: ChunkId,
        length: u64,
        repository: Option<&Location>,
        fetch: impl Future<Output = Result<Bytes, ErrorBody>>,
    ) -> Result<Bytes, ErrorBody> {
        let cell = self.cell(id);
        let bytes = cell.get_or_try_init(|| fetch).await.cloned()?;
        // A malicious manifest may name one chunk at places of different lengths.
        match bytes.len() as u64 == length {
            true => Ok(bytes),
            false => Err(super::body(&RepositoryError::DamagedChunk {
                chunk: id,
                repository: match repository {
                    Some(location) => location.to_string(),
                    None => String::from("another node's copy"),
                },
            })),
        }
    }

    /// Returns the chunk, if still in memory.
    pub(super) fn find(&self, id: ChunkId) -> Option<Bytes> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let found = recent.iter().find(|(other, _)| *other == id);
        found.and_then(|(_, cell)| cell.get().cloned())
    }
}

/// Returns the chunk's checked bytes: from memory, another node or the repository.
///
/// # Errors
/// The chunk cannot be had now.
pub(super) async fn chunk(images: &Arc<Images>, part: Part) -> Result<Bytes, ErrorBody> {
    let fetch = peers::chunk(images, part);
    let (chunks, repository) = (&images.chunks, images.location());
    chunks.once(part.id, part.length, repository, fetch).await
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[test]
    fn what_was_asked_for_last_is_kept() {
        let chunks = Chunks::default();
        let id = |number: usize| ChunkId([number as u8; 32]);
        let first = chunks.cell(id(0));
        for number in 1..KEPT {
            chunks.cell(id(number));
        }
        assert!(
            Arc::ptr_eq(&first, &chunks.cell(id(0))),
            "it is still known"
        );
        for number in KEPT..2 * KEPT - 1 {
            chunks.cell(id(number));
        }
        assert!(
            Arc::ptr_eq(&first, &chunks.cell(id(0))),
            "it was used since"
        );
        for number in 100..100 + KEPT {
            chunks.cell(id(number));
        }
        assert!(!Arc::ptr_eq(&first, &chunks.cell(id(0))));
    }

    #[tokio::test]
    async fn a_chunk_counts_only_with_the_length_that_it_has_at_its_place() {
        let chunks = Chunks::default();
        let content = [7; 512];
        let id = ChunkId::of(&content);
        // The second time, the chunk is in memory.
        let fetch = || ready(Ok(Bytes::from_static(&[7; 512])));
        for _ in 0..2 {
            let found = chunks.once(id, 512, None, fetch()).await;
            assert_eq!(found.expect("there"), content[..]);
            let longer = chunks.once(id, 4096, None, fetch()).await;
            let longer = longer.expect_err("too short");
            assert!(longer.message.contains("damaged"), "{}", longer.message);
        }
    }
}
