//! Order, size and pacing of the chunks of a guest's memory.

use std::time::Duration;

/// A part of the memory in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Bytes of the smallest chunk.
pub const SMALLEST_CHUNK_BYTES: u64 = 64 << 10;
/// Bytes of the largest chunk: larger chunks are held longer and move no faster.
pub const LARGEST_CHUNK_BYTES: u64 = 1 << 20;
/// Bytes of the first chunk.
const FIRST_CHUNK_BYTES: u64 = 256 << 10;
/// Most bytes moved in one pause of the devices.
pub const BATCH_BYTES: u64 = 8 << 20;

/// A move of memory in sequence from the start. Neighbouring chunks share one mapping, so the number of mappings stays
/// small.
#[derive(Clone, Debug)]
pub struct Plan {
    bytes: u64,
    next: u64,
    chunk: u64,
    /// Longest time for which a page may be held.
    hold: Duration,
    longest_hold: Duration,
}

impl Plan {
    /// Plans a move of `bytes` bytes, of which the bytes before `from` have moved. No page should be held for longer
    /// than `hold`.
    pub const fn new(bytes: u64, from: u64, hold: Duration) -> Self {
        Self {
            bytes,
            next: from,
            chunk: FIRST_CHUNK_BYTES,
            hold,
            longest_hold: Duration::ZERO,
        }
    }

    /// Returns the next batch, for which the devices pause once; `None` when all bytes have moved.
    pub fn next(&self) -> Option<Chunk> {
        let left = self.bytes.saturating_sub(self.next);
        (left > 0).then(|| Chunk {
            offset: self.next,
            bytes: left.min(BATCH_BYTES),
        })
    }

    /// Returns the bytes of the batch after the next.
    pub fn ahead_bytes(&self) -> u64 {
        let left = self.bytes.saturating_sub(self.next);
        left.saturating_sub(BATCH_BYTES).min(BATCH_BYTES)
    }

    /// Returns the most bytes of a chunk in the next batch.
    pub const fn chunk_bytes(&self) -> u64 {
        self.chunk
    }

    /// Returns the longest time for which a chunk may be held.
    pub const fn hold(&self) -> Duration {
        self.hold
    }

    /// Records `bytes` moved in `chunks` chunks, held for `held` in all and for at most `longest` each. The next chunks
    /// shrink if the mean hold is too long, and grow if the mean hold is below a quarter of the limit. A single hold
    /// says little: its thread may have waited for a processor.
    pub fn moved(&mut self, bytes: u64, chunks: u64, held: Duration, longest: Duration) {
        self.next = self.next.saturating_add(bytes).min(self.bytes);
        self.longest_hold = self.longest_hold.max(longest);
        if chunks == 0 {
            return;
        }
        let mean = held / u32::try_from(chunks).unwrap_or(u32::MAX);
        if mean > self.hold {
            self.chunk = (self.chunk / 2).max(SMALLEST_CHUNK_BYTES);
        } else if mean * 4 < self.hold {
            self.chunk = (self.chunk * 2).min(LARGEST_CHUNK_BYTES);
        }
    }

    /// Returns the bytes moved, from the start of the memory.
    pub const fn bytes_moved(&self) -> u64 {
        self.next
    }

    /// Returns the longest time for which a page was held.
    pub const fn longest_hold(&self) -> Duration {
        self.longest_hold
    }
}

/// Estimates the rest of a move with `left` bytes to go, from `moved` bytes in `took`; `None` before the first byte.
pub fn time_left(took: Duration, moved: u64, left: u64) -> Option<Duration> {
    (moved > 0).then(|| took.mul_f64(left as f64 / moved as f64))
}

/// Returns the pause after a batch that took `busy`, for a rate of at most `max_bandwidth` bytes per second. The pause
/// is at least half of `busy`, so that the devices get time to work.
pub fn rest(busy: Duration, bytes: u64, max_bandwidth: Option<u64>) -> Duration {
    let paced = max_bandwidth.map_or(Duration::ZERO, |rate| {
        Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64).saturating_sub(busy)
    });
    paced.max(busy / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_moves_once_and_in_order() {
        let bytes = (30 << 20) + 4096;
        let mut plan = Plan::new(bytes, 8192, Duration::from_millis(1));
        let mut end = 8192;
        let hold = Duration::from_micros(100);
        while let Some(next) = plan.next() {
            assert_eq!(next.offset, end);
            assert!(next.bytes <= BATCH_BYTES && next.bytes.is_multiple_of(4096));
            let after = end + next.bytes + plan.ahead_bytes();
            assert!(after == bytes || plan.ahead_bytes() == BATCH_BYTES);
            // Sometimes only a part of the batch moves.
            let moved = next.bytes.min(3 << 20);
            end += moved;
            plan.moved(moved, 3, hold * 3, hold);
        }
        assert_eq!((end, plan.bytes_moved()), (bytes, bytes));
        assert_eq!(plan.longest_hold(), hold);
    }

    #[test]
    fn chunks_follow_how_long_pages_may_be_held() {
        let mut plan = Plan::new(1 << 40, 0, Duration::from_millis(1));
        let ms = Duration::from_millis;
        for _ in 0..20 {
            plan.moved(4096, 2, ms(6), ms(4));
        }
        assert_eq!(plan.chunk_bytes(), SMALLEST_CHUNK_BYTES);
        for _ in 0..20 {
            plan.moved(4096, 10, ms(1), ms(1));
        }
        assert_eq!(plan.chunk_bytes(), LARGEST_CHUNK_BYTES);
        // An empty move leaves the chunk size as it is.
        plan.moved(0, 0, ms(0), ms(0));
        assert_eq!(plan.chunk_bytes(), LARGEST_CHUNK_BYTES);
    }

    #[test]
    fn the_rest_takes_as_long_as_what_has_moved() {
        let took = Duration::from_secs(3);
        assert_eq!(time_left(took, 300, 100), Some(Duration::from_secs(1)));
        assert_eq!(time_left(took, 300, 0), Some(Duration::ZERO));
        assert_eq!(time_left(took, 0, 100), None);
    }

    #[test]
    fn devices_get_their_turn_and_a_rate_is_kept() {
        let busy = Duration::from_millis(4);
        assert_eq!(rest(busy, 8 << 20, None), Duration::from_millis(2));
        let slow = rest(busy, 1 << 20, Some(10 << 20));
        assert_eq!(slow, Duration::from_millis(96));
        assert_eq!(rest(busy, 1, Some(u64::MAX)), Duration::from_millis(2));
    }
}
