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

/// Bytes of the smallest chunk.
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

    /// The next chunk; none when all has moved.
    pub fn next(&self) -> Option<Chunk> {
        let left = self.bytes.saturating_sub(self.next);
        (left > 0).then(|| Chunk {
            offset: self.next,
            bytes: left.min(self.chunk),
        })
    }

    /// The next chunk has moved, and was held for so long. A chunk that was held for too long makes the next ones
    /// smaller; one that was held for a quarter of what is allowed makes them larger.
    pub fn moved(&mut self, held: Duration) {
        let Some(chunk) = self.next() else { return };
        self.next += chunk.bytes;
        self.longest_hold = self.longest_hold.max(held);
        if held > self.hold {
            self.chunk = (self.chunk / 2).max(SMALLEST_CHUNK_BYTES);
        } else if held * 4 < self.hold && chunk.bytes == self.chunk {
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
        let bytes = (10 << 20) + 4096;
        let mut plan = Plan::new(bytes, 8192, Duration::from_millis(1));
        let mut end = 8192;
        while let Some(chunk) = plan.next() {
            assert_eq!(chunk.offset, end);
            assert!(chunk.bytes <= LARGEST_CHUNK_BYTES && chunk.bytes.is_multiple_of(4096));
            end += chunk.bytes;
            plan.moved(Duration::from_micros(100));
        }
        assert_eq!((end, plan.bytes_moved()), (bytes, bytes));
        assert_eq!(plan.longest_hold(), Duration::from_micros(100));
    }

    #[test]
    fn chunks_follow_how_long_pages_may_be_held() {
        let mut plan = Plan::new(1 << 30, 0, Duration::from_millis(1));
        for _ in 0..20 {
            plan.moved(Duration::from_millis(3));
        }
        assert_eq!(
            plan.next().map(|chunk| chunk.bytes),
            Some(SMALLEST_CHUNK_BYTES)
        );
        for _ in 0..20 {
            plan.moved(Duration::from_micros(20));
        }
        assert_eq!(
            plan.next().map(|chunk| chunk.bytes),
            Some(LARGEST_CHUNK_BYTES)
        );
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
