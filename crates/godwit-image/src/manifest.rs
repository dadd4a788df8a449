//! Manifests: the chunks of an image and their positions.
//!
//! ```text
//! 0    "GDWIMG01"
//! 8    the image's size in bytes, a positive multiple of 512
//! 16   the number of chunks that are stored
//! 24   for each, in order: its number (8 bytes), its name (32 bytes)
//! ```
//!
//! Numbers are little-endian. Chunk n begins at byte n × 256 KiB of the image. Chunks that are not listed are zeroes. A
//! manifest is named by the hash of this form. Readers check the hash.

use std::fmt;
use std::str::FromStr;

use crate::chunk::{CHUNK_BYTES, ChunkId, from_hex, hex};

const MAGIC: [u8; 8] = *b"GDWIMG01";
const HEADER: usize = 24;
const ENTRY: usize = 40;

/// The name of a manifest: the BLAKE3 hash of the stored form. Equal names mean equal content of the image.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ManifestId(pub [u8; 32]);

impl fmt::Display for ManifestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

impl fmt::Debug for ManifestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

impl FromStr for ManifestId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        from_hex(text).map(Self).ok_or(())
    }
}

/// A chunk of an image that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestChunk {
    /// The position in the image, counted in chunks.
    pub number: u64,
    /// The chunk's name.
    pub id: ChunkId,
}

/// The size of an image and its chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    size: u64,
    chunks: Vec<ManifestChunk>,
}

/// The reason why a manifest was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Another format: a later version, or not a manifest at all.
    #[error("it is no manifest that this version reads")]
    Format,
    /// The hash of the bytes is not the manifest's name.
    #[error("its bytes are not those that it is named by")]
    Hash,
    /// The size is not valid for a disk or exceeds [`Manifest::MAX_SIZE`].
    #[error("the size that it gives is not possible")]
    Size,
    /// The list of chunks has the wrong length, is out of order, or reaches beyond the image.
    #[error("its list of chunks makes no sense")]
    Chunks,
}

impl Manifest {
    /// The largest image in bytes: 64 TiB.
    pub const MAX_SIZE: u64 = 64 << 40;
    /// The most stored chunks of one image: 1 TiB of data, with a manifest of 160 MiB.
    pub const MAX_CHUNKS: u64 = (1 << 40) / CHUNK_BYTES;
    /// The longest stored form in bytes.
    pub const MAX_BYTES: u64 = HEADER as u64 + Self::MAX_CHUNKS * ENTRY as u64;

    /// Returns the manifest of an image of `size` bytes with these chunks, in the order of their numbers.
    ///
    /// # Errors
    /// The size is not valid for a disk, or the chunks are out of order or too many.
    pub fn new(size: u64, chunks: Vec<ManifestChunk>) -> Result<Self, ManifestError> {
        if size == 0 || !size.is_multiple_of(512) || size > Self::MAX_SIZE {
            return Err(ManifestError::Size);
        }
        let ordered = chunks.is_sorted_by(|a, b| a.number < b.number);
        let within = chunks
            .last()
            .is_none_or(|last| last.number < size.div_ceil(CHUNK_BYTES));
        if !ordered || !within || chunks.len() as u64 > Self::MAX_CHUNKS {
            return Err(ManifestError::Chunks);
        }
        Ok(Self { size, chunks })
    }

    /// The image's size in bytes: a positive multiple of 512.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The stored chunks, in the order of their numbers.
    pub fn chunks(&self) -> &[ManifestChunk] {
        &self.chunks
    }

    /// Returns the chunk of this number; none for a chunk of zeroes.
    pub fn chunk(&self, number: u64) -> Option<ChunkId> {
        let at = self
            .chunks
            .binary_search_by_key(&number, |chunk| chunk.number);
        at.ok().map(|at| self.chunks[at].id)
    }

    /// Bytes of the chunk of this number: less than [`CHUNK_BYTES`] at the image's end, and 0 beyond the end.
    pub const fn length(&self, number: u64) -> u64 {
        let start = number.saturating_mul(CHUNK_BYTES);
        let left = self.size.saturating_sub(start);
        if left < CHUNK_BYTES {
            left
        } else {
            CHUNK_BYTES
        }
    }

    /// Bytes of the stored chunks.
    pub fn data_bytes(&self) -> u64 {
        self.chunks
            .iter()
            .map(|chunk| self.length(chunk.number))
            .sum()
    }

