//! Writes of the guest to the migrated region that the destination has not received (`DelayedWriteTable`, Alg. 3 of the
//! SmartNIC storage-migration paper).
//!
//! The table's memory is fixed when the migration starts. The table begins as a list of exact ranges. When the list is
//! full, ranges that lie close together become one. If this step gains too little, all ranges move into a bitmap over
//! the disk. Coarser entries only cost traffic: nothing is ever dropped, and inserting never fails.

use crate::controller::block_set::BlockSet;
use crate::units::{Extent, Lba, MAX_EXTENT_SECTORS, Sectors};

/// Longest extent sent at once: 64 KiB.
pub(in crate::controller) const MAX_SECTORS: u32 = 128;

/// Maximum gap in sectors (64 KiB) between ranges that become one when the list is full.
const MERGE_GAP: u64 = 128;

/// Maximum number of blocks in the bitmap, unless blocks would be longer than [`MAX_SECTORS`].
const MAX_BLOCKS: u64 = 1 << 26;

/// Minimum sectors of the bitmap's blocks: 4 KiB.
const MIN_BLOCK: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
}

/// The addresses of delayed writes.
#[derive(Debug)]
pub(in crate::controller) struct DelayedTable {
    /// Sorted, disjoint and not adjacent. Empty while the bitmap is in use.
    ranges: Vec<Range>,
    limit: usize,
    range_sectors: u64,
    bitmap: BlockSet,
    #[cfg(feature = "planted-bugs")]
    drops: bool,
}

impl DelayedTable {
    /// Creates an empty table for a disk, with at most `limit` exact ranges (at least 1).
    pub(in crate::controller) fn new(capacity: Sectors, limit: u16) -> Self {
        let limit = usize::from(limit).max(1);
        let block = (capacity.0 / MAX_BLOCKS)
            .next_power_of_two()
            .clamp(MIN_BLOCK, u64::from(MAX_SECTORS));
        Self {
            ranges: Vec::with_capacity(limit + 1),
            limit,
            range_sectors: 0,
            bitmap: BlockSet::new(capacity, block as u32),
            #[cfg(feature = "planted-bugs")]
            drops: false,
        }
    }

