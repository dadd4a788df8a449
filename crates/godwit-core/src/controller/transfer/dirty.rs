//! Which blocks of a disk still have to be looked at.

use crate::units::{Extent, Lba, SECTOR_SIZE, Sectors};

/// A bitmap over the disk's blocks: with blocks of 4 KiB, 32 MiB for a disk of 1 TiB.
#[derive(Debug)]
pub(in crate::controller) struct DirtyBitmap {
    words: Box<[u64]>,
    capacity: Sectors,
    block_sectors: u64,
    count: u64,
}

impl DirtyBitmap {
    pub(in crate::controller) fn new(capacity: Sectors, block_sectors: u32) -> Self {
        let block_sectors = u64::from(block_sectors);
        let blocks = capacity.0.div_ceil(block_sectors);
        let words = vec![0; blocks.div_ceil(64) as usize].into_boxed_slice();
        Self {
            words,
            capacity,
            block_sectors,
            count: 0,
        }
    }

    /// One of the same shape, of which nothing is set.
    pub(super) fn like(&self) -> Self {
        Self::new(self.capacity, self.block_sectors as u32)
    }

    pub(super) const fn capacity(&self) -> Sectors {
        self.capacity
    }

    /// Sectors of a block.
    pub(in crate::controller) const fn block_sectors(&self) -> u32 {
        self.block_sectors as u32
    }

    /// Blocks that are set.
    pub(in crate::controller) fn count(&self) -> u64 {
        self.count
    }

    /// Sectors of the blocks that are set; a last block that the disk cuts short counts whole.
    pub(in crate::controller) fn sectors(&self) -> u64 {
        self.count * self.block_sectors
    }

    /// Bytes of the blocks that are set, as far as the disk has them.
    pub(in crate::controller) fn bytes(&self) -> u64 {
        let tail = self.capacity.0 % self.block_sectors;
        let cut = if tail > 0 && self.is_set(self.capacity.0 / self.block_sectors) {
            self.block_sectors - tail
        } else {
            0
        };
        (self.sectors() - cut) * SECTOR_SIZE
    }

    /// Sets all blocks of the disk.
    pub(super) fn fill(&mut self) {
        self.set_blocks(0..self.capacity.0.div_ceil(self.block_sectors));
    }

    /// Clears all blocks of the disk.
    pub(super) fn empty(&mut self) {
        if self.count > 0 {
            self.clear_blocks(0..self.capacity.0.div_ceil(self.block_sectors));
        }
    }

    /// Sets every block that the extent touches.
    pub(in crate::controller) fn set(&mut self, extent: Extent) {
        self.set_blocks(self.blocks(extent));
    }

    /// Sets every block of these sectors, of which there may be more than an extent has.
    pub(super) fn set_range(&mut self, start: Lba, end: Lba) {
        let first = start.0 / self.block_sectors;
        self.set_blocks(first..end.0.min(self.capacity.0).div_ceil(self.block_sectors));
    }

    /// How many blocks are set that the extent touches.
    pub(super) fn count_in(&self, extent: Extent) -> u64 {
        let mut count = 0;
        each_word(self.blocks(extent), |word, mask| {
            count += u64::from((self.words[word] & mask).count_ones());
        });
        count
    }

    /// Whether any block is set that the extent touches.
    #[inline]
    pub(super) fn touches(&self, extent: Extent) -> bool {
        self.count > 0 && self.count_in(extent) > 0
    }

    /// Whether all blocks are set that the extent touches.
    pub(super) fn covers(&self, extent: Extent) -> bool {
        let blocks = self.blocks(extent);
        self.count_in(extent) == blocks.end - blocks.start
    }

    /// Sets the blocks that the extent touches and that are set in `other`, which has the same shape.
    pub(super) fn set_those_of(&mut self, other: &Self, extent: Extent) {
        debug_assert_eq!(self.block_sectors, other.block_sectors, "one shape");
        let blocks = self.blocks(extent);
        let Self { words, count, .. } = self;
        each_word(blocks, |word, mask| {
            let added = mask & other.words[word] & !words[word];
            *count += u64::from(added.count_ones());
            words[word] |= added;
        });
    }

    fn set_blocks(&mut self, blocks: core::ops::Range<u64>) {
        let Self { words, count, .. } = self;
        each_word(blocks, |word, mask| {
            *count += u64::from((mask & !words[word]).count_ones());
            words[word] |= mask;
        });
    }

    /// Clears every block that the extent touches.
    pub(in crate::controller) fn clear(&mut self, extent: Extent) {
        self.clear_blocks(self.blocks(extent));
    }

    /// Clears the blocks that the extent covers whole.
    pub(in crate::controller) fn clear_covered(&mut self, extent: Extent) {
        let first = extent.start().0.div_ceil(self.block_sectors);
        let end = if extent.end().0 >= self.capacity.0 {
            self.capacity.0.div_ceil(self.block_sectors)
        } else {
            extent.end().0 / self.block_sectors
        };
        self.clear_blocks(first..end);
    }

