//! Long ranges, cut to the limit of a controller request.

use core::iter::FusedIterator;

use godwit_core::request::RequestError;
use godwit_core::units::{Extent, Lba, MAX_EXTENT_SECTORS, SECTOR_SIZE, Sectors};

/// A non-empty run of sectors of any length, as an iterator over its extents: in order, without gaps, each at most 32
/// MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    next: u64,
    end: u64,
}

impl Extents {
    /// Returns the extents that cover `length` bytes from `offset` on a disk of `capacity` sectors.
    ///
    /// # Errors
    /// [`RequestError::Misaligned`] if either is not a multiple of 512 or the length is zero;
    /// [`RequestError::OutOfRange`] if the range ends past the disk or no [`Extent`] can name it.
    pub const fn new(offset: u64, length: u64, capacity: Sectors) -> Result<Self, RequestError> {
        if length == 0 || !offset.is_multiple_of(SECTOR_SIZE) || !length.is_multiple_of(SECTOR_SIZE)
        {
            return Err(RequestError::Misaligned);
        }
        // Both are below 2^55, so the sum cannot overflow.
        let next = offset / SECTOR_SIZE;
        let end = next + length / SECTOR_SIZE;
        if end > capacity.0 || end > (1 << 54) {
            return Err(RequestError::OutOfRange);
        }
        Ok(Self { next, end })
    }

    /// Returns the number of sectors still to come.
    pub const fn sectors(&self) -> Sectors {
        Sectors(self.end - self.next)
    }
}

impl Iterator for Extents {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let sectors = (self.end - self.next).min(u64::from(MAX_EXTENT_SECTORS)) as u32;
        let extent = Extent::new(Lba(self.next), sectors)?;
        self.next += u64::from(sectors);
        Some(extent)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.end - self.next).div_ceil(u64::from(MAX_EXTENT_SECTORS)) as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Extents {}
impl FusedIterator for Extents {}
