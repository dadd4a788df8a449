//! Which chunk of a guest's memory moves next, how large it is, and how long to wait before it.

use std::time::Duration;

/// A part of the memory: its first byte and its length, in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Of the first byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Bytes of the smallest chunk that is asked for.
pub const SMALLEST_CHUNK_BYTES: u64 = 64 << 10;
/// Bytes of the largest chunk: longer ones are held longer and move no faster.
pub const LARGEST_CHUNK_BYTES: u64 = 1 << 20;
/// Bytes of the first chunk.
const FIRST_CHUNK_BYTES: u64 = 256 << 10;
/// Bytes for which the devices stand still together.
pub const BATCH_BYTES: u64 = 8 << 20;

/// A move of memory, in sequence from its start: neighbours share one mapping, so the number of mappings stays small
/// however far the move is.
#[derive(Clone, Debug)]
pub struct Plan {
    bytes: u64,
    next: u64,
    chunk: u64,
    /// How long a page may be held.
    hold: Duration,
    longest_hold: Duration,
}

impl Plan {
    /// A move of `bytes` bytes of which those before `from` have moved. No page should be held for longer than `hold`.
    pub const fn new(bytes: u64, from: u64, hold: Duration) -> Self {
        Self {
            bytes,
            next: from,
            chunk: FIRST_CHUNK_BYTES,
            hold,
            longest_hold: Duration::ZERO,
        }
    }

    /// What moves next, for which the devices stand still once; none when all has moved.
    pub fn next(&self) -> Option<Chunk> {
        let left = self.bytes.saturating_sub(self.next);
        (left > 0).then(|| Chunk {
            offset: self.next,
            bytes: left.min(BATCH_BYTES),
        })
    }

    /// Bytes that move after the next ones, for which devices stand still together.
    pub fn ahead_bytes(&self) -> u64 {
        let left = self.bytes.saturating_sub(self.next);
        left.saturating_sub(BATCH_BYTES).min(BATCH_BYTES)
    }

    /// Bytes of a chunk of that, at most.
    pub const fn chunk_bytes(&self) -> u64 {
        self.chunk
    }

    /// How long a chunk may be held.
    pub const fn hold(&self) -> Duration {
        self.hold
    }

    /// So many of the next bytes have moved, as so many chunks that were held for so long in all, and for so long at
    /// most. Chunks that are held for too long on average make the next ones smaller; those that are held for a quarter
    /// of what is allowed make them larger. A single one says little: its thread may have waited for a processor.
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

    /// Bytes that have moved, from the start of the memory.
    pub const fn bytes_moved(&self) -> u64 {
        self.next
    }

    /// The longest time for which a page was held.
    pub const fn longest_hold(&self) -> Duration {
        self.longest_hold
    }
}

/// How long a move still takes that moved so many bytes in `took` and has so many left; nothing before it moved any.
pub fn time_left(took: Duration, moved: u64, left: u64) -> Option<Duration> {
    (moved > 0).then(|| took.mul_f64(left as f64 / moved as f64))
}

/// How long to rest after a batch that took `busy`, so that no more than `max_bandwidth` bytes per second move and
/// the devices work at least as long as they stand still.
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
            // Sometimes only a part of it moves.
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
        // Nothing that moved says nothing.
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
