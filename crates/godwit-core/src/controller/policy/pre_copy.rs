//! Pre-copy: the guest writes to its own disk only, and written blocks are copied again, round after round, until the
//! rest is small enough for a freeze.
//!
//! A guest that writes faster than the link would never reach this point, and disks can be compared only while they are
//! equal. After the last allowed round, and before a comparison, one more round is therefore made in which the guest's
//! writes go to both nodes. Behind this round nothing is left.

use crate::controller::block_set::BlockSet;
use crate::controller::options::is_length;
use crate::controller::policy::seam::next_of_all;
use crate::controller::policy::{Policy, PolicyDescription};
use crate::controller::transfer::heat::BLOCK_SECTORS;
use crate::controller::transfer::pass::Pass;
use crate::controller::{MigrationOptions, PolicyOptions, StartError};
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::units::{Bytes, Extent, Lba, MAX_EXTENT_SECTORS, SECTOR_SIZE, Sectors};
use crate::wire::Features;

/// Pre-copy.
pub const PRE_COPY: &PolicyDescription = &PolicyDescription {
    name: "pre-copy",
    summary: "Passes over the blocks written since the previous pass, until little is left",
    code: 2,
    needs: Features::POLICIES,
    usual: PolicyOptions::PreCopy(RoundOptions::USUAL),
    reviewed: true,
};

/// Longest block of the dirty bitmap: 1 GiB.
const MAX_BLOCK_SECTORS: u32 = (1 << 30) / SECTOR_SIZE as u32;

/// Options of pre-copy's rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundOptions {
    /// Sectors per bit of the dirty bitmap: a multiple of 8, from 4 KiB to 1 GiB.
    pub block_sectors: u32,
    /// Rounds, including the first over the whole disk, after which the guest's writes go to both nodes if too much is
    /// left. At least 1.
    pub most_rounds: u32,
    /// Maximum bytes left to be copied while the guest is held.
    pub most_left: Bytes,
}

impl RoundOptions {
    /// Blocks of 64 KiB, 8 rounds, 4 MiB.
    pub const USUAL: Self = Self {
        block_sectors: 128,
        most_rounds: 8,
        most_left: Bytes(4 << 20),
    };

    /// Returns the largest disk that can be moved with this block length. The dirty bitmap of a larger disk, more than
    /// 2 GiB, may not fit into memory.
    pub const fn largest_disk(&self) -> Bytes {
        Bytes((self.block_sectors as u64 * SECTOR_SIZE).saturating_mul(1 << 34))
    }
}

impl RoundOptions {
    pub(super) fn check(&self, capacity: Sectors) -> Result<(), StartError> {
        if !is_length(self.block_sectors, MAX_BLOCK_SECTORS) || self.most_rounds == 0 {
            return Err(StartError::Option("block or number of rounds of pre-copy"));
        }
        if capacity.bytes() > self.largest_disk() {
            return Err(StartError::Option("size of the disk for blocks as short"));
        }
        Ok(())
    }

    /// Returns true if the disk may move without its image: a comparison would read blocks that are missing.
    pub(super) const fn may_leave_image(&self, options: &MigrationOptions) -> bool {
        self.block_sectors == BLOCK_SECTORS && !options.verify
    }
}

/// State of pre-copy.
#[derive(Debug)]
pub(in crate::controller) struct PreCopy {
    options: RoundOptions,
    /// Blocks written since they were copied, or since their copy began.
    dirty: BlockSet,
    /// End of the blocks that contain the last chunk.
    block_end: Lba,
    /// True while the guest's writes go to both nodes.
    writes_through: bool,
    #[cfg(feature = "planted-bugs")]
    forgets: bool,
}

/// Step after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterRound {
    /// Another round.
    Again,
    /// The freeze: the rest can be copied while the guest is held.
    Fits,
}

impl PreCopy {
    pub(super) fn new(options: RoundOptions, capacity: Sectors) -> Self {
        Self {
            options,
            dirty: BlockSet::new(capacity, options.block_sectors),
            block_end: Lba(0),
            writes_through: false,
            #[cfg(feature = "planted-bugs")]
            forgets: false,
        }
    }

