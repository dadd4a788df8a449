//! The long holes of the image.

use godwit_core::action::LONG_HOLE_SECTORS;
use godwit_core::units::{Lba, SECTOR_SIZE};

use crate::engine::disk::Disk;
use crate::image::extents::extent_at;

/// Parts of a file that one search inspects.
const LOOKS: u32 = 32;

impl Disk {
    /// Returns the first long hole at or behind a place. Returns an empty one at the end of the search, or at the
    /// disk's end.
    pub(in crate::engine) fn long_hole(&self, from: Lba) -> (Lba, Lba) {
        let end = self.capacity().bytes().0;
        let sector = |at: u64| Lba(at / SECTOR_SIZE);
        let mut at = from.byte_offset();
        for _ in 0..LOOKS {
            if at >= end {
                break;
            }
            let found = extent_at(self.file(), at, end);
            if found.hole && found.end - at >= u64::from(LONG_HOLE_SECTORS) * SECTOR_SIZE {
                return (sector(at), sector(found.end));
            }
            at = found.end;
        }
        (sector(at), sector(at))
    }
}
