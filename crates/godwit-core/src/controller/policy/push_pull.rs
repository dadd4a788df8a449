//! Push and pull: the guest writes to its own disk only. Rarely written chunks are pushed to the destination. Chunks
//! written again and again are not pushed, because their copies would be in vain. The disk changes hands without them,
//! and the destination pulls the rest, most often written chunks first (Alg. 1 and 2 of the hybrid storage-transfer
//! paper).
//!
//! With a threshold of zero nothing is pushed: post-copy.

use core::time::Duration;

use crate::controller::block_set::BlockSet;
use crate::controller::policy::{Policy, PolicyDescription};
use crate::controller::transfer::heat::{BLOCK_SECTORS, CHUNK_SECTORS, RunsByHeat, chunks, heat};
use crate::controller::transfer::pass::Pass;
use crate::controller::{ImageOffer, MAX_PULLED, MigrationOptions, PolicyOptions, StartError};
use crate::units::{Extent, Lba, SECTOR_SIZE, Sectors, Time};
use crate::wire::Features;

/// Push and pull.
pub const PUSH_PULL: &PolicyDescription = &PolicyDescription {
    name: "push-pull",
    summary: "Seldom written chunks are pushed; then the disk changes hands, and the destination pulls \
              the rest. The source is needed until then",
    code: 4,
    needs: Features::POLICIES.with(Features::PULLS),
    usual: PolicyOptions::PushPull(PushOptions::USUAL),
    reviewed: false,
};

/// Post-copy: push and pull without the push, and offered as such.
pub const POST_COPY: &PolicyDescription = &PolicyDescription {
    name: "post-copy",
    summary: "The disk changes hands at once, and the destination pulls everything. The source is \
              needed until then",
    usual: PolicyOptions::PushPull(PushOptions {
        threshold: 0,
        longest_push: None,
    }),
    ..*PUSH_PULL
};

/// Options of the push before the disk changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushOptions {
    /// Number of writes during the migration after which a chunk of 64 KiB is no longer pushed. With 0 nothing is
    /// pushed: the whole disk is pulled.
    pub threshold: u8,
    /// Maximum time before the disk changes hands. `None`: the disk changes hands when nothing is left to push.
    pub longest_push: Option<Duration>,
}

impl PushOptions {
    /// Three writes, no time limit.
    pub const USUAL: Self = Self {
        threshold: 3,
        longest_push: None,
    };

    pub(super) fn check(options: &MigrationOptions, capacity: Sectors) -> Result<(), StartError> {
        if options.verify {
            return Err(StartError::Option("verification of a disk that is pulled"));
        }
        if capacity.bytes() > MAX_PULLED {
            return Err(StartError::Option("size of a disk that is pulled"));
        }
        Ok(())
    }

    /// Returns true if the disk may move without its image: the destination then lacks blocks in two places.
    pub(super) fn may_leave_image(options: &MigrationOptions) -> bool {
        options.image == ImageOffer::TwoPlaces
    }
}

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
    remaining: BlockSet,
    /// Writes to each chunk (`WriteCount`), up to 255.
    counts: Box<[u8]>,
    /// Chunks that were written.
    written: BlockSet,
    /// Blocks of `remaining` in chunks that may be pushed.
    pushable: u64,
}