    /// Creates pre-copy of only these blocks of a disk. Writes never go to both nodes.
    pub(super) fn of(options: RoundOptions, different: &BlockSet) -> Self {
        let options = RoundOptions {
            most_rounds: u32::MAX,
            ..options
        };
        let mut it = Self::new(options, different.capacity());
        it.dirty.add(different);
        it
    }

    /// Returns true if writes of this pass are only marked.
    #[inline]
    const fn is_round(&self, pass: Pass) -> bool {
        pass.copies() && !self.writes_through
    }

    /// Marks a write of the guest that the destination does not receive.
    #[inline]
    fn remember(&mut self, extent: Extent) {
        #[cfg(feature = "planted-bugs")]
        if self.forgets && extent.start() < self.block_end {
            return;
        }
        self.dirty.set(extent);
    }

    /// Returns true if the rest would hold the guest for too long.
    fn is_too_much(&self) -> bool {
        self.rest() > self.options.most_left.0
    }

    /// Returns the next extent at or behind `head`, limited to `chunk_sectors`.
    fn next_dirty(&self, head: Lba, chunk_sectors: u32) -> Option<Extent> {
        let (start, end) = if head < self.block_end {
            (head, self.block_end)
        } else {
            self.dirty.next_blocks(head, u64::from(chunk_sectors))?
        };
        let sectors = (end.0 - start.0).min(u64::from(chunk_sectors)) as u32;
        Extent::new(start, sectors)
    }

    /// Notes that the extent from [`Self::next_dirty`] is locked: later writes are for the next round. Writes under way
    /// before the lock finish before the extent is read.
    fn clean(&mut self, extent: Extent) {
        if extent.start() >= self.block_end {
            self.block_end = self.dirty.end_of_block(extent);
            self.dirty.clear(extent);
        }
    }

    /// Notes that the window was given up: these extents, and the rest of the last extent's block, have not been
    /// copied.
    fn set_again(&mut self, extents: impl Iterator<Item = Extent>, head: Lba) {
        extents.for_each(|extent| self.dirty.set(extent));
        if head < self.block_end
            && let Some(rest) = Extent::new(Lba(self.block_end.0 - 1), 1)
        {
            self.dirty.set(rest);
        }
        self.block_end = Lba(0);
    }

