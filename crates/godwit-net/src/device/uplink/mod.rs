//! The host's side of a NIC.

pub mod tap;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The host's side of a NIC: each read and write is one packet with virtio's header of 12 bytes. All queues lead to the
/// same network.
#[derive(Debug)]
pub struct Uplink {
    queues: Vec<OwnedFd>,
    /// True if the kernel can be told which unfinished packets the guest takes.
    is_tap: bool,
}

impl Uplink {
    /// Most pieces of a packet that one write takes.
    pub(super) const MOST_PLACES: usize = libc::UIO_MAXIOV as usize;

    /// Creates an uplink from descriptors that keep packet boundaries, such as a datagram socket for each queue. The
    /// descriptors must not block.
    pub fn from_packets(queues: impl IntoIterator<Item = OwnedFd>) -> Self {
        Self {
            queues: queues.into_iter().collect(),
            is_tap: false,
        }
    }

    /// Returns the number of queues.
    pub const fn count(&self) -> usize {
        self.queues.len()
    }

    /// Returns the descriptor that becomes readable when a queue has packets.
    pub(super) fn queue(&self, queue: usize) -> BorrowedFd<'_> {
        self.queues[queue].as_fd()
    }

    /// Reads a packet from a queue; returns `None` if the queue is empty.
    pub(super) fn read(&self, queue: usize, packet: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::read(&self.queues[queue], packet) {
            Ok(length) => Ok(Some(length)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a packet to a queue.
    pub(super) fn write(&self, queue: usize, packet: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.queues[queue], packet)?;
        Ok(())
    }

    /// Writes a packet from at most [`Self::MOST_PLACES`] pieces to a queue.
    ///
    /// # Safety
    /// The places are mapped memory, which stays mapped during the call; others may change its content.
    pub(super) unsafe fn write_from(&self, queue: usize, places: &[libc::iovec]) -> io::Result<()> {
        let count = places.len() as libc::c_int;
        let queue = self.queues[queue].as_raw_fd();
        // SAFETY: the caller vouches for the places; the descriptor is open.
        match unsafe { libc::writev(queue, places.as_ptr(), count) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sets the offloads of all queues: the kinds of unfinished packets that the guest takes, as bits of
    /// [`tap::offloads`].
    pub(super) fn set_offloads(&self, offloads: libc::c_uint) -> io::Result<()> {
        match self.queues.first() {
            Some(queue) if self.is_tap => tap::set_offloads(queue, offloads),
            _ => Ok(()),
        }
    }
}
