//! Fetches chunks, each once however many want it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use godwit_image::ChunkId;
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
        fetched.await.cloned()
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
}
