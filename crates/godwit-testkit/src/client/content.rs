//! The content of a sector after a write, derived from the run's seed, the sector's number and the write's version. The
//! content thus identifies the write.

use crate::SECTOR;
use crate::random::mix;

/// The recognised content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeroes only.
    Zero,
    /// The whole and unchanged data of this version.
    Data(u64),
    /// Anything else.
    Foreign,
}

impl Content {
    /// Writes the data of a version into one sector.
    pub fn generate(seed: u64, sector: u64, version: u64, into: &mut [u8]) {
        let base = mix(mix(seed ^ sector.rotate_left(32)) ^ version);
        for (index, chunk) in into[..SECTOR].chunks_exact_mut(8).enumerate() {
            let word = match index {
                0 => sector,
                1 => version,
                _ => base.wrapping_mul(index as u64 | 1) ^ base.rotate_left(index as u32),
            };
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Recognises the content of one sector.
    pub fn identify(seed: u64, sector: u64, data: &[u8]) -> Self {
        if data == [0; SECTOR] {
            return Self::Zero;
        }
        let mut word = [0; 8];
        word.copy_from_slice(&data[8..16]);
        let version = u64::from_le_bytes(word);
        let mut expected = [0; SECTOR];
        Self::generate(seed, sector, version, &mut expected);
        if data == expected {
            Self::Data(version)
        } else {
            Self::Foreign
        }
    }
}
