//! Where a NIC's packets go to and come from.

pub mod tap;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Packets of a NIC on the host's side: each read and write is one packet with virtio's header of 12 bytes. Several queues
/// are several ways to the same network.
#[derive(Debug)]
pub struct Uplink {
    queues: Vec<OwnedFd>,
    /// It can be told which packets the guest takes unfinished.
    is_tap: bool,
}

impl Uplink {
    /// Most places from which a packet can be written at once.
    pub(super) const MOST_PLACES: usize = libc::UIO_MAXIOV as usize;

    /// Anything that keeps packets apart, such as a datagram socket for each queue; they must not block.
    pub fn from_packets(queues: impl IntoIterator<Item = OwnedFd>) -> Self {
        Self {
            queues: queues.into_iter().collect(),
            is_tap: false,
        }
    }

    /// How many queues it has.
    pub const fn count(&self) -> usize {
        self.queues.len()
    }

    /// What to wait for packets of a queue with.
    pub(super) fn queue(&self, queue: usize) -> BorrowedFd<'_> {
        self.queues[queue].as_fd()
    }

    /// Reads a packet from a queue; nothing when none has come.
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

    /// Writes a packet that lies in these places, of which there are at most [`Self::MOST_PLACES`], to a queue.
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

    /// Says which packets the guest takes unfinished: bits of [`tap::offloads`]. They are the same for all queues.
    pub(super) fn set_offloads(&self, offloads: libc::c_uint) -> io::Result<()> {
        match self.queues.first() {
            Some(queue) if self.is_tap => tap::set_offloads(queue, offloads),
            _ => Ok(()),
        }
    }
}
