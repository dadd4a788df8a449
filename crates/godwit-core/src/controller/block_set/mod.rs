//! A set of a disk's blocks: the dirty bitmap, and every other set of blocks of a move.

use crate::units::{Extent, Lba, SECTOR_SIZE, Sectors};

/// Words of a group, whose bits may all be alike.
pub(in crate::controller) const GROUP_WORDS: usize = 64;

/// Blocks of a group.
const GROUP_BLOCKS: u64 = GROUP_WORDS as u64 * 64;

/// A set of the disk's blocks, a bit each. With blocks of 4 KiB a disk of 1 TiB takes at most 32 MiB. Groups of blocks that
/// are all set or all clear take no memory and no time.
#[derive(Debug)]
pub(in crate::controller) struct BlockSet {
    /// Words of mixed groups; the words of other groups are meaningless.
    words: Box<[u64]>,
    /// A bit for each group with a set block.
    some: Box<[u64]>,
    /// A bit for each group whose blocks are all set.
    all: Box<[u64]>,
    capacity: Sectors,
    block_sectors: u64,
    count: u64,
}

impl BlockSet {
    pub(in crate::controller) fn new(capacity: Sectors, block_sectors: u32) -> Self {
        let block_sectors = u64::from(block_sectors);
        let words = capacity.0.div_ceil(block_sectors).div_ceil(64) as usize;
        let groups = words.div_ceil(GROUP_WORDS).div_ceil(64);
        Self {
            words: vec![0; words].into_boxed_slice(),
            some: vec![0; groups].into_boxed_slice(),
            all: vec![0; groups].into_boxed_slice(),
            capacity,
            block_sectors,
            count: 0,
        }
    }

    /// Returns an empty set of the same shape.
    pub(in crate::controller) fn like(&self) -> Self {
        Self::new(self.capacity, self.block_sectors as u32)
    }

    pub(in crate::controller) const fn capacity(&self) -> Sectors {
        self.capacity
    }

    pub(in crate::controller) const fn block_sectors(&self) -> u32 {
        self.block_sectors as u32
    }

    /// Returns the number of set blocks.
    pub(in crate::controller) const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sectors of the set blocks; a last block that the disk cuts short counts whole.
    pub(in crate::controller) const fn sectors(&self) -> u64 {
        self.count * self.block_sectors
    }

    /// Returns the bytes of the set blocks within the disk.
    pub(in crate::controller) fn bytes(&self) -> u64 {
        let tail = self.capacity.0 % self.block_sectors;
        let cut = if tail > 0 && self.is_set(self.capacity.0 / self.block_sectors) {
            self.block_sectors - tail
        } else {
            0
        };
        (self.sectors() - cut) * SECTOR_SIZE
    }

    const fn block_count(&self) -> u64 {
        self.capacity.0.div_ceil(self.block_sectors)
    }

    pub(in crate::controller) fn fill(&mut self) {
        self.set_blocks(0..self.block_count());
    }

    pub(in crate::controller) fn empty(&mut self) {
        self.some.fill(0);
        self.all.fill(0);
        self.count = 0;
    }

    /// Sets every block that the extent touches.
    pub(in crate::controller) fn set(&mut self, extent: Extent) {
        self.set_blocks(self.blocks(extent));
    }

    /// Sets every block of these sectors, whose number may exceed an extent.
    pub(in crate::controller) fn set_range(&mut self, start: Lba, end: Lba) {
        self.set_blocks(self.blocks_between(start, end));
    }

    /// Clears every block of these sectors, whose number may exceed an extent.
    pub(in crate::controller) fn clear_range(&mut self, start: Lba, end: Lba) {
        self.clear_blocks(self.blocks_between(start, end));
    }

    /// Returns the number of set blocks that the extent touches.
    pub(in crate::controller) fn count_in(&self, extent: Extent) -> u64 {
        let mut count = 0;
        each_word(self.blocks(extent), |word, mask| {
            count += u64::from((self.word(word) & mask).count_ones());
        });
        count
    }

    /// Returns true if the extent touches a set block.
    #[inline]
    pub(in crate::controller) fn touches(&self, extent: Extent) -> bool {
        self.count > 0 && self.count_in(extent) > 0
    }

    /// Returns true if all blocks that the extent touches are set.
    pub(in crate::controller) fn covers(&self, extent: Extent) -> bool {
        let blocks = self.blocks(extent);
        self.count_in(extent) == blocks.end - blocks.start
    }

    /// Returns the number of blocks in the extent that are set here and in `other`, which has the same shape.
    pub(in crate::controller) fn count_both(&self, other: &Self, extent: Extent) -> u64 {
        let mut count = 0;
        each_word(self.blocks(extent), |word, mask| {
            count += u64::from((self.word(word) & other.word(word) & mask).count_ones());
        });
        count
    }

