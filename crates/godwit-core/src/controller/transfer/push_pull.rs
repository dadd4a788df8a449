//! Push and pull: the guest writes to its own disk only. Rarely written chunks are pushed to the destination. Chunks
//! written again and again are not pushed, because their copies would be in vain. The disk changes hands without them,
//! and the destination pulls the rest, most often written chunks first (Alg. 1 and 2 of the hybrid storage-transfer
//! paper).
//!
//! With a threshold of zero nothing is pushed: post-copy.

use super::dirty::DirtyBitmap;
use crate::controller::PushOptions;
use crate::units::{Extent, Lba, SECTOR_SIZE, Sectors, Time};

/// Sectors of a block in the set of remaining blocks: 4 KiB.
pub(super) const BLOCK_SECTORS: u32 = 8;

/// Sectors of a chunk whose writes are counted: 64 KiB.
pub(super) const CHUNK_SECTORS: u32 = 128;

/// Pushable bytes after which pushing continues while the switchover waits.
const PUSH_AGAIN: u64 = 1 << 20;

/// State of push and pull.
#[derive(Debug)]
pub(in crate::controller) struct PushPull {
    threshold: u8,
    /// Time at which pushing ends, however much could be pushed; `None` once pushing has ended.
    until: Option<Time>,
    over: bool,
    /// Blocks that the destination lacks (`RemainingSet`).
    remaining: DirtyBitmap,
    /// Writes to each chunk (`WriteCount`), up to 255.
    counts: Box<[u8]>,
    /// Chunks that were written.
    written: DirtyBitmap,
    /// Blocks of `remaining` in chunks that may be pushed.
    pushable: u64,
}

impl PushPull {
    pub(super) fn new(options: PushOptions, capacity: Sectors, now: Time) -> Self {
        let mut remaining = DirtyBitmap::new(capacity, BLOCK_SECTORS);
        remaining.fill();
        let chunks = capacity.0.div_ceil(u64::from(CHUNK_SECTORS)) as usize;
        let pushes = options.threshold > 0;
        Self {
            threshold: options.threshold,
            until: options.longest_push.map(|longest| now.after(longest)),
            over: false,
            pushable: if pushes { remaining.count() } else { 0 },
            remaining,
            counts: vec![0; chunks].into_boxed_slice(),
            written: DirtyBitmap::new(capacity, CHUNK_SECTORS),
        }
    }

    /// Creates the state for a destination that has the whole disk.
    pub(super) fn with_nothing_left(options: PushOptions, capacity: Sectors, now: Time) -> Self {
        let mut it = Self::new(options, capacity, now);
        it.remaining.empty();
        it.pushable = 0;
        it
    }

    /// Adds the unwritten blocks from here on, which the destination lacks.
    pub(super) fn add_from(&mut self, start: Lba) {
        self.remaining
            .set_range(start, Lba(self.remaining.capacity().0));
        self.recount();
    }

    /// Adds the set bits of `blocks`, a map of the same length, from `start` on: the destination lacks these blocks.
    pub(super) fn add_those_of(&mut self, blocks: &DirtyBitmap, start: Lba) {
        let mut head = start;
        while let Some((from, end)) = blocks.next_blocks(head, u64::MAX) {
            head = end;
            self.remaining.set_range(from, end);
        }
        self.recount();
    }

    /// Sets `blocks` as the only blocks that the destination lacks. Nothing has been pushed.
    pub(super) fn lacks_only(&mut self, blocks: &DirtyBitmap) {
        self.remaining.empty();
        self.add_those_of(blocks, Lba(0));
    }

    /// Applies new options.
    pub(super) fn change(&mut self, options: PushOptions, now: Time) {
        self.threshold = options.threshold;
        self.until = options.longest_push.map(|longest| now.after(longest));
        self.over = false;
        self.recount();
    }

    /// Counts the pushable blocks.
    fn recount(&mut self) {
        let written = self.written.numbers().map(|chunk| chunk as u64);
        let hot = written.filter(|chunk| !self.is_cold(*chunk));
        let hot: u64 = hot.map(|chunk| self.remaining_in(chunk)).sum();
        self.pushable = match self.threshold {
            0 => 0,
            _ => self.remaining.count() - hot,
        };
    }

    /// Returns the time at which pushing ends.
    pub(super) const fn until(&self) -> Option<Time> {
        self.until
    }

    /// Returns true if the time of pushing is over.
    pub(super) const fn is_over(&self) -> bool {
        self.over
    }

    /// Advances the clock. Returns true if the time of pushing ends now.
    pub(super) fn pass_time(&mut self, now: Time) -> bool {
        let ends = self.until.take_if(|until| *until <= now).is_some();
        self.over |= ends;
        ends
    }

