//! The unwritten blocks of a new image on a file system without holes: they read as zeroes, and writing zeroes would
//! only take space.

use std::ops::Range;
use std::os::fd::AsFd;

use godwit_core::units::Sectors;
use godwit_io::zeroes::BLOCK;

use crate::image::extents::hole_end;
use crate::image::{Image, ImageKind};

/// Words of a part: 128 MiB of the image.
const WORDS: usize = 512;
/// Blocks of a part.
const PART: u64 = WORDS as u64 * 64;

/// The written blocks of 4 KiB. A part without written blocks takes no memory.
#[derive(Debug)]
pub(super) struct Untouched {
    parts: Vec<Option<Box<[u64; WORDS]>>>,
}

impl Untouched {
    /// Returns the map of an image that is new, has no storage yet, and whose file system does not report holes.
    pub(super) fn of(image: &Image) -> Option<Self> {
        let size = image.capacity.bytes().0;
        // The creator of the image may have written to it.
        let is_empty = || rustix::fs::fstat(&image.file).is_ok_and(|found| found.st_blocks == 0);
        let tells_holes = || hole_end(image.file.as_fd(), 0, size) == size;
        let is_new = image.made_new && image.kind == ImageKind::File;
        let wanted = is_new && is_empty() && !tells_holes();
        wanted.then(|| Self::new(image.capacity))
    }

    pub(super) fn new(capacity: Sectors) -> Self {
        let blocks = capacity.bytes().0.div_ceil(BLOCK as u64);
        let parts = usize::try_from(blocks.div_ceil(PART)).unwrap_or(usize::MAX);
        Self {
            parts: (0..parts).map(|_| None).collect(),
        }
    }

    /// Records that these bytes are about to be written.
    pub(super) fn touch(&mut self, bytes: Range<u64>) {
        for block in blocks(bytes) {
            let (part, word, bit) = place(block);
            if let Some(part) = self.parts.get_mut(part) {
                part.get_or_insert_with(|| Box::new([0; WORDS]))[word] |= bit;
            }
        }
    }

    /// Returns true if none of these bytes was ever written.
    pub(super) fn is_untouched(&self, bytes: Range<u64>) -> bool {
        blocks(bytes).all(|block| {
            let (part, word, bit) = place(block);
            let part = self.parts.get(part).map(Option::as_deref);
            part.is_some_and(|part| part.is_none_or(|words| words[word] & bit == 0))
        })
    }
}

fn blocks(bytes: Range<u64>) -> Range<u64> {
    bytes.start / BLOCK as u64..bytes.end.div_ceil(BLOCK as u64)
}

const fn place(block: u64) -> (usize, usize, u64) {
    let within = block % PART;
    (
        (block / PART) as usize,
        (within / 64) as usize,
        1 << (within % 64),
    )
}

#[cfg(test)]
mod tests {
    use godwit_core::units::Bytes;

    use super::*;

    #[test]
    fn only_what_was_touched_is_known_as_such() {
        const MIB: u64 = 1 << 20;
        let capacity = Sectors((300 * MIB + 512) / 512);
        let mut untouched = Untouched::new(capacity);
        assert!(untouched.is_untouched(0..300 * MIB + 512));
        untouched.touch(128 * MIB - 512..128 * MIB + 1);
        assert!(untouched.is_untouched(0..128 * MIB - 4096));
        assert!(!untouched.is_untouched(128 * MIB - 4096..128 * MIB));
        assert!(!untouched.is_untouched(128 * MIB + 4095..129 * MIB));
        assert!(untouched.is_untouched(128 * MIB + 4096..300 * MIB + 512));
        untouched.touch(300 * MIB..300 * MIB + 512);
        assert!(!untouched.is_untouched(300 * MIB + 511..300 * MIB + 512));
        assert!(
            !untouched.is_untouched(400 * MIB..500 * MIB),
            "behind the end"
        );
    }

    #[test]
    fn where_holes_are_told_nothing_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk");
        let image = Image::create(&path, Bytes(1 << 20)).expect("an image");
        assert!(image.made_new && Untouched::of(&image).is_none());
        // Nor after a write, which leaves no hole as long as the image.
        std::fs::write(&path, [7; 4096]).expect("written");
        assert!(Untouched::of(&image).is_none());
        drop(image);
        assert!(!Image::open(&path).expect("the image").made_new);
    }
}
