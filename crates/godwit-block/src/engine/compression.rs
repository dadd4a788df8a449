//! Compresses copies where the link is what a migration waits for.
//!
//! The engine's thread does it, block by block: in between it looks after the guest.

use std::time::{Duration, Instant};

use godwit_core::units::Time;

use super::closing::release;
use super::link_signal::{Sent, sent};
use super::run::Engine;
use crate::stream::{Packed, Packer, PackingEnd};

/// To compress a byte takes at most this part of the time that the link takes for it: the thread has
/// more to do, and what the link gains must not be lost before it.
const SHARE: f64 = 0.5;

/// Bytes that have to be sent between two looks at the link: fewer say little about it.
const LEAST_SENT: u64 = 64 << 10;

/// Frames that are sent as they are, at most, before another one is tried, where none became shorter.
const MOST_SKIPPED: u32 = 64;

/// Nanoseconds per byte, lately.
#[derive(Clone, Copy, Debug)]
struct Pace {
    nanos: f64,
    bytes: f64,
}

impl Pace {
    /// What the next of these measurements leaves of the sum of those before it.
    const MEMORY: f64 = 0.8;

    /// A guess, which the first measurement takes the place of.
    const fn guess(per_byte: f64) -> Self {
        Self {
            nanos: per_byte,
            bytes: 1.0,
        }
    }

    fn took(&mut self, bytes: u64, time: Duration) {
        self.nanos = self.nanos * Self::MEMORY + time.as_nanos() as f64;
        self.bytes = self.bytes * Self::MEMORY + bytes as f64;
    }

    fn per_byte(&self) -> f64 {
        self.nanos / self.bytes
    }
}

/// What is known of a migration's link and data.
pub(super) struct Compression {
    packer: Packer,
    /// Of the link. At first none that anything is compressed for.
    link: Pace,
    /// Of compressing.
    work: Pace,
    /// When the link was looked at, and what had been sent then.
    looked_at: (Time, Sent),
    /// Frames to send as they are.
    skip: u32,
    /// How many those were the last time.
    skipped: u32,
}

impl Compression {
    fn new(packer: Packer, now: Time) -> Self {
        Self {
            packer,
            link: Pace::guess(0.0),
            work: Pace::guess(2.0),
            looked_at: (now, Sent::default()),
            skip: 0,
            skipped: 0,
        }
    }

    /// Whether the next frame of data is to be compressed.
    pub(super) fn wants_frame(&mut self) -> bool {
        if self.work.per_byte() > self.link.per_byte() * SHARE {
            return false;
        }
        let wants = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        wants
    }

    /// So much has been sent by now, by all connections together.
    fn look_at_link(&mut self, now: Time, all: Sent) {
        let (then, before) = self.looked_at;
        let bytes = all.bytes.saturating_sub(before.bytes);
        if bytes < LEAST_SENT {
            return;
        }
        // Those that send at the same time share the link.
        let time = all.time.saturating_sub(before.time).min(now.since(then));
        self.link.took(bytes, time);
        self.looked_at = (now, all);
    }

    /// So much was compressed in that time.
    fn compressed(&mut self, packed: Packed, time: Duration) {
        self.work.took(packed.data as u64, time);
        match packed.end {
            None => {}
            Some(PackingEnd::Shorter { .. }) => self.skipped = 0,
            Some(PackingEnd::Useless) => {
                self.skipped = (self.skipped * 2).clamp(1, MOST_SKIPPED);
                self.skip = self.skipped;
            }
        }
    }
}

impl Engine {
    /// What compresses the copies of a migration to a node that takes them so, if this one does.
    pub(super) fn new_compression(&self, taken: bool) -> Option<Compression> {
        if !taken {
            return None;
        }
        match Packer::new() {
            Ok(packer) => Some(Compression::new(packer, self.now)),
            Err(error) => {
                let disk = &self.config.disk;
                tracing::warn!(disk, "copies leave as they are: {error}");
                None
            }
        }
    }

    /// Looks at how fast the link takes copies.
    pub(super) fn watch_copies(&mut self) {
        let (Some(compression), Some(links)) = (&mut self.compression, &self.links) else {
            return;
        };
        let mut all = Sent::default();
        for &key in &links.copies {
            if let Some(connection) = self.connections.get(key)
                && let Some(sent) = sent(connection.stream.socket())
            {
                all.bytes += sent.bytes;
                all.time += sent.time;
            }
        }
        compression.look_at_link(self.now, all);
    }

    /// Compresses a little of what waits for that. True when there was something.
    pub(super) fn compress_waiting(&mut self) -> bool {
        let (Some(compression), Some(links)) = (&mut self.compression, &self.links) else {
            return false;
        };
        for &key in &links.copies {
            let Some(connection) = self.connections.get_mut(key) else {
                continue;
            };
            let began = Instant::now();
            let release = &mut release(&mut self.slots, &mut self.chunks);
            if let Some(packed) = connection.stream.pack(&mut compression.packer, release) {
                compression.compressed(packed, began.elapsed());
                if let Some(PackingEnd::Shorter { from, to }) = packed.end {
                    self.stats.counters.compressed_from += from as u64;
                    self.stats.counters.compressed_to += to as u64;
                }
                self.connections.mark(key);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// One whose link sends so many bytes in each of ten milliseconds, for the part of them.
    fn after_sending(bytes: u64, part: f64) -> Compression {
        let mut compression = Compression::new(Packer::new().expect("a packer"), Time(0));
        let mut all = Sent::default();
        for look in 1..=20 {
            all.bytes += bytes;
            all.time += Duration::from_millis(10).mul_f64(part);
            compression.look_at_link(Time(look * 10 * MS), all);
        }
        compression
    }

    fn tried(compression: &mut Compression, end: PackingEnd) {
        let packed = Packed {
            data: 1 << 20,
            end: Some(end),
        };
        compression.compressed(packed, Duration::from_millis(2));
    }

    #[test]
    fn only_what_waits_for_the_link_is_compressed() {
        let per_second = |megabytes: u64| megabytes * 10_000;
        assert!(after_sending(per_second(120), 1.0).wants_frame(), "1 Gb/s");
        assert!(
            !after_sending(per_second(1200), 1.0).wants_frame(),
            "10 Gb/s"
        );
        // Two connections at once share the link.
        assert!(!after_sending(per_second(600), 2.0).wants_frame());
        // What takes no more is not the link: the time is that without waiting for the receiver.
        assert!(!after_sending(per_second(120), 0.05).wants_frame());
        // Nobody knows yet.
        assert!(!after_sending(100, 1.0).wants_frame());
    }

    #[test]
    fn data_that_does_not_become_shorter_is_tried_ever_less() {
        let mut compression = after_sending(1_200_000, 1.0);
        let mut frames_between = Vec::new();
        for _ in 0..8 {
            assert!(compression.wants_frame());
            tried(&mut compression, PackingEnd::Useless);
            let skipped = (0..).take_while(|_| compression.skip > 0 && !compression.wants_frame());
            frames_between.push(skipped.count());
        }
        assert_eq!(frames_between, [1, 2, 4, 8, 16, 32, 64, 64]);
        let end = PackingEnd::Shorter { from: 2, to: 1 };
        tried(&mut compression, end);
        tried(&mut compression, PackingEnd::Useless);
        assert_eq!(compression.skip, 1);
    }
}