    fn is_cold(&self, chunk: u64) -> bool {
        self.counts[chunk as usize] < self.threshold
    }

    /// Marks a write of the guest.
    #[inline]
    pub(super) fn mark(&mut self, extent: Extent) {
        for (chunk, part) in chunks(extent) {
            let was_cold = self.is_cold(chunk);
            let before = self.remaining.count();
            self.remaining.set(part);
            let count = &mut self.counts[chunk as usize];
            *count = count.saturating_add(1);
            self.written.set(part);
            if self.is_cold(chunk) {
                self.pushable += self.remaining.count() - before;
            } else if was_cold {
                let set = self.remaining.count() - before;
                self.pushable -= self.remaining_in(chunk) - set;
            }
        }
    }

    fn remaining_in(&self, chunk: u64) -> u64 {
        let start = chunk * u64::from(CHUNK_SECTORS);
        Extent::new(Lba(start), CHUNK_SECTORS).map_or(0, |whole| {
            let end = self.remaining.capacity().0;
            let sectors = end.saturating_sub(start).min(u64::from(CHUNK_SECTORS)) as u32;
            Extent::new(whole.start(), sectors).map_or(0, |part| self.remaining.count_in(part))
        })
    }

    /// Returns the next extent to push at or behind `head`, limited to `limit` sectors.
    pub(super) fn next(&self, head: Lba, limit: u32) -> Option<Extent> {
        if self.pushable == 0 {
            return None;
        }
        let mut head = head;
        loop {
            let run = self.remaining.next_run(head, limit)?;
            let cold = |chunk: u64| self.is_cold(chunk);
            let first = run.start().0 / u64::from(CHUNK_SECTORS);
            if !cold(first) {
                head = Lba((first + 1) * u64::from(CHUNK_SECTORS));
                continue;
            }
            let end = chunks(run)
                .take_while(|(chunk, _)| cold(*chunk))
                .last()
                .map(|(_, part)| part.end())?;
            return Extent::new(run.start(), (end.0 - run.start().0) as u32);
        }
    }

    /// Removes an extent that is being pushed from the remaining blocks. Later writes of the guest add it again.
    pub(super) fn locked(&mut self, extent: Extent) {
        let before = self.remaining.count();
        self.remaining.clear(extent);
        self.pushable -= before - self.remaining.count();
    }

    /// Returns an extent that was not pushed to the remaining blocks.
    pub(super) fn give_up(&mut self, extent: Extent) {
        for (chunk, part) in chunks(extent) {
            let before = self.remaining.count();
            self.remaining.set(part);
            if self.is_cold(chunk) {
                self.pushable += self.remaining.count() - before;
            }
        }
    }

    /// Returns the pushable bytes.
    pub(super) const fn pushable_bytes(&self) -> u64 {
        self.pushable * BLOCK_SECTORS as u64 * SECTOR_SIZE
    }

    /// Returns true if the pushable bytes are worth a round.
    pub(super) const fn is_worth_a_round(&self) -> bool {
        self.pushable_bytes() >= PUSH_AGAIN
    }

    /// Returns the bytes that the destination lacks.
    pub(in crate::controller) fn remaining_bytes(&self) -> u64 {
        self.remaining.sectors() * SECTOR_SIZE
    }

    /// Visits the blocks that the destination lacks, in runs of equal heat.
    pub(in crate::controller) fn each_remaining(&self, visit: impl FnMut(Lba, u32, u8)) {
        let mut runs = RunsByHeat::new(visit);
        let mut head = Lba(0);
        while let Some((start, end)) = self.remaining.next_blocks(head, u64::MAX) {
            head = end;
            let mut from = start;
            while from < end {
                let chunk = from.0 / u64::from(CHUNK_SECTORS);
                let first = Lba(chunk * u64::from(CHUNK_SECTORS));
                // Unwritten blocks are announced as a whole.
                let written = self.written.next_blocks(first, u64::from(CHUNK_SECTORS));
                let (until, heat) = match written {
                    Some((written, after)) if written == first => {
                        (after.min(end), heat(self.counts[chunk as usize]))
                    }
                    Some((written, _)) => (written.min(end), 0),
                    None => (end, 0),
                };
                runs.add(from, until, heat);
                from = until;
            }
        }
        runs.end();
    }

    /// Removes a hole: missing blocks of these sectors, never sent, are zeroes at both nodes.
    pub(super) fn is_hole(&mut self, start: Lba, end: Lba, sent: &DirtyBitmap) {
        let block = u64::from(BLOCK_SECTORS);
        let end = match self.remaining.capacity() {
            capacity if end.0 >= capacity.0 => Lba(capacity.0),
            _ => Lba(end.0 / block * block),
        };
        let mut head = Lba(start.0.next_multiple_of(block));
        while head < end {
            let next = sent.next_blocks(head, u64::MAX);
            let until = next.map_or(end, |(sent, _)| sent.min(end));
            self.forget(head, until);
            head = next.map_or(end, |(_, after)| after);
        }
    }

