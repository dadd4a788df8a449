//! Guest memory that arrives while a server uses it, and the front end that delivers the pages.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::ioctl::{Opcode, Setter};
use rustix::mm::UserfaultfdFlags;

use super::SharedMemory;

const PAGE: u64 = 4096;
/// Layout of the kernel's page fault message: the size, the kind, and the offset of the address.
const MESSAGE: usize = 32;
const FAULT: u8 = 0x12;
const ADDRESS: usize = 16;
/// `_IOR(0xaa, 2, struct uffdio_range)`
const WAKE: Opcode = 0x8010_aa02;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`
const AGREE: Opcode = 0xc018_aa3f;
/// `_IOWR(0xaa, 0, struct uffdio_register)`
const REGISTER: Opcode = 0xc020_aa00;

#[repr(C)]
struct Agreement {
    api: u64,
    features: u64,
    operations: u64,
}

#[repr(C)]
struct Registration {
    start: u64,
    length: u64,
    mode: u64,
    operations: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    length: u64,
}

/// Returns true if a process like this one can wait for pages at all.
pub fn may_wait_for_pages() -> bool {
    // SAFETY: the descriptor is closed unused.
    unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) }.is_ok()
}

/// Lets this process wait for missing pages of the memory, as QEMU does while they arrive, until the returned
/// descriptor is dropped.
pub fn wait_for_pages(memory: &SharedMemory) -> io::Result<OwnedFd> {
    let agreement = Agreement {
        api: 0xaa,
        features: 0,
        operations: 0,
    };
    let registration = Registration {
        start: memory.at(0, 0) as u64,
        length: memory.length() as u64,
        mode: 1,
        operations: 0,
    };
    // SAFETY: the operations take these structures, and change no memory.
    unsafe {
        let fd = rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC)?;
        rustix::ioctl::ioctl(&fd, Setter::<AGREE, Agreement>::new(agreement))?;
        rustix::ioctl::ioctl(&fd, Setter::<REGISTER, Registration>::new(registration))?;
        Ok(fd)
    }
}

/// The server's page faults in memory of which pages are missing.
#[derive(Debug)]
pub struct Faults {
    file: File,
    memory: Arc<SharedMemory>,
    /// Address of the memory in the server.
    base: u64,
}

impl Faults {
    /// Creates the faults that the server reports to the file.
    pub(super) const fn new(file: File, memory: Arc<SharedMemory>) -> Self {
        let base = 0;
        Self { file, memory, base }
    }

    /// Sets the address at which the server has mapped the memory.
    pub(super) const fn set_base(&mut self, base: u64) {
        self.base = base;
    }

    /// Returns a second handle of the same faults.
    pub fn share(&self) -> io::Result<Self> {
        Ok(Self {
            file: self.file.try_clone()?,
            memory: Arc::clone(&self.memory),
            base: self.base,
        })
    }

    /// Returns the page awaited by the server, as an offset in the memory; `None` on timeout.
    pub fn next(&self, patience: Duration) -> io::Result<Option<u64>> {
        let mut polled = [PollFd::new(&self.file, PollFlags::IN)];
        let timeout = Timespec::try_from(patience).map_err(io::Error::other)?;
        if rustix::event::poll(&mut polled, Some(&timeout))? == 0 {
            return Ok(None);
        }
        let mut message = [0; MESSAGE];
        if (&self.file).read(&mut message)? != MESSAGE || message[0] != FAULT {
            return Err(io::Error::other("not a page fault"));
        }
        let mut address = [0; 8];
        address.copy_from_slice(&message[ADDRESS..ADDRESS + 8]);
        Ok(Some(u64::from_le_bytes(address) - self.base))
    }

    /// Delivers the page at an offset, filled with a byte.
    pub fn deliver(&self, page: u64, filling: u8) -> io::Result<()> {
        self.memory.write(page, &[filling; PAGE as usize]);
        let range = Range {
            start: self.base + page,
            length: PAGE,
        };
        // SAFETY: the operation reads the range, and lets others go on.
        unsafe {
            let wake = Setter::<WAKE, Range>::new(range);
            Ok(rustix::ioctl::ioctl(&self.file, wake)?)
        }
    }
}
