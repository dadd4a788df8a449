//! The first pages of a file of a pool, or of a device, mapped: nodes that map them see each other's words at once, and
//! files of hugetlbfs and DAX devices cannot be written in another way.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::MsyncFlags;

use crate::mapping::SharedMapping;
use crate::pool::PAGE_BYTES;

/// Why nothing that was read in a page counts.
pub(super) const LOST: &str = "its file was made shorter, or its file system is full";

/// A page, mapped, or several.
#[derive(Debug)]
pub(super) struct Page(SharedMapping);

/// Some words of it, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Words {
    page: Arc<Page>,
    first: usize,
}

impl Words {
    /// Those from this one on.
    pub(super) const fn from(page: Arc<Page>, first: usize) -> Self {
        Self { page, first }
    }

    /// One of them.
    pub(super) fn at(&self, index: usize) -> &AtomicU64 {
        self.page.word(self.first + index)
    }

    /// True if what was read in them before need not be what others wrote there, and what was written is lost.
    pub(super) fn are_lost(&self) -> bool {
        self.page.is_lost()
    }

    /// Sees to it that what was written to these words by now is where other hosts, and this one after it failed, find it:
    /// before anything that is written afterwards.
    pub(super) fn persist(&self, words: Range<usize>) {
        self.page
            .persist(self.first + words.start..self.first + words.end);
    }
}

impl Page {
    /// Maps the first page of a file whose pages have `bytes` bytes.
    ///
    /// # Errors
    /// The file is shorter, or the kernel refuses.
    pub(super) fn map(file: &File, bytes: u64) -> io::Result<Self> {
        if file.metadata()?.len() < bytes.max(PAGE_BYTES) {
            return Err(io::Error::other("it is shorter than a page"));
        }
        Self::map_part(file, 0, bytes)
    }

    /// Maps a part of a file or device, of which the caller knows that it is so long.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn map_part(file: &File, offset: u64, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        SharedMapping::map(file, offset, bytes).map(Self)
    }

    /// True if the file does not back all of it any more.
    pub(super) fn is_lost(&self) -> bool {
        self.0.has_lost_pages()
    }

    /// One of its words.
    pub(super) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.0.bytes() / 8, "inside the page");
        // SAFETY: the mapping has at least so many aligned words and lives as long as `self`. Others use them as well, and
        // this process only through atomics.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().cast::<u64>().add(index)) }
    }

    /// Overwrites all of it with zeroes, and sees to it that others find them.
    ///
    /// # Errors
    /// Pages of it are lost.
    pub(super) fn wipe(&self) -> io::Result<()> {
        // SAFETY: the mapping is `self`'s, and whoever has words of it only uses atomics. Others that map the same memory
        // do not use it: the caller knows.
        unsafe { std::ptr::write_bytes(self.0.as_ptr(), 0, self.0.bytes()) };
        self.persist(0..self.0.bytes() / 8);
        match self.is_lost() {
            true => Err(io::Error::other(LOST)),
            false => Ok(()),
        }
    }

    fn persist(&self, words: Range<usize>) {
        let page = PAGE_BYTES as usize;
        let (start, end) = (words.start * 8 / page * page, words.end * 8);
        let end = end.next_multiple_of(page).min(self.0.bytes());
        // SAFETY: the range lies in the mapping and begins with a page.
        let synced = unsafe {
            let at = self.0.as_ptr().add(start);
            rustix::mm::msync(at.cast(), end.saturating_sub(start), MsyncFlags::SYNC)
        };
        // A device has nothing behind it that the kernel would write to: what is missing is to leave the processor's caches.
        if synced.is_err() {
            self.flush(words);
        }
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    #[cfg(target_arch = "x86_64")]
    fn flush(&self, words: Range<usize>) {
        for index in words.step_by(8) {
            let line = std::ptr::from_ref(self.word(index)).cast();
            // SAFETY: every processor of this kind has the instruction, and the line is mapped.
            unsafe { std::arch::x86_64::_mm_clflush(line) };
        }
    }

    /// Memory that hosts of other kinds share is coherent between them.
    #[cfg(not(target_arch = "x86_64"))]
    fn flush(&self, _: Range<usize>) {}
}