    fn clear_blocks(&mut self, blocks: core::ops::Range<u64>) {
        let Self { words, count, .. } = self;
        each_word(blocks, |word, mask| {
            let word = &mut words[word];
            *count -= u64::from((*word & mask).count_ones());
            // What was never written takes no memory.
            if *word & mask != 0 {
                *word &= !mask;
            }
        });
    }

    /// The bits, the first block's lowest.
    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }

    /// The blocks whose bits are set in these words. Bits beyond the disk's end are left out.
    pub(super) fn from_words(capacity: Sectors, block_sectors: u32, words: &[u64]) -> Self {
        let mut map = Self::new(capacity, block_sectors);
        for (own, word) in map.words.iter_mut().zip(words) {
            *own = *word;
        }
        let blocks = capacity.0.div_ceil(u64::from(block_sectors));
        if let (Some(last), tail @ 1..) = (map.words.last_mut(), blocks % 64) {
            *last &= (1 << tail) - 1;
        }
        map.count = map
            .words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum();
        map
    }

    /// The first run of set blocks at or right of `from`, at most `limit` sectors of it, which is
    /// at least a block.
    pub(in crate::controller) fn next_run(&self, from: Lba, limit: u32) -> Option<Extent> {
        let (start, end) = self.next_blocks(from, limit)?;
        Extent::new(start, u32::try_from(end.0 - start.0).ok()?)
    }

    /// The same from its start to its end: a block may be longer than an extent.
    pub(super) fn next_blocks(&self, from: Lba, limit: u32) -> Option<(Lba, Lba)> {
        let first = self.next_set(from.0.div_ceil(self.block_sectors))?;
        let most = first + u64::from(limit) / self.block_sectors;
        let mut end = first + 1;
        while end < most && self.is_set(end) {
            end += 1;
        }
        let end = (end * self.block_sectors).min(self.capacity.0);
        Some((Lba(first * self.block_sectors), Lba(end)))
    }

    /// Where the last block ends that the extent touches.
    pub(super) fn end_of_block(&self, extent: Extent) -> Lba {
        let end = extent.end().0.next_multiple_of(self.block_sectors);
        Lba(end.min(self.capacity.0))
    }

    fn next_set(&self, from: u64) -> Option<u64> {
        // It is asked for again for each chunk that is on its way.
        if self.count == 0 {
            return None;
        }
        let mut index = (from / 64) as usize;
        let mut word = self.words.get(index)? & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            word = *self.words.get(index)?;
        }
        Some(index as u64 * 64 + u64::from(word.trailing_zeros()))
    }

    fn is_set(&self, block: u64) -> bool {
        self.words
            .get((block / 64) as usize)
            .is_some_and(|word| word & (1 << (block % 64)) != 0)
    }

    fn blocks(&self, extent: Extent) -> core::ops::Range<u64> {
        extent.start().0 / self.block_sectors..extent.end().0.div_ceil(self.block_sectors)
    }
}

/// Calls `visit` with the index of each word that holds some of the blocks, and their bits in it.
#[inline]
fn each_word(blocks: core::ops::Range<u64>, mut visit: impl FnMut(usize, u64)) {
    let mut first = blocks.start;
    while first < blocks.end {
        let end = blocks.end.min((first / 64 + 1) * 64);
        let mask = (u64::MAX >> (64 - (end - first))) << (first % 64);
        visit((first / 64) as usize, mask);
        first = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, sectors: u32) -> Extent {
        Extent::new(Lba(start), sectors).unwrap()
    }

    #[test]
    fn runs_are_whole_blocks_and_end_at_the_limit_or_the_disk() {
        let mut dirty = DirtyBitmap::new(Sectors(1001), 8);
        dirty.set(extent(9, 1));
        dirty.set(extent(15, 34));
        dirty.set(extent(1000, 1));
        assert_eq!(dirty.count(), 7);
        assert_eq!(dirty.next_run(Lba(0), 1024), Some(extent(8, 48)));
        assert_eq!(dirty.next_run(Lba(0), 16), Some(extent(8, 16)));
        assert_eq!(dirty.next_run(Lba(24), 16), Some(extent(24, 16)));
        assert_eq!(dirty.next_run(Lba(56), 64), Some(extent(1000, 1)));
        dirty.clear(extent(8, 48));
        assert_eq!(dirty.count(), 1);
        assert_eq!(dirty.next_run(Lba(0), 64), Some(extent(1000, 1)));
        assert_eq!(dirty.next_run(Lba(1001), 64), None);
        assert_eq!(dirty.sectors(), 8);
        assert_eq!(
            dirty.bytes(),
            512,
            "of the last block the disk has a sector"
        );
        dirty.clear_covered(extent(1000, 1));
        assert_eq!(dirty.count(), 0, "the disk's end cuts the last block short");
        dirty.set(extent(0, 24));
        dirty.clear_covered(extent(1, 22));
        assert_eq!(dirty.count(), 2, "what is covered in part stays");
    }
}