    /// Removes these blocks from the remaining blocks.
    fn forget(&mut self, start: Lba, end: Lba) {
        let mut hot = 0;
        let mut head = Lba(start.0 / u64::from(CHUNK_SECTORS) * u64::from(CHUNK_SECTORS));
        while let Some(chunk) = self.written.next_run(head, CHUNK_SECTORS)
            && chunk.start() < end
        {
            head = chunk.end();
            let from = chunk.start().max(start);
            let sectors = chunk.end().min(end).0.saturating_sub(from.0);
            let is_cold = self.is_cold(chunk.start().0 / u64::from(CHUNK_SECTORS));
            if let Some(part) = Extent::new(from, sectors as u32).filter(|_| !is_cold) {
                hot += self.remaining.count_in(part);
            }
        }
        let before = self.remaining.count();
        self.remaining.clear_range(start, end);
        if self.threshold > 0 {
            self.pushable -= before - self.remaining.count() - hot;
        }
    }
}

/// Visits runs of set blocks in order, each of one heat. `heat` returns the heat of a chunk's part.
pub(super) fn each_run_by_heat(
    blocks: &DirtyBitmap,
    heat: impl Fn(u64, Extent) -> u8,
    visit: impl FnMut(Lba, u32, u8),
) {
    let mut runs = RunsByHeat::new(visit);
    let mut head = Lba(0);
    while let Some(found) = blocks.next_run(head, crate::units::MAX_EXTENT_SECTORS) {
        head = found.end();
        for (chunk, part) in chunks(found) {
            runs.add(part.start(), part.end(), heat(chunk, part));
        }
    }
    runs.end();
}

/// Joins adjacent parts of equal heat.
struct RunsByHeat<V> {
    run: Option<(Lba, Lba, u8)>,
    visit: V,
}

impl<V: FnMut(Lba, u32, u8)> RunsByHeat<V> {
    const fn new(visit: V) -> Self {
        Self { run: None, visit }
    }

    fn add(&mut self, start: Lba, end: Lba, heat: u8) {
        match &mut self.run {
            Some((_, last, before)) if *last == start && *before == heat => *last = end,
            _ => {
                self.end();
                self.run = Some((start, end, heat));
            }
        }
    }

    /// Flushes the last run.
    fn end(&mut self) {
        const LONGEST: u64 = u32::MAX as u64 / CHUNK_SECTORS as u64 * CHUNK_SECTORS as u64;
        let Some((mut start, end, heat)) = self.run.take() else {
            return;
        };
        while start < end {
            let until = end.min(Lba(start.0 + LONGEST));
            (self.visit)(start, (until.0 - start.0) as u32, heat);
            start = until;
        }
    }
}

/// Returns the order of magnitude of a count, so that few runs differ: 0 for none, 1 for one, 8 for 128 and more.
const fn heat(count: u8) -> u8 {
    (u8::BITS - count.leading_zeros()) as u8
}

