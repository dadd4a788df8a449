//! The first page of a file of a pool, mapped: nodes that map it see each other's words at once, and files of hugetlbfs
//! cannot be written in another way.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags};

use crate::pool::PAGE_BYTES;

/// Words of a page that are used, however large it is.
pub(super) const WORDS: usize = PAGE_BYTES as usize / 8;

/// A page, mapped.
#[derive(Debug)]
pub(super) struct Page {
    at: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: the page is shared with other processes anyway; it is only used through atomics.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Maps the first page of a file whose pages have `bytes` bytes.
    ///
    /// # Errors
    /// The file is shorter, or the kernel refuses.
    pub(super) fn map(file: &File, bytes: u64) -> io::Result<Self> {
        if file.metadata()?.len() < bytes.max(PAGE_BYTES) {
            return Err(io::Error::other("it is shorter than a page"));
        }
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        // SAFETY: a new mapping that nothing else in this process refers to. Somebody may make the file shorter
        // afterwards; whoever may write to the pool's folder is trusted not to.
        let page = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )?
        };
        let at = NonNull::new(page.cast()).ok_or_else(|| io::Error::other("it has no address"))?;
        Ok(Self { at, bytes })
    }

    /// One of its words.
    pub(super) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS, "inside the page");
        // SAFETY: the mapping has at least so many aligned words and lives as long as `self`.
        unsafe { self.at.add(index).as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping is `self`'s alone, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