    /// Returns the name and the stored form.
    pub fn encode(&self) -> (ManifestId, Vec<u8>) {
        let mut bytes = Vec::with_capacity(HEADER + self.chunks.len() * ENTRY);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&(self.chunks.len() as u64).to_le_bytes());
        for chunk in &self.chunks {
            bytes.extend_from_slice(&chunk.number.to_le_bytes());
            bytes.extend_from_slice(&chunk.id.0);
        }
        (ManifestId(*blake3::hash(&bytes).as_bytes()), bytes)
    }

    /// Reads the stored form of the manifest of this name.
    ///
    /// # Errors
    /// The bytes are not a manifest, or not the manifest of this name.
    pub fn decode(id: ManifestId, bytes: &[u8]) -> Result<Self, ManifestError> {
        if *blake3::hash(bytes).as_bytes() != id.0 {
            return Err(ManifestError::Hash);
        }
        let (header, list) = bytes
            .split_first_chunk::<HEADER>()
            .ok_or(ManifestError::Format)?;
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        if header[..8] != MAGIC {
            return Err(ManifestError::Format);
        }
        let (entries, rest) = list.as_chunks::<ENTRY>();
        if !rest.is_empty() || entries.len() as u64 != number(&header[16..]) {
            return Err(ManifestError::Chunks);
        }
        let mut chunks = Vec::with_capacity(entries.len());
        for entry in entries {
            let id = entry[8..].first_chunk().ok_or(ManifestError::Chunks)?;
            chunks.push(ManifestChunk {
                number: number(entry),
                id: ChunkId(*id),
            });
        }
        Self::new(number(&header[8..]), chunks)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(number: u64) -> ManifestChunk {
        ManifestChunk {
            number,
            id: ChunkId([number as u8; 32]),
        }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let manifest =
            Manifest::new(3 * CHUNK_BYTES + 512, vec![chunk(0), chunk(3)]).expect("valid");
        let (id, bytes) = manifest.encode();
        let read = Manifest::decode(id, &bytes).expect("read");
        assert_eq!(read, manifest);
        assert_eq!(read.chunk(3), Some(chunk(3).id));
        assert_eq!(read.chunk(1), None);
        assert_eq!(read.length(3), 512);
        assert_eq!(read.length(4), 0);
        assert_eq!(read.data_bytes(), CHUNK_BYTES + 512);
    }

    #[test]
    fn what_makes_no_sense_is_refused_though_its_name_fits() {
        let encode = |size: u64, count: u64, numbers: &[u64]| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(size.to_le_bytes());
            bytes.extend(count.to_le_bytes());
            for number in numbers {
                bytes.extend(number.to_le_bytes());
                bytes.extend([1; 32]);
            }
            let id = ManifestId(*blake3::hash(&bytes).as_bytes());
            Manifest::decode(id, &bytes)
        };
        let two = 2 * CHUNK_BYTES;
        assert!(encode(two, 2, &[0, 1]).is_ok());
        assert_eq!(encode(0, 0, &[]), Err(ManifestError::Size));
        assert_eq!(encode(513, 0, &[]), Err(ManifestError::Size));
        assert_eq!(encode(u64::MAX - 511, 0, &[]), Err(ManifestError::Size));
        assert_eq!(encode(two, 1, &[0, 1]), Err(ManifestError::Chunks));
        assert_eq!(encode(two, u64::MAX, &[0]), Err(ManifestError::Chunks));
        assert_eq!(encode(two, 2, &[1, 0]), Err(ManifestError::Chunks));
        assert_eq!(encode(two, 2, &[1, 1]), Err(ManifestError::Chunks));
        assert_eq!(encode(two, 1, &[2]), Err(ManifestError::Chunks));
        assert_eq!(encode(two, 1, &[u64::MAX]), Err(ManifestError::Chunks));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read_and_never_more(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let id = ManifestId(*blake3::hash(&bytes).as_bytes());
            if let Ok(manifest) = Manifest::decode(id, &bytes) {
                prop_assert_eq!(manifest.encode().1, bytes);
            }
        }

        #[test]
        fn any_changed_byte_is_noticed(at in 0usize..24 + 80, bit in 0u8..8) {
            let manifest = Manifest::new(2 * CHUNK_BYTES, vec![chunk(0), chunk(1)]).expect("valid");
            let (id, mut bytes) = manifest.encode();
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Manifest::decode(id, &bytes), Err(ManifestError::Hash));
        }
    }
}
