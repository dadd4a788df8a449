//! A small seeded generator: the same seed gives the same run everywhere.

/// SplitMix64: fast, seedable with any value, good enough to place and fill test I/O.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator whose numbers follow from the seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number, uniform over all values.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            0
        } else {
            self.next_u64() % bound
        }
    }

    /// Returns true in `percent` of 100 cases.
    pub const fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// Scrambles a number so that close inputs give unrelated outputs.
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Returns the seed of a test: `GODWIT_SEED` if set, otherwise `default`. A run is thus repeatable and can be varied
/// without a rebuild.
pub fn seed(default: u64) -> u64 {
    std::env::var("GODWIT_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}
