//! The writes in flight or queued by address, so that overlapping writes keep their order.
//!
//! The address space is cut into granules of 128 KiB. A write is entered under every granule of its extent; a write
//! over many granules is kept in a short list instead. A lookup costs a hash and, in the common case, an empty bucket.
//! Nothing is allocated after construction.

use crate::request::RequestTag;
use crate::units::Extent;

const GRANULE_SHIFT: u32 = 8;
const MAX_GRANULES: usize = 4;
const NONE: u32 = u32::MAX;

/// The unfinished writes of one disk.
#[derive(Debug)]
pub(crate) struct WriteTable {
    buckets: Box<[u32]>,
    nodes: Box<[Node]>,
    free: u32,
    large: Vec<Entry>,
}

/// A write in the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) extent: Extent,
    /// The write's place in the order of arrival.
    pub(crate) sequence: u64,
    pub(crate) tag: RequestTag,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    entry: Option<Entry>,
    granule: u64,
    next: u32,
}

impl WriteTable {
    /// Creates a table for at most `writes` writes at once.
    pub(crate) fn new(writes: u32) -> Self {
        let count = writes as usize * MAX_GRANULES;
        let nodes = (0..count)
            .map(|index| Node {
                entry: None,
                granule: 0,
                next: if index + 1 < count {
                    index as u32 + 1
                } else {
                    NONE
                },
            })
            .collect();
        let buckets = vec![NONE; (writes as usize * 4).next_power_of_two()].into_boxed_slice();
        Self {
            buckets,
            nodes,
            free: 0,
            large: Vec::with_capacity(writes as usize),
        }
    }

    /// Enters a write, whose tag must not be in the table.
    #[inline]
    pub(crate) fn insert(&mut self, entry: Entry) {
        if is_large(entry.extent) {
            self.large.push(entry);
            return;
        }
        for granule in granules(entry.extent) {
            let index = self.free;
            let bucket = self.bucket(granule);
            let node = &mut self.nodes[index as usize];
            self.free = node.next;
            *node = Node {
                entry: Some(entry),
                granule,
                next: self.buckets[bucket],
            };
            self.buckets[bucket] = index;
        }
    }

    /// Removes a write that was entered with this tag and extent.
    #[inline]
    pub(crate) fn remove(&mut self, tag: RequestTag, extent: Extent) {
        if is_large(extent) {
            self.large.retain(|entry| entry.tag != tag);
            return;
        }
        for granule in granules(extent) {
            let bucket = self.bucket(granule);
            let mut previous = NONE;
            let mut index = self.buckets[bucket];
            while index != NONE {
                let node = self.nodes[index as usize];
                if node.granule == granule && node.entry.is_some_and(|entry| entry.tag == tag) {
                    if previous == NONE {
                        self.buckets[bucket] = node.next;
                    } else {
                        self.nodes[previous as usize].next = node.next;
                    }
                    self.nodes[index as usize] = Node {
                        entry: None,
                        granule: 0,
                        next: self.free,
                    };
                    self.free = index;
                    break;
                }
                previous = index;
                index = node.next;
            }
        }
    }

    /// Returns a write that overlaps the extent and is accepted by `matches`, if any.
    #[inline]
    pub(crate) fn find(
        &self,
        extent: Extent,
        matches: impl Fn(&Entry) -> bool,
    ) -> Option<RequestTag> {
        for granule in granules(extent) {
            let mut index = self.buckets[self.bucket(granule)];
            while index != NONE {
                let node = &self.nodes[index as usize];
                if node.granule == granule
                    && let Some(entry) = &node.entry
                    && entry.extent.overlaps(extent)
                    && matches(entry)
                {
                    return Some(entry.tag);
                }
                index = node.next;
            }
        }
        self.large
            .iter()
            .find(|entry| entry.extent.overlaps(extent) && matches(entry))
            .map(|entry| entry.tag)
    }

    #[inline]
    fn bucket(&self, granule: u64) -> usize {
        spread(granule, self.buckets.len())
    }
}

/// Returns the place of a number among `places`, a power of two: neighbours lie far apart.
#[inline]
pub(crate) const fn spread(number: u64, places: usize) -> usize {
    let hash = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    hash as usize & (places - 1)
}

#[inline]
fn granules(extent: Extent) -> core::ops::RangeInclusive<u64> {
    extent.start().0 >> GRANULE_SHIFT..=(extent.end().0 - 1) >> GRANULE_SHIFT
}

#[inline]
fn is_large(extent: Extent) -> bool {
    let granules = granules(extent);
    granules.end() - granules.start() >= MAX_GRANULES as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::Lba;

    proptest! {
        /// The table finds exactly the entries that a linear search finds.
        #[test]
        fn finds_what_a_linear_search_finds(
            steps in prop::collection::vec((any::<bool>(), 0u32..64, 0u64..8192, 1u32..3000), 1..200),
        ) {
            let mut table = WriteTable::new(64);
            let mut model: Vec<Entry> = Vec::new();
            for (sequence, (insert, tag, start, sectors)) in steps.into_iter().enumerate() {
                let tag = RequestTag(tag);
                let extent = Extent::new(Lba(start), sectors).unwrap();
                let found = table.find(extent, |_| true);
                let overlapping: Vec<_> =
                    model.iter().filter(|e| e.extent.overlaps(extent)).map(|e| e.tag).collect();
                prop_assert_eq!(found.is_some(), !overlapping.is_empty());
                prop_assert!(found.is_none_or(|tag| overlapping.contains(&tag)));
                if let Some(at) = model.iter().position(|e| e.tag == tag) {
                    let entry = model.swap_remove(at);
                    table.remove(tag, entry.extent);
                }
                if insert {
                    let entry = Entry { extent, sequence: sequence as u64, tag };
                    table.insert(entry);
                    model.push(entry);
                }
            }
        }
    }
}