    /// Returns the step after `round`, which has ended. `compares` is true if the disks are compared next.
    fn after(&mut self, round: u32, compares: bool) -> AfterRound {
        let fits = !self.is_too_much();
        if self.writes_through {
            // Blocks that a pause has marked in this round do not require another round before a comparison: see
            // [`Policy::take_rest`].
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

impl Policy for PreCopy {
    #[inline]
    fn reaches(&self, pass: Pass, behind: bool) -> bool {
        behind || !matches!(pass, Pass::Copy)
    }

    #[inline]
    fn only_marks(&self, pass: Pass) -> bool {
        self.is_round(pass)
    }

    #[inline]
    fn mark(&mut self, pass: Pass, extent: Extent) -> bool {
        if pass.copies() {
            self.remember(extent);
        }
        pass.copies()
    }

    #[inline]
    fn lets_writes_through(&self, pass: Pass) -> Option<bool> {
        // A place written without end would be copied without end.
        pass.copies().then_some(!self.writes_through)
    }

    fn begin_round(&mut self, pass: Pass, capacity: Sectors) -> u64 {
        if !matches!(pass, Pass::Resend { .. }) {
            return capacity.bytes().0;
        }
        self.block_end = Lba(0);
        self.rest()
    }

    fn next(&self, pass: Pass, head: Lba, limit: u32, capacity: Sectors) -> Option<Extent> {
        match pass {
            Pass::Resend { .. } => self.next_dirty(head, limit),
            _ => next_of_all(head, limit, capacity),
        }
    }

    fn locked(&mut self, pass: Pass, extent: Extent) {
        if matches!(pass, Pass::Resend { .. }) {
            self.clean(extent);
        }
    }

    fn give_up(&mut self, pass: Pass, extents: impl Iterator<Item = Extent>, head: Lba) {
        if matches!(pass, Pass::Resend { .. }) {
            self.set_again(extents, head);
        }
    }

    fn sends_again(&self, pass: Pass) -> bool {
        self.is_round(pass)
    }

    fn goes_on(&mut self, pass: Pass, round: u32, compares: bool) -> bool {
        pass.copies() && self.after(round, compares) == AfterRound::Again
    }

    fn is_due_again(&self, pass: Pass) -> bool {
        pass.copies() && self.is_too_much()
    }

    fn take_rest(&mut self, mut remember: impl FnMut(Extent)) {
        self.block_end = Lba(0);
        let mut head = Lba(0);
        while let Some(extent) = self.next_dirty(head, MAX_EXTENT_SECTORS) {
            self.clean(extent);
            head = extent.end();
            remember(extent);
        }
    }

    fn rest(&self) -> u64 {
        self.dirty.sectors() * SECTOR_SIZE
    }

    fn step_aside(&mut self, head: Lba, remember: impl FnMut(Extent)) {
        self.set_again(core::iter::empty(), head);
        self.take_rest(remember);
    }

    #[cfg(feature = "planted-bugs")]
    fn plant(&mut self, bug: PlantedBug) {
        self.forgets = bug == PlantedBug::ForgetRoundWrites;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: Sectors = Sectors(4096);
    const ROUND: Pass = Pass::Resend { round: 2 };

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
        it.begin_round(ROUND, CAPACITY);
        let mut head = Lba(0);
        std::iter::from_fn(|| {
            let next = it.next_dirty(head, chunk)?;
            it.clean(next);
            head = next.end();
            Some(next)
        })
        .collect()
    }

    #[test]
    fn a_round_copies_the_blocks_that_were_written_whole_and_once() {
        for block in [8, 32, 256, 1024] {
            let mut it = pre_copy(block);
            it.remember(extent(1024, 4));
            it.remember(extent(4095, 1));
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
        it.remember(extent(0, 1));
        let first = it.next_dirty(Lba(0), 64).expect("the block");
        it.clean(first);
        it.remember(extent(200, 8));
        let second = it
            .next_dirty(first.end(), 64)
            .expect("the rest of the block");
        it.clean(second);
        assert_eq!(it.rest(), 256 * 512);
        assert_eq!(round(&mut it, 256), [extent(0, 256)]);
    }

    #[test]
    fn what_was_given_up_is_copied_again() {
        let mut it = pre_copy(256);
        it.remember(extent(0, 1));
        let first = it.next_dirty(Lba(0), 64).expect("the block");
        it.clean(first);
        // The rest of the block was not even locked.
        it.set_again(std::iter::empty(), first.end());
        assert_eq!(round(&mut it, 256), [extent(0, 256)]);
        it.remember(extent(512, 1));
        it.begin_round(ROUND, CAPACITY);
        let whole = it.next_dirty(Lba(0), 256).expect("the block");
        it.clean(whole);
        it.set_again(std::iter::once(whole), whole.end());
        assert_eq!(round(&mut it, 256), [extent(512, 256)]);
    }

    #[test]
    fn rounds_end_when_little_is_left_or_writes_go_to_both_nodes() {
        let mut it = pre_copy(8);
        assert_eq!(it.after(1, false), AfterRound::Fits);
        (0..3).for_each(|block| it.remember(extent(block * 8, 8)));
        for number in 1..3 {
            assert_eq!(it.after(number, false), AfterRound::Again);
            assert!(!it.writes_through);
        }
        assert_eq!(it.after(3, false), AfterRound::Again, "too many rounds");
        assert!(it.writes_through);
        round(&mut it, 64);
        assert_eq!(it.after(4, false), AfterRound::Fits);
        // Disks are made equal before a comparison.
        let mut compares = pre_copy(8);
        assert_eq!(compares.after(1, true), AfterRound::Again);
        assert!(compares.writes_through);
        // Blocks marked by a pause are remembered elsewhere while the disks are compared.
        (0..2).for_each(|block| compares.remember(extent(block * 2048, 8)));
        assert_eq!(compares.after(2, true), AfterRound::Fits);
        let mut taken = Vec::new();
        compares.take_rest(|extent| taken.push(extent));
        assert_eq!(taken, [extent(0, 8), extent(2048, 8)]);
        assert_eq!(compares.rest(), 0);
    }
}
