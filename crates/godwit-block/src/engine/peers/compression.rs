//! Compresses data if the migration waits for the link.
//!
//! The engine's thread compresses block by block, and looks after the guest in between.

use std::time::Duration;

use godwit_core::units::Time;
use godwit_core::wire::{Message, TrafficClass};

use crate::engine::connections::Connections;
use crate::engine::context::Context;
use crate::engine::peers::link_signal::{Sent, sent};
use crate::engine::peers::links::Moves;
use crate::engine::slots::memory::Memory;
use crate::engine::stats::snapshot::Counters;
use crate::engine::stats::thread_cpu_time;
use godwit_io::stream::{Packed, Packer, PackingEnd, What};

/// Most time for compressing a byte, as a part of the link's time for a byte: the thread has more to do, and must not
/// lose the link's gain.
const SHARE: f64 = 0.75;

/// Fewest bytes sent between two measurements of the link: fewer say little.
const LEAST_SENT: u64 = 64 << 10;

/// Most frames sent uncompressed between two attempts that fail to shorten a frame.
const MOST_SKIPPED: u32 = 64;

/// Data that is compressed before other work gets its turn. A block may exceed this.
const TURN: usize = 64 << 10;

/// Least time for compressing a byte, in nanoseconds: on a faster link an attempt is pointless.
const LEAST_WORK: f64 = 1.0;

/// Frames sent uncompressed for each one that is compressed to measure, while compression does not pay.
const TRIED: u32 = 32;

/// Recent nanoseconds per byte.
#[derive(Clone, Copy, Debug)]
struct Pace {
    nanos: f64,
    bytes: f64,
    /// Part of the earlier sums that remains after the next measurement.
    memory: f64,
}

impl Pace {
    /// Returns a guess, to be replaced by the first measurement.
    const fn guess(per_byte: f64, memory: f64) -> Self {
        Self {
            nanos: per_byte,
            bytes: 1.0,
            memory,
        }
    }

    fn took(&mut self, bytes: u64, time: Duration) {
        self.nanos = self.nanos * self.memory + time.as_nanos() as f64;
        self.bytes = self.bytes * self.memory + bytes as f64;
    }

    fn per_byte(&self) -> f64 {
        self.nanos / self.bytes
    }
}

/// The measurements of a migration's link and data.
pub(in crate::engine) struct Compression {
    packer: Packer,
    /// Pace of the link. At first so fast that compression never pays.
    link: Pace,
    /// Pace of compression.
    work: Pace,
    /// Copies sent since the last one compressed to measure.
    untried: u32,
    /// Time of the last measurement of the link, and the totals at the time.
    looked_at: (Time, Sent),
    /// Attempts with data at rest on the disk.
    copies: Attempts,
    /// Attempts with the guest's writes.
    writes: Attempts,
}

/// The choice of frames to try, of one kind of data.
#[derive(Clone, Copy, Debug, Default)]
struct Attempts {
    /// Frames still to send uncompressed.
    skip: u32,
    /// Length of the last run of uncompressed frames.
    skipped: u32,
}

impl Attempts {
    /// Returns true if the next frame is tried.
    fn wants(&mut self) -> bool {
        let wants = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        wants
    }

    fn ended(&mut self, end: PackingEnd) {
        match end {
            PackingEnd::Shorter { .. } => self.skipped = 0,
            PackingEnd::Useless => {
                self.skipped = (self.skipped * 2).clamp(1, MOST_SKIPPED);
                self.skip = self.skipped;
            }
        }
    }
}

impl Compression {
    /// Returns the compressor of a migration's data; `None` if there is no memory.
    pub(super) fn start(cx: &Context) -> Option<Self> {
        match Packer::new() {
            Ok(packer) => Some(Self::new(packer, cx.now)),
            Err(error) => {
                let disk = &cx.config.disk;
                tracing::warn!(disk, "data leaves as it is, not compressed: {error}");
                None
            }
        }
    }

    fn new(packer: Packer, now: Time) -> Self {
        Self {
            packer,
            link: Pace::guess(0.0, 0.8),
            // Some data takes three times as long as other.
            work: Pace::guess(2.0, 0.98),
            looked_at: (now, Sent::default()),
            untried: 0,
            copies: Attempts::default(),
            writes: Attempts::default(),
        }
    }

