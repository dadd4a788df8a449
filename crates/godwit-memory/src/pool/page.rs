//! Mapped pages at the start of a pool's file or device. Nodes that map the same pages see each other's words at once.
//! Files of hugetlbfs and DAX devices can be written through mappings only.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::MsyncFlags;

use crate::mapping::SharedMapping;
use crate::pool::PAGE_BYTES;

/// Error text for a page whose content is lost.
pub(super) const LOST: &str = "its file was made shorter, or its file system is full";

/// Mapped pages.
#[derive(Debug)]
pub(super) struct Page(SharedMapping);

/// Consecutive words of a page.
#[derive(Clone, Debug)]
pub(super) struct Words {
    page: Arc<Page>,
    first: usize,
}

impl Words {
    /// Returns the words from the index `first` on.
    pub(super) const fn from(page: Arc<Page>, first: usize) -> Self {
        Self { page, first }
    }

    pub(super) fn at(&self, index: usize) -> &AtomicU64 {
        self.page.word(self.first + index)
    }

    /// Returns true if earlier reads of the words may be invalid, and earlier writes are lost.
    pub(super) fn are_lost(&self) -> bool {
        self.page.is_lost()
    }

    /// Makes all writes so far visible to other hosts and durable across a crash of this host, before any later write.
    pub(super) fn persist(&self, words: Range<usize>) {
        self.page
            .persist(self.first + words.start..self.first + words.end);
    }
}

impl Page {
    /// Maps the first page of a file with pages of `bytes` bytes.
    ///
    /// # Errors
    /// If the file is shorter, or the kernel refuses.
    pub(super) fn map(file: &File, bytes: u64) -> io::Result<Self> {
        if file.metadata()?.len() < bytes.max(PAGE_BYTES) {
            return Err(io::Error::other("it is shorter than a page"));
        }
        Self::map_part(file, 0, bytes)
    }

    /// Maps a part of a file or device. The caller has checked the length.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(super) fn map_part(file: &File, offset: u64, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        SharedMapping::map(file, offset, bytes).map(Self)
    }

    /// Returns true if the file no longer backs all pages.
    pub(super) fn is_lost(&self) -> bool {
        self.0.has_lost_pages()
    }

    pub(super) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.0.bytes() / 8, "inside the page");
        // SAFETY: the mapping has at least so many aligned words and lives as long as `self`. Others use them as well,
        // and this process only through atomics.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().cast::<u64>().add(index)) }
    }

    /// Overwrites the pages with zeroes, and makes the zeroes visible to other hosts.
    ///
    /// # Errors
    /// If pages are lost.
    pub(super) fn wipe(&self) -> io::Result<()> {
        // SAFETY: the mapping is `self`'s, and all words of the mapping are only used through atomics. Other processes
        // that map the same memory do not use it: the caller guarantees this.
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
        // For a device, the kernel has no storage to write back to; only the processor's caches need a flush.
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

    /// Does nothing: on other architectures, shared memory is coherent between hosts.
    #[cfg(not(target_arch = "x86_64"))]
    fn flush(&self, _: Range<usize>) {}
}
