//! The blocks written to a disk since a migration brought it here. The former node may have kept its image, the disk as
//! of the switchover. For a move back only the written blocks have to be sent.
//!
//! The map must have all written blocks, or the map is useless. The map therefore begins when this process becomes the
//! disk's owner, and each write is entered before it is carried out. The map outlasts only a process that ends in
//! order, and only for the next process; a crash leaves none.

use crate::controller::block_set::BlockSet;
use crate::controller::transfer::heat::BLOCK_SECTORS;
use crate::units::{Bytes, Extent, MigrationId, SECTOR_SIZE, Sectors};

/// The blocks of 4 KiB written since a disk changed hands.
#[derive(Debug)]
pub struct Written {
    since: MigrationId,
    blocks: BlockSet,
}

impl Written {
    /// Creates an empty map for a disk that this migration brought.
    pub(in crate::controller) fn nothing(since: MigrationId, capacity: Sectors) -> Self {
        Self {
            since,
            blocks: BlockSet::new(capacity, BLOCK_SECTORS),
        }
    }

    /// Restores the stored [`Self::words`]. Returns `None` if their number does not match the capacity.
    pub fn from_words(since: MigrationId, capacity: Sectors, words: &[u64]) -> Option<Self> {
        (words.len() == Self::word_length(capacity)).then(|| Self {
            since,
            blocks: BlockSet::from_words(capacity, BLOCK_SECTORS, words),
        })
    }

    /// Returns the number of [`Self::words`] for a disk of this capacity.
    pub const fn word_length(capacity: Sectors) -> usize {
        capacity.0.div_ceil(BLOCK_SECTORS as u64).div_ceil(64) as usize
    }

    /// Returns the migration that brought the disk.
    pub const fn since(&self) -> MigrationId {
        self.since
    }

    /// Returns a bit for each written block of 4 KiB; the first block is the lowest bit of the first word.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        self.blocks.words()
    }

    /// Returns the bytes of the written blocks.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.blocks.sectors() * SECTOR_SIZE)
    }

    pub(in crate::controller) const fn blocks(&self) -> &BlockSet {
        &self.blocks
    }

    pub(in crate::controller) const fn blocks_mut(&mut self) -> &mut BlockSet {
        &mut self.blocks
    }

    /// Marks an extent that is about to be written.
    #[inline]
    pub(in crate::controller) fn mark(&mut self, extent: Extent) {
        self.blocks.set(extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Lba;

    const CAPACITY: Sectors = Sectors(8 * 70 + 3);
    const SINCE: MigrationId = MigrationId([7; 16]);

    #[test]
    fn every_block_that_a_write_touches_is_remembered_and_what_is_stored_is_found_again() {
        let mut written = Written::nothing(SINCE, CAPACITY);
        assert_eq!(written.bytes(), Bytes(0));
        written.mark(Extent::new(Lba(7), 2).expect("an extent"));
        written.mark(Extent::new(Lba(8 * 70), 1).expect("an extent"));
        let stored: Vec<u64> = written.words().collect();
        assert_eq!(stored, [0b11, 1 << 6]);
        let again = Written::from_words(SINCE, CAPACITY, &stored).expect("it fits");
        assert!(again.since() == SINCE && again.words().eq(stored));
        assert_eq!(again.bytes(), Bytes(3 * 4096));
    }

    #[test]
    fn what_is_of_another_size_is_refused() {
        assert_eq!(Written::word_length(CAPACITY), 2);
        assert!(Written::from_words(SINCE, CAPACITY, &[0]).is_none());
        assert!(Written::from_words(SINCE, CAPACITY, &[0; 3]).is_none());
    }
}
