//! The blocks of a disk for which its base image has data.

use godwit_core::units::Sectors;
use godwit_core::{Missing, PIECE_WORDS, WordPiece};
use godwit_image::{CHUNK_BYTES, Manifest};

/// Sectors of a block. A disk has all or nothing of a block.
pub(super) const BLOCK: u64 = 8;

/// Returns a bit for each block for which the image has data. The disk is at least as large as the image.
pub(super) fn words(manifest: &Manifest, capacity: Sectors) -> Vec<u64> {
    let mut words = vec![0; Missing::word_length(capacity)];
    for chunk in manifest.chunks() {
        let start = chunk.number * CHUNK_BYTES / 512;
        let end = start + manifest.length(chunk.number) / 512;
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            words[(block / 64) as usize] |= 1 << (block % 64);
        }
    }
    words
}

/// Returns the same bits in pieces, without all-zero pieces.
pub(super) fn pieces(words: &[u64]) -> Vec<WordPiece> {
    let mut pieces = Vec::new();
    for (number, words) in words.chunks(PIECE_WORDS).enumerate() {
        if words.iter().any(|word| *word != 0) {
            let mut piece = [0; PIECE_WORDS];
            piece[..words.len()].copy_from_slice(words);
            pieces.push((number, piece));
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use godwit_image::{ChunkId, ManifestChunk};

    use super::*;

    #[test]
    fn what_an_image_has_is_missing_at_first_and_its_holes_are_not() {
        let chunk = |number| ManifestChunk {
            number,
            id: ChunkId([1; 32]),
        };
        // The last chunk has a single sector, in a block cut short by the end of the image.
        let size = 3 * CHUNK_BYTES + 512;
        let manifest = Manifest::new(size, vec![chunk(1), chunk(3)]).expect("valid");
        let same = words(&manifest, Sectors(size / 512));
        assert_eq!(same, [0, u64::MAX, 0, 1]);
        let larger = words(&manifest, Sectors(8 * CHUNK_BYTES / 512));
        assert_eq!(larger, [0, u64::MAX, 0, 1, 0, 0, 0, 0]);
    }
}
