//! The node's own log: the pages of a guest's memory that devices of this process write, for the checkpoints of a
//! protected machine.
//!
//! The kernel tells which pages the front end's process has written, and not those that this process writes. The front
//! end's own log ([`DirtyLog`](super::dirty_log::DirtyLog)) is on only while the guest's memory migrates.

use std::sync::atomic::{AtomicU64, Ordering};

use godwit_memory::dirty::pages::{PAGE_BYTES, Pages};

use crate::memory::GuestRam;
use crate::memory::relocated::{FileId, Part};

/// Pages in a word of the bitmap.
const PAGES: u64 = u64::BITS as u64;

/// A bit for each page of the file that holds a guest's memory. All devices of a machine share one log.
#[derive(Debug)]
pub struct WrittenPages {
    file: FileId,
    /// Number of pages that have a bit.
    pages: u64,
    words: Box<[AtomicU64]>,
    unlogged: AtomicU64,
}

impl WrittenPages {
    /// Creates an empty log for the first `bytes` bytes of a file.
    pub fn new(file: FileId, bytes: u64) -> Self {
        let pages = bytes.div_ceil(PAGE_BYTES);
        let words = 0..pages.div_ceil(PAGES);
        Self {
            file,
            pages,
            words: words.map(|_| AtomicU64::new(0)).collect(),
            unlogged: AtomicU64::new(0),
        }
    }

    /// Takes the pages that were written since the last call, by their numbers in the file. A page that is being written
    /// is among them, or among those of the next call, or both.
    pub fn take(&self) -> Pages {
        let mut pages = Pages::default();
        for (place, word) in self.words.iter().enumerate() {
            // Most words are empty, and a read leaves them in the caches of the devices' processors.
            if word.load(Ordering::Relaxed) != 0 {
                pages.push_bits(place as u64 * PAGES, word.swap(0, Ordering::AcqRel));
            }
        }
        pages
    }

    /// Returns the number of writes with a part outside of the file's first bytes, which this log does not have: the
    /// machine has memory in another file.
    pub fn unlogged(&self) -> u64 {
        self.unlogged.load(Ordering::Relaxed)
    }

    /// Marks the pages of `length` bytes from a guest-physical address. Must be called after the write.
    pub(super) fn mark(&self, ram: &GuestRam, address: u64, length: u64) {
        let mut rest = length;
        for region in ram.regions() {
            if let Some(part) = region.part_in(self.file, address, length)
                && self.mark_part(part)
            {
                rest = rest.saturating_sub(part.bytes);
            }
        }
        if rest > 0 {
            self.unlogged.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Marks the pages of a part of the file. Returns false for a part that ends past the log.
    fn mark_part(&self, part: Part) -> bool {
        let last = (part.offset + part.bytes - 1) / PAGE_BYTES;
        if last >= self.pages {
            return false;
        }
        let mut page = part.offset / PAGE_BYTES;
        while page <= last {
            let word = page / PAGES;
            let end = last.min(word * PAGES + PAGES - 1);
            let mask = (u64::MAX << (page % PAGES)) & (u64::MAX >> (PAGES - 1 - end % PAGES));
            // A bit that is set already is set again: only then does a taker of the bit see the write before.
            self.words[word as usize].fetch_or(mask, Ordering::AcqRel);
            page = end + 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vhost::vhost_user::message::VhostUserMemoryRegion;

    use super::*;
    use crate::memory::dirty_log::{DirtyLog, WriteLog};

    const PAGE: u64 = PAGE_BYTES;

    fn file(pages: u64) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(pages * PAGE).expect("a size");
        file
    }

    /// Returns guest memory of regions, each with the number of its first page in the guest and in its file, and its
    /// number of pages.
    fn ram(regions: &[(u64, u64, u64, &File)]) -> GuestRam {
        let described = regions.iter().map(|(guest, first, pages, _)| {
            let user = (1 << 40) + guest * PAGE;
            VhostUserMemoryRegion::new(guest * PAGE, pages * PAGE, user, first * PAGE)
        });
        let files = regions
            .iter()
            .map(|(.., file)| file.try_clone().expect("another"));
        let described: Vec<_> = described.collect();
        GuestRam::new(&described, files.collect(), std::sync::Arc::default()).expect("is mapped")
    }

    fn log(file: &File, pages: u64) -> WrittenPages {
        WrittenPages::new(FileId::of(file).expect("a file"), pages * PAGE)
    }

    fn taken(log: &WrittenPages) -> Vec<(u64, u64)> {
        let pages = log.take();
        let runs = pages.runs().iter();
        runs.map(|run| (run.first, run.pages)).collect()
    }

    #[test]
    fn pages_are_those_of_the_file_whatever_their_address() {
        let memory = file(400);
        // As a machine has its memory: in two parts of one file, with a gap between their addresses.
        let ram = ram(&[(0, 0, 100, &memory), (1000, 100, 300, &memory)]);
        let log = log(&memory, 400);
        log.mark(&ram, 0, 1);
        log.mark(&ram, 3 * PAGE - 1, 2);
        log.mark(&ram, 1000 * PAGE, 200 * PAGE);
        log.mark(&ram, 1299 * PAGE, PAGE);
        assert_eq!(taken(&log), [(0, 1), (2, 2), (100, 200), (399, 1)]);
        assert_eq!(taken(&log), [], "each is taken once");
        assert_eq!(log.unlogged(), 0);
    }

    #[test]
    fn a_write_across_two_regions_is_logged_in_both() {
        let memory = file(8);
        let ram = ram(&[(10, 6, 2, &memory), (12, 0, 3, &memory)]);
        let log = log(&memory, 8);
        log.mark(&ram, 11 * PAGE + 7, 2 * PAGE);
        assert_eq!(taken(&log), [(0, 2), (7, 1)]);
        assert_eq!(log.unlogged(), 0);
    }

    #[test]
    fn writes_that_the_log_cannot_have_are_counted() {
        let [memory, other] = [file(8), file(8)];
        let ram = ram(&[(0, 0, 8, &memory), (8, 0, 8, &other)]);
        let log = log(&memory, 7);
        log.mark(&ram, 9 * PAGE, 1);
        log.mark(&ram, 7 * PAGE, 1);
        log.mark(&ram, 100 * PAGE, 1);
        assert_eq!((taken(&log), log.unlogged()), (vec![], 3));
    }

    #[test]
    fn both_logs_get_a_write_each_in_its_own_numbers() {
        let memory = file(64);
        let ram = ram(&[(32, 8, 16, &memory)]);
        let own = log(&memory, 64);
        let bits = file(1);
        let shared = DirtyLog::new(bits.try_clone().expect("another"), 0, PAGE).expect("a log");
        let log = WriteLog::new(&ram, Some(&shared), Some(&own));
        log.mark(33 * PAGE, 1).expect("within");
        let mut seen = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&bits, &mut seen, 0).expect("reads");
        assert_eq!(u64::from_le_bytes(seen), 1 << 33);
        assert_eq!(taken(&own), [(9, 1)]);
    }
}