    /// Returns true if the frame of this message is to be compressed.
    pub(in crate::engine) fn wants(&mut self, message: &Message) -> bool {
        let attempts = match message {
            Message::Copy { zeroes: false, .. } => &mut self.copies,
            Message::DoubleWrite { zeroes: false, .. }
            | Message::DelayedWrite { zeroes: false, .. } => &mut self.writes,
            _ => return false,
        };
        let pays = |work| work <= self.link.per_byte() * SHARE;
        if pays(self.work.per_byte()) {
            return attempts.wants();
        }
        // Copies measure the time.
        let shows = matches!(message, Message::Copy { .. });
        self.untried += u32::from(shows);
        if !shows || self.untried < TRIED || !pays(LEAST_WORK) {
            return false;
        }
        self.untried = 0;
        attempts.wants()
    }

    /// Takes the totals sent so far by all connections together.
    fn look_at_link(&mut self, now: Time, all: Sent) {
        let (then, before) = self.looked_at;
        let bytes = all.bytes.saturating_sub(before.bytes);
        if bytes < LEAST_SENT {
            return;
        }
        // Connections that send at the same time share the link.
        let time = all.time.saturating_sub(before.time).min(now.since(then));
        self.link.took(bytes, time);
        self.looked_at = (now, all);
    }

    /// Records a compression step, and its time if measured.
    fn compressed(&mut self, class: TrafficClass, packed: Packed, time: Option<Duration>) {
        if packed.what == What::Zeroes {
            // Says nothing about other data.
            return;
        }
        if let Some(time) = time {
            self.work.took(packed.data as u64, time);
        }
        if let Some(end) = packed.end {
            match class {
                TrafficClass::Copy => self.copies.ended(end),
                _ => self.writes.ended(end),
            }
        }
    }
}

impl Moves {
    /// Measures the pace at which the link takes copies. Congestion control that adapts to the receiver's pace, like
    /// bbr's, makes a slow receiver look like a slow link: then data is compressed too, which spares the link and costs
    /// processor time.
    pub(super) fn watch_copies(&mut self, now: Time, connections: &Connections) {
        let Some(links) = &mut self.links else { return };
        let (data, Some(compression)) = links.data_and_compression() else {
            return;
        };
        let mut all = Sent::default();
        for (class, key) in data {
            if class == TrafficClass::Copy
                && let Some(connection) = connections.get(key)
                && let Some(sent) = sent(connection.stream.socket())
            {
                all.bytes += sent.bytes;
                all.time += sent.time;
            }
        }
        compression.look_at_link(now, all);
    }

    /// Compresses a little of the waiting data. Returns true if there was any.
    pub(in crate::engine) fn compress_waiting(
        &mut self,
        connections: &mut Connections,
        memory: &mut Memory,
        counters: &mut Counters,
    ) -> bool {
        let Some(links) = &mut self.links else {
            return false;
        };
        let (data, Some(compression)) = links.data_and_compression() else {
            return false;
        };
        let mut done = 0;
        for (class, key) in data {
            // Processor time: the use of the processor by others does not count.
            let time = || (class == TrafficClass::Copy).then(thread_cpu_time);
            while done < TURN
                && let Some(connection) = connections.get_mut(key)
                && connection.stream.has_to_pack()
            {
                let began = time();
                let release = &mut |payload| memory.release(payload);
                let Some(packed) = connection.stream.pack(&mut compression.packer, release) else {
                    break;
                };
                let took = time()
                    .zip(began)
                    .map(|(now, began)| now.saturating_sub(began));
                compression.compressed(class, packed, took);
                if let Some(PackingEnd::Shorter { from, to }) = packed.end {
                    counters.compressed_from += from as u64;
                    counters.compressed_to += to as u64;
                    if class == TrafficClass::Copy {
                        self.copies_saved += (from - to) as u64;
                    }
                }
                connections.mark(key);
                done += packed.data;
            }
        }
        done > 0
    }
}

#[cfg(test)]
mod tests {
    use godwit_core::action::ChunkSlot;
    use godwit_core::request::RequestTag;
    use godwit_core::units::{Extent, Generation, Lba};