/// Returns the chunks that an extent touches, each with the part of the extent inside the chunk.
pub(super) fn chunks(extent: Extent) -> impl Iterator<Item = (u64, Extent)> {
    let size = u64::from(CHUNK_SECTORS);
    let (start, end) = (extent.start().0, extent.end().0);
    (start / size..end.div_ceil(size)).filter_map(move |chunk| {
        let from = start.max(chunk * size);
        let to = end.min((chunk + 1) * size);
        Some((chunk, Extent::new(Lba(from), (to - from) as u32)?))
    })
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::*;

    const CAPACITY: Sectors = Sectors(1021);

    fn push_pull(threshold: u8) -> PushPull {
        let options = PushOptions {
            threshold,
            longest_push: None,
        };
        PushPull::new(options, CAPACITY, Time(0))
    }

    fn extent(start: u64, sectors: u32) -> Extent {
        Extent::new(Lba(start), sectors).expect("an extent")
    }

    /// Returns the extents that a round pushes.
    fn round(it: &mut PushPull, limit: u32) -> Vec<Extent> {
        let mut head = Lba(0);
        std::iter::from_fn(|| {
            let next = it.next(head, limit)?;
            it.locked(next);
            head = next.end();
            Some(next)
        })
        .collect()
    }

    fn remaining(it: &PushPull) -> Vec<(u64, u32, u8)> {
        let mut all = Vec::new();
        it.each_remaining(|start, sectors, heat| all.push((start.0, sectors, heat)));
        all
    }

    #[test]
    fn every_block_is_pushed_once_when_nobody_writes() {
        let mut it = push_pull(3);
        let pushed = round(&mut it, 96);
        assert_eq!(pushed.first(), Some(&extent(0, 96)));
        assert_eq!(pushed.last().map(|last| last.end()), Some(Lba(1021)));
        let sectors: u32 = pushed.iter().map(|part| part.sectors()).sum();
        assert_eq!(sectors, 1021);
        assert_eq!((it.pushable_bytes(), remaining(&it)), (0, Vec::new()));
    }

    #[test]
    fn a_chunk_that_is_written_as_often_as_the_threshold_is_pushed_no_more() {
        let mut it = push_pull(2);
        round(&mut it, 1024);
        it.mark(extent(130, 1));
        assert_eq!(round(&mut it, 1024), [extent(128, 8)]);
        it.mark(extent(140, 8));
        assert_eq!(it.pushable_bytes(), 0);
        assert_eq!(round(&mut it, 1024), []);
        // Two blocks of a chunk that was written twice.
        assert_eq!(remaining(&it), [(136, 16, 2)]);
        // The neighbours are pushed around the hot chunk.
        it.mark(extent(120, 8));
        it.mark(extent(256, 8));
        assert_eq!(round(&mut it, 1024), [extent(120, 8), extent(256, 8)]);
    }

    #[test]
    fn with_a_threshold_of_zero_nothing_is_pushed_and_everything_remains() {
        let mut it = push_pull(0);
        assert_eq!(round(&mut it, 1024), []);
        assert_eq!(remaining(&it), [(0, 1021, 0)]);
        (0..200).for_each(|_| it.mark(extent(1000, 8)));
        assert_eq!(remaining(&it), [(0, 896, 0), (896, 125, 8)]);
    }

    #[test]
    fn what_was_given_up_is_pushed_again_unless_it_has_become_hot() {
        let mut it = push_pull(1);
        let first = it.next(Lba(0), 256).expect("the first chunks");
        it.locked(first);
        it.mark(extent(0, 1));
        it.give_up(first);
        assert_eq!(round(&mut it, 2048), [extent(128, 893)]);
        assert_eq!(remaining(&it), [(0, 128, 1)]);
    }

    #[test]
    fn what_can_be_pushed_is_counted_whatever_happens() {
        let mut it = push_pull(3);
        let mut sent = DirtyBitmap::new(CAPACITY, BLOCK_SECTORS);
        sent.set(extent(200, 80));
        let mut state = 7_u64;
        let mut next = |most: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % most
        };
        for _ in 0..2_000 {
            let start = next(1000);
            let part = extent(start, 1 + next((1021 - start).min(300)) as u32);
            match next(5) {
                0 => it.mark(part),
                1 => it.give_up(part),
                2 => it.is_hole(part.start(), part.end(), &sent),
                _ => {
                    if let Some(found) = it.next(Lba(start), 1 + next(300) as u32) {
                        it.locked(found);
                    }
                }
            }
            let mut copy = 0;
            let mut head = Lba(0);
            while let Some(run) = it.remaining.next_run(head, 8) {
                head = run.end();
                copy += u64::from(it.is_cold(run.start().0 / u64::from(CHUNK_SECTORS)));
            }
            assert_eq!(it.pushable, copy);
        }
    }

    #[test]
    fn what_lies_behind_a_place_can_be_added_and_the_threshold_changed() {
        let options = PushOptions {
            threshold: 2,
            longest_push: None,
        };
        let mut it = PushPull::with_nothing_left(options, CAPACITY, Time(0));
        assert_eq!(it.pushable_bytes(), 0);
        it.add_from(Lba(896));
        assert_eq!(it.pushable_bytes(), 16 * 4096);
        it.mark(extent(900, 8));
        it.mark(extent(900, 8));
        assert_eq!(it.pushable_bytes(), 0);
        it.change(
            PushOptions {
                threshold: 3,
                ..options
            },
            Time(0),
        );
        assert_eq!(round(&mut it, 1024), [extent(896, 125)]);
        assert!(!it.is_over());
        let longest_push = Some(Duration::ZERO);
        it.change(
            PushOptions {
                threshold: 3,
                longest_push,
            },
            Time(7),
        );
        assert!(it.pass_time(Time(7)) && it.is_over());
    }

    #[test]
    fn pushing_ends_when_its_time_is_over() {
        let options = PushOptions {
            threshold: 3,
            longest_push: Some(Duration::from_secs(1)),
        };
        let mut it = PushPull::new(options, CAPACITY, Time(5));
        assert!(!it.pass_time(Time(1_000_000_004)) && !it.is_over());
        assert!(it.pass_time(Time(1_000_000_005)) && it.is_over());
        assert_eq!(it.until(), None, "it ends once");
        assert!(!push_pull(3).pass_time(Time(u64::MAX)));
    }
}
