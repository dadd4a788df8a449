//! Pre-copy: the guest writes to its own disk only, and written blocks are copied again, round after round, until the
//! rest is small enough for a freeze.
//!
//! A guest that writes faster than the link would never reach this point, and disks can be compared only while they are
//! equal. After the last allowed round, and before a comparison, one more round is therefore made in which the guest's
//! writes go to both nodes. Behind this round nothing is left.

use super::differences::on_image::each_run;
use super::dirty::DirtyBitmap;
use crate::controller::RoundOptions;
use crate::units::{Extent, Lba, MAX_EXTENT_SECTORS, SECTOR_SIZE, Sectors};

/// State of pre-copy.
#[derive(Debug)]
pub(in crate::controller) struct PreCopy {
    options: RoundOptions,
    /// Blocks written since they were copied, or since their copy began.
    dirty: DirtyBitmap,
    /// End of the blocks that contain the last chunk.
    block_end: Lba,
    /// True while the guest's writes go to both nodes.
    writes_through: bool,
    #[cfg(feature = "planted-bugs")]
    forgets: bool,
}

/// Step after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum AfterRound {
    /// Another round.
    Again,
    /// The freeze: the rest can be copied while the guest is held.
    Fits,
}

impl PreCopy {
    pub(super) fn new(options: RoundOptions, capacity: Sectors) -> Self {
        Self {
            options,
            dirty: DirtyBitmap::new(capacity, options.block_sectors),
            block_end: Lba(0),
            writes_through: false,
            #[cfg(feature = "planted-bugs")]
            forgets: false,
        }
    }

    /// Creates pre-copy of only these blocks of a disk. Writes never go to both nodes.
    pub(super) fn of(options: RoundOptions, different: &DirtyBitmap) -> Self {
        let options = RoundOptions {
            most_rounds: u32::MAX,
            ..options
        };
        let mut it = Self::new(options, different.capacity());
        each_run(different, |extent| it.dirty.set(extent));
        it
    }

    /// Plants a defect: writes to a block under copy are not remembered.
    #[cfg(feature = "planted-bugs")]
    pub(super) const fn forget_writes(&mut self) {
        self.forgets = true;
    }

    #[inline]
    pub(in crate::controller) const fn writes_through(&self) -> bool {
        self.writes_through
    }

    /// Marks a write of the guest that the destination does not receive.
    #[inline]
    pub(in crate::controller) fn mark(&mut self, extent: Extent) {
        #[cfg(feature = "planted-bugs")]
        if self.forgets && extent.start() < self.block_end {
            return;
        }
        self.dirty.set(extent);
    }

    /// Returns the bytes to copy again.
    pub(in crate::controller) fn rest(&self) -> u64 {
        self.dirty.sectors() * SECTOR_SIZE
    }

    /// Returns true if the rest would hold the guest for too long.
    pub(in crate::controller) fn is_too_much(&self) -> bool {
        self.rest() > self.options.most_left.0
    }

    /// Returns the next extent at or behind `head`, limited to `chunk_sectors`.
    pub(in crate::controller) fn next(&self, head: Lba, chunk_sectors: u32) -> Option<Extent> {
        let (start, end) = if head < self.block_end {
            (head, self.block_end)
        } else {
            self.dirty.next_blocks(head, u64::from(chunk_sectors))?
        };
        let sectors = (end.0 - start.0).min(u64::from(chunk_sectors)) as u32;
        Extent::new(start, sectors)
    }

    /// Notes that the extent from [`Self::next`] is locked: later writes are for the next round. Writes under way
    /// before the lock finish before the extent is read.
    pub(in crate::controller) fn locked(&mut self, extent: Extent) {
        if extent.start() >= self.block_end {
            self.block_end = self.dirty.end_of_block(extent);
            self.dirty.clear(extent);
        }
    }

    /// Notes that the window was given up: these extents, and the rest of the last extent's block, have not been
    /// copied.
    pub(in crate::controller) fn give_up(
        &mut self,
        extents: impl Iterator<Item = Extent>,
        head: Lba,
    ) {
        extents.for_each(|extent| self.dirty.set(extent));
        if head < self.block_end
            && let Some(rest) = Extent::new(Lba(self.block_end.0 - 1), 1)
        {
            self.dirty.set(rest);
        }
        self.block_end = Lba(0);
    }

    /// Hands over the rest while nothing is being copied; the caller remembers the rest from now on.
    pub(in crate::controller) fn take_rest(&mut self, mut remember: impl FnMut(Extent)) {
        self.begin_round();
        let mut head = Lba(0);
        while let Some(extent) = self.next(head, MAX_EXTENT_SECTORS) {
            self.locked(extent);
            head = extent.end();
            remember(extent);
        }
    }

