//! Event counters, with which other threads and the guest wake a NIC's thread, and the thread wakes the guest.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// An event counter that never blocks.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    /// Creates a counter.
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Takes over another process's counter, and makes the counter non-blocking.
    pub(super) fn adopt(counter: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&counter)?;
        if !flags.contains(OFlags::NONBLOCK) {
            fcntl_setfl(&counter, flags | OFlags::NONBLOCK)?;
        }
        Ok(Self(counter))
    }

    /// Wakes the other side. A full counter wakes the other side all the same.
    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Discards all signals so far.
    pub(super) fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