impl PushPull {
    pub(super) fn new(options: PushOptions, capacity: Sectors, now: Time) -> Self {
        let mut remaining = BlockSet::new(capacity, BLOCK_SECTORS);
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
            written: BlockSet::new(capacity, CHUNK_SECTORS),
        }
    }

    /// Creates the state for a destination that has the whole disk.
    fn with_nothing_left(options: PushOptions, capacity: Sectors, now: Time) -> Self {
        let mut it = Self::new(options, capacity, now);
        it.remaining.empty();
        it.pushable = 0;
        it
    }

    /// Creates the state behind another policy, whose memory is added by [`Self::add`].
    pub(super) fn behind(
        pass: Pass,
        options: PushOptions,
        head: Lba,
        wanted: Option<&BlockSet>,
        capacity: Sectors,
        now: Time,
    ) -> Self {
        let mut push = Self::with_nothing_left(options, capacity, now);
        match (pass, wanted) {
            (Pass::Copy, None) => push.add_from(head),
            (Pass::Copy, Some(wanted)) => push.add_those_of(wanted, head),
            (Pass::Compare, differing) => {
                // Blocks behind the head have not been compared.
                push.add_from(head);
                if let Some(differing) = differing {
                    push.add_those_of(differing, Lba(0));
                }
            }
            (Pass::Resend { .. } | Pass::VerifyAll | Pass::VerifyDirty { .. }, _) => {}
        }
        push
    }

    /// Adds the unwritten blocks from here on, which the destination lacks.
    fn add_from(&mut self, start: Lba) {
        self.remaining
            .set_range(start, Lba(self.remaining.capacity().0));
        self.recount();
    }

    /// Adds the set bits of `blocks`, a map of the same length, from `start` on: the destination lacks these blocks.
    fn add_those_of(&mut self, blocks: &BlockSet, start: Lba) {
        for (from, end) in blocks.ranges(start) {
            self.remaining.set_range(from, end);
        }
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

    fn is_cold(&self, chunk: u64) -> bool {
        self.counts[chunk as usize] < self.threshold
    }

    /// Counts a write of the guest.
    #[inline]
    fn count(&mut self, extent: Extent) {
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
    fn next_cold(&self, head: Lba, limit: u32) -> Option<Extent> {
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

    /// Returns an extent that was not pushed to the remaining blocks.
    pub(super) fn add(&mut self, extent: Extent) {
        for (chunk, part) in chunks(extent) {
            let before = self.remaining.count();
            self.remaining.set(part);
            if self.is_cold(chunk) {
                self.pushable += self.remaining.count() - before;
            }
        }
    }

    /// Returns the pushable bytes.
    const fn pushable_bytes(&self) -> u64 {
        self.pushable * BLOCK_SECTORS as u64 * SECTOR_SIZE
    }

    /// Removes these blocks from the remaining blocks.
    fn forget(&mut self, start: Lba, end: Lba) {
        let mut hot = 0;
        let first = Lba(start.0 / u64::from(CHUNK_SECTORS) * u64::from(CHUNK_SECTORS));
        let written = self.written.runs(first, CHUNK_SECTORS);
        for chunk in written.take_while(|chunk| chunk.start() < end) {
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

impl Policy for PushPull {
    #[inline]
    fn reaches(&self, _: Pass, _: bool) -> bool {
        true
    }

    #[inline]
    fn only_marks(&self, _: Pass) -> bool {
        true
    }

    #[inline]
    fn mark(&mut self, _: Pass, extent: Extent) -> bool {
        self.count(extent);
        true
    }

    #[inline]
    fn lets_writes_through(&self, _: Pass) -> Option<bool> {
        Some(true)
    }

    fn begin_round(&mut self, _: Pass, _: Sectors) -> u64 {
        self.pushable_bytes()
    }

    fn next(&self, _: Pass, head: Lba, limit: u32, _: Sectors) -> Option<Extent> {
        self.next_cold(head, limit)
    }

    /// Removes an extent that is being pushed from the remaining blocks. Later writes of the guest add it again.
    fn locked(&mut self, _: Pass, extent: Extent) {
        let before = self.remaining.count();
        self.remaining.clear(extent);
        self.pushable -= before - self.remaining.count();
    }

    fn give_up(&mut self, _: Pass, extents: impl Iterator<Item = Extent>, _: Lba) {
        extents.for_each(|extent| self.add(extent));
    }

    fn goes_on(&mut self, _: Pass, _: u32, _: bool) -> bool {
        self.pushable_bytes() > 0
    }

    fn is_due_again(&self, _: Pass) -> bool {
        self.pushable_bytes() >= PUSH_AGAIN
    }

    #[inline]
    fn pulls(&self) -> bool {
        true
    }

    fn owes(&self) -> u64 {
        self.remaining.sectors() * SECTOR_SIZE
    }

    fn each_owed(&self, visit: impl FnMut(Lba, u32, u8)) {
        let mut runs = RunsByHeat::new(visit);
        for (start, end) in self.remaining.ranges(Lba(0)) {
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

    fn lacks_only(&mut self, blocks: &BlockSet) {
        self.remaining.empty();
        self.add_those_of(blocks, Lba(0));
    }

    fn is_hole(&mut self, start: Lba, end: Lba, sent: &BlockSet) {
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

    fn leaves_at(&self) -> Option<Time> {
        self.until
    }

    fn pass_time(&mut self, now: Time) -> bool {
        let ends = self.until.take_if(|until| *until <= now).is_some();
        self.over |= ends;
        ends
    }

    fn leaves(&self, ordered: bool) -> bool {
        ordered || self.over
    }

    fn change(&mut self, options: PushOptions, now: Time) -> bool {
        self.threshold = options.threshold;
        self.until = options.longest_push.map(|longest| now.after(longest));
        self.over = false;
        self.recount();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: Sectors = Sectors(1021);
    const PASS: Pass = Pass::Copy;

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
            let next = it.next_cold(head, limit)?;
            it.locked(PASS, next);
            head = next.end();
            Some(next)
        })
        .collect()
    }

    fn remaining(it: &PushPull) -> Vec<(u64, u32, u8)> {
        let mut all = Vec::new();
        it.each_owed(|start, sectors, heat| all.push((start.0, sectors, heat)));
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
        it.count(extent(130, 1));
        assert_eq!(round(&mut it, 1024), [extent(128, 8)]);
        it.count(extent(140, 8));
        assert_eq!(it.pushable_bytes(), 0);
        assert_eq!(round(&mut it, 1024), []);
        // Two blocks of a chunk that was written twice.
        assert_eq!(remaining(&it), [(136, 16, 2)]);
        // The neighbours are pushed around the hot chunk.
        it.count(extent(120, 8));
        it.count(extent(256, 8));
        assert_eq!(round(&mut it, 1024), [extent(120, 8), extent(256, 8)]);
    }

    #[test]
    fn with_a_threshold_of_zero_nothing_is_pushed_and_everything_remains() {
        let mut it = push_pull(0);
        assert_eq!(round(&mut it, 1024), []);
        assert_eq!(remaining(&it), [(0, 1021, 0)]);
        (0..200).for_each(|_| it.count(extent(1000, 8)));
        assert_eq!(remaining(&it), [(0, 896, 0), (896, 125, 8)]);
    }

    #[test]
    fn what_was_given_up_is_pushed_again_unless_it_has_become_hot() {
        let mut it = push_pull(1);
        let first = it.next_cold(Lba(0), 256).expect("the first chunks");
        it.locked(PASS, first);
        it.count(extent(0, 1));
        it.add(first);
        assert_eq!(round(&mut it, 2048), [extent(128, 893)]);
        assert_eq!(remaining(&it), [(0, 128, 1)]);
    }

    #[test]
    fn what_can_be_pushed_is_counted_whatever_happens() {
        let mut it = push_pull(3);
        let mut sent = BlockSet::new(CAPACITY, BLOCK_SECTORS);
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
                0 => it.count(part),
                1 => it.add(part),
                2 => it.is_hole(part.start(), part.end(), &sent),
                _ => {
                    if let Some(found) = it.next_cold(Lba(start), 1 + next(300) as u32) {
                        it.locked(PASS, found);
                    }
                }
            }
            let mut copy = 0;
            for run in it.remaining.runs(Lba(0), 8) {
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
        it.count(extent(900, 8));
        it.count(extent(900, 8));
        assert_eq!(it.pushable_bytes(), 0);
        it.change(
            PushOptions {
                threshold: 3,
                ..options
            },
            Time(0),
        );
        assert_eq!(round(&mut it, 1024), [extent(896, 125)]);
        assert!(!it.over);
        let longest_push = Some(Duration::ZERO);
        it.change(
            PushOptions {
                threshold: 3,
                longest_push,
            },
            Time(7),
        );
        assert!(it.pass_time(Time(7)) && it.over);
    }

    #[test]
    fn pushing_ends_when_its_time_is_over() {
        let options = PushOptions {
            threshold: 3,
            longest_push: Some(Duration::from_secs(1)),
        };
        let mut it = PushPull::new(options, CAPACITY, Time(5));
        assert!(!it.pass_time(Time(1_000_000_004)) && !it.over);
        assert!(it.pass_time(Time(1_000_000_005)) && it.over);
        assert_eq!(it.leaves_at(), None, "it ends once");
        assert!(!push_pull(3).pass_time(Time(u64::MAX)));
    }
}