    /// Returns the number of blocks that are set here and in `other`, which has the same shape.
    pub(in crate::controller) fn count_common(&self, other: &Self) -> u64 {
        let common = self.groups().filter(|group| other.has_some(*group));
        let words = common.flat_map(|group| group * GROUP_WORDS..(group + 1) * GROUP_WORDS);
        words
            .map(|word| u64::from((self.word(word) & other.word(word)).count_ones()))
            .sum()
    }

    /// Sets the blocks of `other`, which has the same shape, within the blocks touched by the extent.
    pub(in crate::controller) fn set_those_of(&mut self, other: &Self, extent: Extent) {
        debug_assert_eq!(self.block_sectors, other.block_sectors, "one shape");
        let head = Lba(extent.start().0 / self.block_sectors * self.block_sectors);
        let end = self.end_of_block(extent);
        for (start, stop) in other.ranges(head).take_while(|(start, _)| *start < end) {
            self.set_range(start, stop.min(end));
        }
    }

    /// Sets the block with this number.
    pub(in crate::controller) fn set_number(&mut self, block: usize) {
        self.set_blocks(block as u64..(block as u64 + 1).min(self.block_count()));
    }

    /// Returns the numbers of the set blocks, in order.
    pub(in crate::controller) fn numbers(&self) -> impl Iterator<Item = usize> {
        let mut from = 0;
        core::iter::from_fn(move || {
            let found = self.next_alike(from, self.block_count(), true)?;
            from = found + 1;
            Some(found as usize)
        })
    }

    fn set_blocks(&mut self, blocks: core::ops::Range<u64>) {
        self.change(blocks, true);
    }

    /// Clears every block that the extent touches.
    pub(in crate::controller) fn clear(&mut self, extent: Extent) {
        self.clear_blocks(self.blocks(extent));
    }

    /// Clears the blocks that the extent covers whole.
    pub(in crate::controller) fn clear_covered(&mut self, extent: Extent) {
        let first = extent.start().0.div_ceil(self.block_sectors);
        let end = if extent.end().0 >= self.capacity.0 {
            self.block_count()
        } else {
            extent.end().0 / self.block_sectors
        };
        self.clear_blocks(first..end);
    }

    fn clear_blocks(&mut self, blocks: core::ops::Range<u64>) {
        self.change(blocks, false);
    }

    fn change(&mut self, blocks: core::ops::Range<u64>, sets: bool) {
        let mut first = blocks.start;
        while first < blocks.end {
            let group = (first / GROUP_BLOCKS) as usize;
            let whole = self.blocks_of(group);
            if let Some(end) = self.change_many(group, first..blocks.end, sets) {
                first = end;
                continue;
            }
            let end = blocks.end.min(whole.end);
            if first == whole.start && end == whole.end {
                self.count = self.count - self.count_of(group)
                    + if sets { whole.end - whole.start } else { 0 };
                self.mark(group, sets, sets);
            } else {
                self.change_part(group, first..end, sets);
            }
            first = end;
        }
    }

    /// Changes 64 uniform groups at once if `blocks` begin with 64 such groups. Returns the end of these groups.
    fn change_many(
        &mut self,
        group: usize,
        blocks: core::ops::Range<u64>,
        sets: bool,
    ) -> Option<u64> {
        let (at, end) = (group / 64, blocks.start + 64 * GROUP_BLOCKS);
        let is_whole = group.is_multiple_of(64) && blocks.start.is_multiple_of(GROUP_BLOCKS);
        let are_set = match (self.some[at], self.all[at]) {
            (0, _) => false,
            (_, u64::MAX) => true,
            _ => return None,
        };
        if !is_whole || end > blocks.end {
            return None;
        }
        (self.some[at], self.all[at]) = if sets { (u64::MAX, u64::MAX) } else { (0, 0) };
        match (are_set, sets) {
            (false, true) => self.count += 64 * GROUP_BLOCKS,
            (true, false) => self.count -= 64 * GROUP_BLOCKS,
            _ => {}
        }
        Some(end)
    }