    /// Plants a defect: the table drops entries that do not fit.
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) const fn drop_on_overflow(&mut self) {
        self.drops = true;
    }

    pub(in crate::controller) fn is_empty(&self) -> bool {
        self.sectors() == Sectors(0)
    }

    /// Returns the sectors in the table, including sectors added by coarse entries.
    pub(in crate::controller) fn sectors(&self) -> Sectors {
        Sectors(self.range_sectors + self.bitmap.sectors())
    }

    /// Adds an extent of the disk.
    pub(in crate::controller) fn insert(&mut self, extent: Extent) {
        if self.bitmap.count() > 0 {
            return self.bitmap.set(extent);
        }
        let (start, end) = (extent.start().0, extent.end().0);
        let first = self.ranges.partition_point(|range| range.end < start);
        let last = self.ranges.partition_point(|range| range.start <= end);
        let mut merged = Range { start, end };
        for range in &self.ranges[first..last] {
            merged.start = merged.start.min(range.start);
            merged.end = merged.end.max(range.end);
            self.range_sectors -= range.end - range.start;
        }
        self.range_sectors += merged.end - merged.start;
        if first == last {
            self.ranges.insert(first, merged);
            self.make_room();
        } else {
            self.ranges[first] = merged;
            self.ranges.drain(first + 1..last);
        }
    }

    /// Coarsens the list if the list exceeds its limit.
    fn make_room(&mut self) {
        if self.ranges.len() <= self.limit {
            return;
        }
        #[cfg(feature = "planted-bugs")]
        if self.drops {
            self.range_sectors -= self.ranges.pop().map_or(0, |range| range.end - range.start);
            return;
        }
        let mut added = 0;
        self.ranges.dedup_by(|next, kept| {
            let gap = next.start - kept.end;
            let close = gap <= MERGE_GAP;
            if close {
                added += gap;
                kept.end = next.end;
            }
            close
        });
        self.range_sectors += added;
        if self.ranges.len() * 4 <= self.limit * 3 {
            return;
        }
        self.range_sectors = 0;
        for Range { mut start, end } in self.ranges.drain(..) {
            while start < end {
                let sectors = (end - start).min(u64::from(MAX_EXTENT_SECTORS)) as u32;
                if let Some(part) = Extent::new(Lba(start), sectors) {
                    self.bitmap.set(part);
                }
                start += u64::from(sectors);
            }
        }
    }

    /// Removes an extent made obsolete by a double write, and returns the number of removed sectors. A block of the
    /// bitmap is removed only if covered whole.
    pub(in crate::controller) fn remove(&mut self, extent: Extent) -> Sectors {
        let before = self.sectors();
        if self.bitmap.count() > 0 {
            self.bitmap.clear_covered(extent);
        } else if !self.ranges.is_empty() {
            self.cut(extent);
        }
        Sectors(before.0.saturating_sub(self.sectors().0))
    }

    /// Returns the minimum sectors, from `wanted` on, in which an entry may be taken: a block of the bitmap is taken
    /// whole.
    pub(in crate::controller) fn least_part(&self, wanted: u32) -> u32 {
        if self.bitmap.count() > 0 {
            wanted.max(self.bitmap.block_sectors())
        } else {
            wanted
        }
    }

    /// Removes an extent that begins where [`Self::next`] said and is about to be sent. In the bitmap, the last block
    /// is removed whole.
    pub(in crate::controller) fn take(&mut self, extent: Extent) {
        if self.bitmap.count() > 0 {
            self.bitmap.clear(extent);
        } else {
            self.cut(extent);
        }
    }

    fn cut(&mut self, extent: Extent) {
        let (start, end) = (extent.start().0, extent.end().0);
        let first = self.ranges.partition_point(|range| range.end <= start);
        let last = self.ranges.partition_point(|range| range.start < end);
        if first >= last {
            return;
        }
        for range in &self.ranges[first..last] {
            self.range_sectors -= range.end.min(end) - range.start.max(start);
        }
        let left = Range {
            start: self.ranges[first].start,
            end: start,
        };
        let right = Range {
            start: end,
            end: self.ranges[last - 1].end,
        };
        let (mut first, mut last) = (first, last);
        if left.start < left.end {
            self.ranges[first] = left;
            first += 1;
        }
        if right.start < right.end {
            if first == last {
                // The range becomes two.
                self.ranges.insert(first, right);
                return self.make_room();
            }
            last -= 1;
            self.ranges[last] = right;
        }
        self.ranges.drain(first..last);
    }

    /// Returns the first part of an entry at or behind `from`, at most [`MAX_SECTORS`] long; without one, the first
    /// part on the disk.
    pub(in crate::controller) fn next(&self, from: Lba) -> Option<Extent> {
        self.next_from(from).or_else(|| self.next_from(Lba(0)))
    }

    fn next_from(&self, from: Lba) -> Option<Extent> {
        if self.bitmap.count() > 0 {
            return self.bitmap.next_run(from, MAX_SECTORS);
        }
        let at = self.ranges.partition_point(|range| range.end <= from.0);
        let range = self.ranges.get(at)?;
        let start = range.start.max(from.0);
        let sectors = (range.end - start).min(u64::from(MAX_SECTORS)) as u32;
        Extent::new(Lba(start), sectors)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: u64 = 5003;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(Extent),
        Remove(Extent),
        Take,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let extent = (0..CAPACITY, 1u32..80).prop_map(|(start, sectors)| {
            let sectors = u64::from(sectors).min(CAPACITY - start) as u32;
            Extent::new(Lba(start), sectors).expect("it is not empty")
        });
        let step = prop_oneof![
            4 => extent.clone().prop_map(Step::Insert),
            2 => extent.prop_map(Step::Remove),
            1 => Just(Step::Take),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        /// With any list size, every sector inserted and not removed since comes out again, and the table ends empty.
        #[test]
        fn nothing_is_dropped_however_coarse_it_gets(steps in steps(), limit in 1u16..40) {
            let mut table = DelayedTable::new(Sectors(CAPACITY), limit);
            let mut owed = vec![false; CAPACITY as usize];
            let sectors = |extent: Extent| extent.start().0 as usize..extent.end().0 as usize;
            let mut cursor = Lba(0);
            let mut take = |table: &mut DelayedTable, owed: &mut Vec<bool>| {
                let Some(extent) = table.next(cursor) else { return false };
                assert!(extent.sectors() <= MAX_SECTORS && extent.end().0 <= CAPACITY);
                table.take(extent);
                owed[sectors(extent)].fill(false);
                cursor = extent.end();
                true
            };
            for step in steps {
                match step {
                    Step::Insert(extent) => {
                        table.insert(extent);
                        owed[sectors(extent)].fill(true);
                    }
                    Step::Remove(extent) => {
                        let before = table.sectors();
                        let removed = table.remove(extent);
                        prop_assert!(removed <= before);
                        owed[sectors(extent)].fill(false);
                    }
                    Step::Take => {
                        take(&mut table, &mut owed);
                    }
                }
                prop_assert!(table.ranges.len() <= usize::from(limit));
                let owing = owed.iter().filter(|owed| **owed).count() as u64;
                prop_assert!(table.sectors() >= Sectors(owing));
            }
            let mut rounds = 0;
            while take(&mut table, &mut owed) {
                rounds += 1;
                prop_assert!(rounds <= CAPACITY, "it never empties");
            }
            prop_assert!(table.is_empty());
            prop_assert!(owed.iter().all(|owed| !owed), "entries were lost");
        }

        /// The table is exact while the list suffices.
        #[test]
        fn a_list_that_suffices_is_exact(steps in steps()) {
            let mut table = DelayedTable::new(Sectors(CAPACITY), 1000);
            let mut owed = vec![false; CAPACITY as usize];
            for step in steps {
                match step {
                    Step::Insert(extent) => {
                        table.insert(extent);
                        owed[extent.start().0 as usize..extent.end().0 as usize].fill(true);
                    }
                    Step::Remove(extent) => {
                        table.remove(extent);
                        owed[extent.start().0 as usize..extent.end().0 as usize].fill(false);
                    }
                    Step::Take => {}
                }
                let owing = owed.iter().filter(|owed| **owed).count() as u64;
                prop_assert_eq!(table.sectors(), Sectors(owing));
            }
        }
    }
}
