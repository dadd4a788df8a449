//! The ways in which an image makes a range read as zeroes.

use std::ops::Range;

#[cfg(test)]
use godwit_core::units::Sectors;
use godwit_io::zeroes::BLOCK;
use rustix::fs::{FallocateFlags, SeekFrom};

use crate::engine::disk::ZeroWay;
use crate::engine::disk::untouched::Untouched;
use crate::image::{Image, ImageKind};

/// The image's known abilities.
#[derive(Debug)]
pub(super) struct Zeroing {
    can_punch: bool,
    can_zero_range: bool,
    /// True if the file system punches holes; `None` before the first try.
    punches: Option<bool>,
    /// Blocks that read as zeroes, if the file system does not report holes.
    untouched: Option<Untouched>,
}

impl Zeroing {
    pub(super) fn of(image: &Image) -> Self {
        Self {
            can_punch: true,
            can_zero_range: true,
            punches: None,
            untouched: Untouched::of(image),
        }
    }

    /// Returns the state of an image that can neither punch holes nor zero ranges, and of which no block was written.
    #[cfg(test)]
    pub(super) fn by_writing(capacity: Sectors) -> Self {
        Self {
            can_punch: false,
            can_zero_range: false,
            punches: None,
            untouched: Some(Untouched::new(capacity)),
        }
    }

    /// Returns true if any range is made to read as zeroes without writing them. A block device has to be tried first.
    pub(super) fn is_fast(&mut self, image: &Image) -> bool {
        let tried = self.punches.get_or_insert_with(|| {
            // Behind the end there is no data to lose, and the file keeps its size.
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            image.kind == ImageKind::File
                && rustix::fs::seek(&image.file, SeekFrom::End(0))
                    .and_then(|end| {
                        let behind = end.next_multiple_of(BLOCK as u64);
                        rustix::fs::fallocate(&image.file, mode, behind, BLOCK as u64)
                    })
                    .is_ok()
        });
        *tried && self.can_punch
    }

    /// Records that the image does not support this way.
    pub(super) const fn refused(&mut self, way: ZeroWay) {
        if matches!(way, ZeroWay::Punch) {
            self.can_punch = false;
        } else {
            self.can_zero_range = false;
        }
    }

    /// Returns the best supported way for these bytes, beginning with `way`.
    pub(super) fn best(&self, first: ZeroWay, way: ZeroWay, bytes: Range<u64>) -> ZeroWay {
        match (first, way) {
            (ZeroWay::Punch, _) if self.is_untouched(bytes) => ZeroWay::Nothing,
            (ZeroWay::Punch, _) if self.can_punch => ZeroWay::Punch,
            (_, ZeroWay::Write) => ZeroWay::Write,
            _ if self.can_zero_range => ZeroWay::Range,
            _ if self.can_punch => ZeroWay::Punch,
            _ => ZeroWay::Write,
        }
    }

    /// Returns true if none of these bytes was ever written and the file system does not report holes.
    pub(super) fn is_untouched(&self, bytes: Range<u64>) -> bool {
        let untouched = self.untouched.as_ref();
        untouched.is_some_and(|map| map.is_untouched(bytes))
    }

    /// Records that these bytes are about to be written.
    pub(super) fn touch(&mut self, bytes: Range<u64>) {
        if let Some(untouched) = &mut self.untouched {
            untouched.touch(bytes);
        }
    }
}