    /// Begins a round at the start of the disk.
    pub(in crate::controller) fn begin_round(&mut self) {
        self.block_end = Lba(0);
    }

    /// Returns the step after `round`, which has ended. `compares` is true if the disks are compared next.
    pub(in crate::controller) fn after(&mut self, round: u32, compares: bool) -> AfterRound {
        let fits = !self.is_too_much();
        if self.writes_through {
            // Blocks that a pause has marked in this round do not require another round before a comparison: see
            // [`Self::take_rest`].
            return match fits || compares {
                true => AfterRound::Fits,
                false => AfterRound::Again,
            };
        }
        if fits && !compares {
            return AfterRound::Fits;
        }
        self.writes_through = fits || round >= self.options.most_rounds;
        AfterRound::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    const CAPACITY: Sectors = Sectors(4096);

    fn pre_copy(block_sectors: u32) -> PreCopy {
        let options = RoundOptions {
            block_sectors,
            most_rounds: 3,
            most_left: Bytes(2 * 4096),
        };
        PreCopy::new(options, CAPACITY)
    }

    fn extent(start: u64, sectors: u32) -> Extent {
        Extent::new(Lba(start), sectors).expect("an extent")
    }

    /// Returns the extents that a round copies.
    fn round(it: &mut PreCopy, chunk: u32) -> Vec<Extent> {
        it.begin_round();
        let mut head = Lba(0);
        std::iter::from_fn(|| {
            let next = it.next(head, chunk)?;
            it.locked(next);
            head = next.end();
            Some(next)
        })
        .collect()
    }

    #[test]
    fn a_round_copies_the_blocks_that_were_written_whole_and_once() {
        for block in [8, 32, 256, 1024] {
            let mut it = pre_copy(block);
            it.mark(extent(1024, 4));
            it.mark(extent(4095, 1));
            let copied = round(&mut it, 64);
            let sectors: u32 = copied.iter().map(|extent| extent.sectors()).sum();
            assert_eq!(sectors, 2 * block, "{copied:?}");
            assert!(copied.iter().any(|part| part.overlaps(extent(1024, 4))));
            assert!(copied.iter().all(|part| part.sectors() <= 64));
            assert_eq!((it.rest(), round(&mut it, 64).len()), (0, 0));
        }
    }

    #[test]
    fn what_is_written_while_its_block_is_copied_is_for_the_next_round() {
        let mut it = pre_copy(256);
        it.mark(extent(0, 1));
        let first = it.next(Lba(0), 64).expect("the block");
        it.locked(first);
        it.mark(extent(200, 8));
        let second = it.next(first.end(), 64).expect("the rest of the block");
        it.locked(second);
        assert_eq!(it.rest(), 256 * 512);
        assert_eq!(round(&mut it, 256), [extent(0, 256)]);
    }

    #[test]
    fn what_was_given_up_is_copied_again() {
        let mut it = pre_copy(256);
        it.mark(extent(0, 1));
        let first = it.next(Lba(0), 64).expect("the block");
        it.locked(first);
        // The rest of the block was not even locked.
        it.give_up(std::iter::empty(), first.end());
        assert_eq!(round(&mut it, 256), [extent(0, 256)]);
        it.mark(extent(512, 1));
        it.begin_round();
        let whole = it.next(Lba(0), 256).expect("the block");
        it.locked(whole);
        it.give_up(std::iter::once(whole), whole.end());
        assert_eq!(round(&mut it, 256), [extent(512, 256)]);
    }

    #[test]
    fn rounds_end_when_little_is_left_or_writes_go_to_both_nodes() {
        let mut it = pre_copy(8);
        assert_eq!(it.after(1, false), AfterRound::Fits);
        (0..3).for_each(|block| it.mark(extent(block * 8, 8)));
        for number in 1..3 {
            assert_eq!(it.after(number, false), AfterRound::Again);
            assert!(!it.writes_through());
        }
        assert_eq!(it.after(3, false), AfterRound::Again, "too many rounds");
        assert!(it.writes_through());
        round(&mut it, 64);
        assert_eq!(it.after(4, false), AfterRound::Fits);
        // Disks are made equal before a comparison.
        let mut compares = pre_copy(8);
        assert_eq!(compares.after(1, true), AfterRound::Again);
        assert!(compares.writes_through());
        // Blocks marked by a pause are remembered elsewhere while the disks are compared.
        (0..2).for_each(|block| compares.mark(extent(block * 2048, 8)));
        assert_eq!(compares.after(2, true), AfterRound::Fits);
        let mut taken = Vec::new();
        compares.take_rest(|extent| taken.push(extent));
        assert_eq!(taken, [extent(0, 8), extent(2048, 8)]);
        assert_eq!(compares.rest(), 0);
    }
}