    use super::*;

    const MS: u64 = 1_000_000;

    fn copy(zeroes: bool) -> Message {
        Message::Copy {
            slot: ChunkSlot(0),
            generation: Generation(0),
            extent: Extent::new(Lba(0), 128).expect("an extent"),
            zeroes,
        }
    }

    fn double_write() -> Message {
        Message::DoubleWrite {
            tag: RequestTag(0),
            turn: 0,
            generation: Generation(0),
            extent: Extent::new(Lba(0), 8).expect("an extent"),
            zeroes: false,
            unmap: false,
        }
    }

    /// Returns the state after a link has sent `bytes` bytes in each of twenty periods of 10 ms, busy for `part` of the
    /// time.
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

    /// Records a block of a copy that took `micros` microseconds, and the end of its frame, if any.
    fn block_took(compression: &mut Compression, micros: u64, end: Option<PackingEnd>) {
        let data = 64 << 10;
        let time = Some(Duration::from_micros(micros));
        compression.compressed(
            TrafficClass::Copy,
            Packed {
                what: What::Everything,
                data,
                end,
            },
            time,
        );
    }

    #[test]
    fn only_what_waits_for_the_link_is_compressed() {
        let wants = |megabytes_per_second: u64, part| {
            after_sending(megabytes_per_second * 10_000, part).wants(&copy(false))
        };
        assert!(wants(120, 1.0), "1 Gb/s");
        assert!(!wants(1200, 1.0), "10 Gb/s");
        // Two connections at once share the link.
        assert!(!wants(600, 2.0));
        // A slow receiver is not the link: its time does not count.
        assert!(!wants(120, 0.05));
        assert!(
            !after_sending(100, 1.0).wants(&copy(false)),
            "nobody knows yet"
        );
    }

    #[test]
    fn only_data_is_compressed() {
        let mut compression = after_sending(1_200_000, 1.0);
        assert!(compression.wants(&double_write()));
        for message in [copy(true), Message::Ping] {
            assert!(!compression.wants(&message), "{message:?}");
        }
    }

    #[test]
    fn data_that_does_not_become_shorter_is_tried_ever_less() {
        let mut compression = after_sending(1_200_000, 1.0);
        let tried = |compression: &mut Compression, end| block_took(compression, 100, Some(end));
        let mut frames_between = Vec::new();
        for _ in 0..8 {
            assert!(compression.wants(&copy(false)));
            tried(&mut compression, PackingEnd::Useless);
            let skipped = compression.copies.skip;
            assert!((0..skipped).all(|_| !compression.wants(&copy(false))));
            frames_between.push(skipped);
        }
        assert_eq!(frames_between, [1, 2, 4, 8, 16, 32, 64, 64]);
        assert!(compression.wants(&double_write()), "that is another matter");
        tried(&mut compression, PackingEnd::Shorter { from: 2, to: 1 });
        tried(&mut compression, PackingEnd::Useless);
        assert_eq!(compression.copies.skip, 1);
    }

    #[test]
    fn slow_work_is_tried_again_now_and_then() {
        // A link of 2.5 Gb/s.
        let mut compression = after_sending(3_000_000, 1.0);
        let took = |compression: &mut Compression, micros| block_took(compression, micros, None);
        (0..10).for_each(|_| took(&mut compression, 250));
        let mut tried = 0;
        for _ in 0..TRIED * 100 {
            if compression.work.per_byte() > 2.6 {
                assert!(!compression.wants(&double_write()));
            }
            if compression.wants(&copy(false)) {
                tried += 1;
                // Sixteen blocks of a frame of 1 MiB.
                (0..16).for_each(|_| took(&mut compression, 100));
            }
            if compression.work.per_byte() < 1.6 {
                break;
            }
        }
        assert!((2..20).contains(&tried), "{tried} frames");
        assert!((0..100).all(|_| compression.wants(&copy(false))));
        // A fast link gives no reason to try.
        let mut compression = after_sending(12_000_000, 1.0);
        assert!((0..TRIED * 4).all(|_| !compression.wants(&copy(false))));
    }
}