    fn change_part(&mut self, group: usize, blocks: core::ops::Range<u64>, sets: bool) {
        let (some, all) = (self.has_some(group), self.has_all(group));
        if sets && all || !sets && !some {
            return;
        }
        let whole = self.blocks_of(group);
        if some == all {
            let words = whole.start as usize / 64..whole.end.div_ceil(64) as usize;
            self.words[words].fill(0);
            if all {
                each_word(whole.clone(), |word, mask| self.words[word] = mask);
            }
        }
        let Self { words, count, .. } = self;
        let mut is_uniform = false;
        each_word(blocks, |word, mask| {
            let before = words[word];
            let after = if sets { before | mask } else { before & !mask };
            let changed = u64::from((before ^ after).count_ones());
            *count = if sets {
                *count + changed
            } else {
                *count - changed
            };
            words[word] = after;
            is_uniform |= after == 0 || after == u64::MAX || word == words.len() - 1;
        });
        let set = match is_uniform {
            true => self.count_mixed(group),
            // A mixed group.
            false => 1,
        };
        self.mark(group, set > 0, set == whole.end - whole.start);
    }

    fn mark(&mut self, group: usize, some: bool, all: bool) {
        let bit = 1 << (group % 64);
        for (bits, is_set) in [(&mut self.some, some), (&mut self.all, all)] {
            let word = &mut bits[group / 64];
            *word = if is_set { *word | bit } else { *word & !bit };
        }
    }

    fn has_some(&self, group: usize) -> bool {
        self.some[group / 64] & 1 << (group % 64) != 0
    }

    fn has_all(&self, group: usize) -> bool {
        self.all[group / 64] & 1 << (group % 64) != 0
    }

    /// Returns the number of set blocks in a group.
    fn count_of(&self, group: usize) -> u64 {
        let whole = self.blocks_of(group);
        match (self.has_some(group), self.has_all(group)) {
            (false, _) => 0,
            (true, true) => whole.end - whole.start,
            (true, false) => self.count_mixed(group),
        }
    }

    fn count_mixed(&self, group: usize) -> u64 {
        let words = self
            .words
            .iter()
            .skip(group * GROUP_WORDS)
            .take(GROUP_WORDS);
        words.map(|word| u64::from(word.count_ones())).sum()
    }

    const fn blocks_of(&self, group: usize) -> core::ops::Range<u64> {
        let start = group as u64 * GROUP_BLOCKS;
        let end = start + GROUP_BLOCKS;
        let last = self.block_count();
        start..if end < last { end } else { last }
    }

    /// Returns the groups with a set block, in order.
    pub(in crate::controller) fn groups(&self) -> impl Iterator<Item = usize> {
        let bits = (0..).zip(self.some.iter());
        bits.flat_map(|(at, word)| {
            let word = *word;
            (0..64).filter_map(move |bit| (word & 1 << bit != 0).then_some(at * 64 + bit))
        })
    }

    /// Returns the words of a group, with zeroes beyond the disk's end.
    pub(in crate::controller) fn group(&self, group: usize) -> [u64; GROUP_WORDS] {
        core::array::from_fn(|at| self.word(group * GROUP_WORDS + at))
    }

    /// Replaces the words of a group. Bits beyond the disk's end are left out.
    pub(in crate::controller) fn put_group(&mut self, group: usize, words: &[u64; GROUP_WORDS]) {
        let whole = self.blocks_of(group);
        self.clear_blocks(whole.clone());
        if words.iter().all(|word| *word == 0) {
            return;
        }
        let first = group * GROUP_WORDS;
        each_word(whole.clone(), |word, mask| {
            self.words[word] = words[word - first] & mask
        });
        let set = self.count_mixed(group);
        self.count += set;
        self.mark(group, set > 0, set == whole.end - whole.start);
    }

    pub(in crate::controller) const fn group_count(&self) -> usize {
        self.words.len().div_ceil(GROUP_WORDS)
    }

    /// Returns the bits of a word: the first block is the lowest bit, and bits beyond the disk's end are clear.
    pub(in crate::controller) fn word(&self, word: usize) -> u64 {
        let Some(stored) = self.words.get(word) else {
            return 0;
        };
        let group = word / GROUP_WORDS;
        match (self.has_some(group), self.has_all(group)) {
            (false, _) => 0,
            (true, false) => *stored,
            (true, true) => match self.block_count() - word as u64 * 64 {
                left @ ..64 => (1 << left) - 1,
                _ => u64::MAX,
            },
        }
    }

    pub(in crate::controller) fn words(&self) -> impl Iterator<Item = u64> {
        (0..self.words.len()).map(|word| self.word(word))
    }

    /// Creates a set from these words. Bits beyond the disk's end are left out.
    pub(in crate::controller) fn from_words(
        capacity: Sectors,
        block_sectors: u32,
        words: &[u64],
    ) -> Self {
        let mut map = Self::new(capacity, block_sectors);
        for (group, words) in words
            .chunks(GROUP_WORDS)
            .take(map.group_count())
            .enumerate()
        {
            let mut whole = [0; GROUP_WORDS];
            whole[..words.len()].copy_from_slice(words);
            map.put_group(group, &whole);
        }
        map
    }

