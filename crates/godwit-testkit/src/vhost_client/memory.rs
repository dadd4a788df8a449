//! Memory shared with a vhost-user server, as a guest's is.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A memory file, mapped. Offsets into the file are in bytes.
#[derive(Debug)]
pub struct SharedMemory {
    file: File,
    base: *mut u8,
    length: usize,
}

// SAFETY: the mapping belongs to no thread. Concurrent access to the same bytes is the responsibility of the device's
// driver, as in a guest.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates memory of `length` bytes, a multiple of the page size, all zeroes and sealed against shrinking.
    pub fn new(length: usize) -> io::Result<Self> {
        let memory = Self::make(length, MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::fcntl_add_seals(&memory.file, SealFlags::SHRINK)?;
        Ok(memory)
    }

    /// Creates memory in an unsealable file.
    pub fn unsealed(length: usize) -> io::Result<Self> {
        Self::make(length, MemfdFlags::empty())
    }

    fn make(length: usize, flags: MemfdFlags) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC | flags)?;
        let file = File::from(file);
        file.set_len(length as u64)?;
        Self::map(file, length)
    }

    /// Maps the first `length` bytes of an existing file.
    pub fn map(file: File, length: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        Ok(Self {
            file,
            base: base.cast(),
            length,
        })
    }

    pub const fn length(&self) -> usize {
        self.length
    }

    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Returns the file's descriptor.
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the address of the byte at `offset`, with `length` bytes after it.
    pub fn at(&self, offset: u64, length: usize) -> *mut u8 {
        let offset = usize::try_from(offset).expect("an offset");
        assert!(
            offset <= self.length && length <= self.length - offset,
            "outside of the shared memory"
        );
        // SAFETY: the assertion keeps the address within the mapping.
        unsafe { self.base.add(offset) }
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `at` checked the range; `into` is private, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: `at` checked the range; `bytes` is private, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Loads a number that the other side may change at any time.
    pub fn load(&self, offset: u64) -> u16 {
        self.number(offset).load(Ordering::Acquire)
    }

    /// Stores a number that the other side may read at any time.
    pub fn store(&self, offset: u64, number: u16) {
        self.number(offset).store(number, Ordering::Release);
    }

    fn number(&self, offset: u64) -> &AtomicU16 {
        assert!(offset.is_multiple_of(2), "a number lies at an even offset");
        // SAFETY: `at` checked the range, the mapping is aligned to a page and lives as long as `self`.
        unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length and is not used after this. A failure leaves the memory mapped,
        // which harms nothing.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.length) };
    }
}
