//! Fetches chunks, each once however many want it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use godwit_image::{ChunkId, RepositoryError};
use tokio::sync::OnceCell;

use crate::images::Images;
use godwit_api::ErrorBody;

/// Chunks that are kept in memory: 16 MiB. A disk asks for a chunk in up to four parts, and disks of machines that
/// start together for the same chunks.
const KEPT: usize = 64;

type Cell = Arc<OnceCell<Bytes>>;

/// The chunks that were asked for last.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    recent: Mutex<VecDeque<(ChunkId, Cell)>>,
}

impl Chunks {
    /// Where the chunk is or will be, once somebody has fetched it.
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
}

impl Images {
    /// The chunk's bytes, which are checked.
    ///
    /// # Errors
    /// It cannot be had now.
    pub(super) async fn chunk(&self, id: ChunkId, length: u64) -> Result<Bytes, ErrorBody> {
        let cell = self.chunks.cell(id);
        let fetched = cell.get_or_try_init(async || {
            let found = self.repository()?.chunk(id, length).await;
            found.map_err(|error| super::body(&error))
        });
        let bytes = fetched.await.cloned()?;
        // One chunk may be named at places of different lengths by a manifest that nobody of good will has made.
        match bytes.len() as u64 == length {
            true => Ok(bytes),
            false => Err(super::body(&RepositoryError::DamagedChunk {
                chunk: id,
                repository: self.repository()?.shown().to_string(),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
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
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("repository")).expect("a folder");
        let content = [7; 512];
        std::fs::write(at("raw"), content).expect("written");
        let images = Images {
            config: crate::config::ImagesConfig {
                repository: Some(godwit_image::Location::Directory(at("repository"))),
            },
            repository: std::sync::OnceLock::new(),
            folder: at("images"),
            chunks: Chunks::default(),
            manifests: crate::images::manifests::Manifests::new(at("manifests")),
            released: tokio::sync::Notify::new(),
            noting: tokio::sync::Mutex::default(),
        };
        let name = "base".parse().expect("a name");
        let (options, progress) = Default::default();
        let never = std::future::pending();
        let repository = images.repository().expect("opened");
        let raw = at("raw");
        let pushed = repository.push(&name, &raw, options, &progress, never);
        pushed.await.expect("pushed");
        let id = ChunkId::of(&content);
        // The second time it is in memory.
        for _ in 0..2 {
            assert_eq!(images.chunk(id, 512).await.expect("there"), content[..]);
            let longer = images.chunk(id, 4096).await.expect_err("too short");
            assert!(longer.message.contains("damaged"), "{}", longer.message);
        }
    }
}