    /// Returns the first run of set blocks at or behind `from`, limited to `limit` sectors but at least one block.
    pub(in crate::controller) fn next_run(&self, from: Lba, limit: u32) -> Option<Extent> {
        let (start, end) = self.next_blocks(from, u64::from(limit))?;
        Extent::new(start, u32::try_from(end.0 - start.0).ok()?)
    }

    /// Like [`Self::next_run`], as a start and an end: a block, or the limit, may exceed an extent.
    pub(in crate::controller) fn next_blocks(&self, from: Lba, limit: u64) -> Option<(Lba, Lba)> {
        let first = self.next_alike(
            from.0.div_ceil(self.block_sectors),
            self.block_count(),
            true,
        )?;
        let most = first.saturating_add((limit / self.block_sectors).max(1));
        let most = most.min(self.block_count());
        let end = self.next_alike(first + 1, most, false).unwrap_or(most);
        let end = (end * self.block_sectors).min(self.capacity.0);
        Some((Lba(first * self.block_sectors), Lba(end)))
    }

    /// Returns the runs of set blocks at or behind `from`, each of at most `limit` sectors but at least one block.
    pub(in crate::controller) fn runs(
        &self,
        from: Lba,
        limit: u32,
    ) -> impl Iterator<Item = Extent> {
        let mut head = from;
        core::iter::from_fn(move || {
            let run = self.next_run(head, limit)?;
            head = run.end();
            Some(run)
        })
    }

    /// Returns the whole runs of set blocks at or behind `from`, as starts and ends.
    pub(in crate::controller) fn ranges(&self, from: Lba) -> impl Iterator<Item = (Lba, Lba)> {
        let mut head = from;
        core::iter::from_fn(move || {
            let range = self.next_blocks(head, u64::MAX)?;
            head = range.1;
            Some(range)
        })
    }

    /// Adds every block that a block of `other` touches.
    pub(in crate::controller) fn add(&mut self, other: &Self) {
        for (start, end) in other.ranges(Lba(0)) {
            self.set_range(start, end);
        }
    }

    /// Removes every block that a block of `other` touches.
    pub(in crate::controller) fn remove(&mut self, other: &Self) {
        for (start, end) in other.ranges(Lba(0)) {
            self.clear_range(start, end);
        }
    }

    /// Returns the end of the last block that the extent touches.
    pub(in crate::controller) fn end_of_block(&self, extent: Extent) -> Lba {
        let end = extent.end().0.next_multiple_of(self.block_sectors);
        Lba(end.min(self.capacity.0))
    }

    /// Returns the first set or clear block in `from..end`.
    fn next_alike(&self, from: u64, end: u64, is_set: bool) -> Option<u64> {
        // Asked again for each chunk in flight.
        if from >= end || is_set && self.count == 0 {
            return None;
        }
        let mut at = from;
        while at < end {
            let group = (at / GROUP_BLOCKS) as usize;
            let has_none = match is_set {
                true => !self.has_some(group),
                false => self.has_all(group),
            };
            if has_none {
                at = self.skip_groups(group, is_set) as u64 * GROUP_BLOCKS;
                continue;
            }
            let word = self.word((at / 64) as usize);
            let alike = (if is_set { word } else { !word }) & (u64::MAX << (at % 64));
            if alike != 0 {
                let found = at / 64 * 64 + u64::from(alike.trailing_zeros());
                return (found < end).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Returns the first later group that may have a block of this kind, or the end of the groups.
    fn skip_groups(&self, group: usize, is_set: bool) -> usize {
        let mut at = group + 1;
        while let Some(word) = self.some.get(at / 64) {
            let candidates = match is_set {
                true => *word,
                false => !self.all[at / 64],
            };
            let candidates = candidates & (u64::MAX << (at % 64));
            if candidates != 0 {
                return at / 64 * 64 + candidates.trailing_zeros() as usize;
            }
            at = (at / 64 + 1) * 64;
        }
        at
    }

    fn is_set(&self, block: u64) -> bool {
        self.word((block / 64) as usize) & 1 << (block % 64) != 0
    }

    const fn blocks(&self, extent: Extent) -> core::ops::Range<u64> {
        extent.start().0 / self.block_sectors..extent.end().0.div_ceil(self.block_sectors)
    }

    fn blocks_between(&self, start: Lba, end: Lba) -> core::ops::Range<u64> {
        let end = end.0.min(self.capacity.0);
        start.0 / self.block_sectors..end.div_ceil(self.block_sectors)
    }
}

/// Calls `visit` with the index of each word that holds some of the blocks, and their bits in the word.
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
mod tests;
