//! Where a NIC's packets go to and come from.

pub mod tap;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Packets of a NIC on the host's side: each read and write is one packet with virtio's header of 12 bytes.
#[derive(Debug)]
pub struct Uplink {
    fd: OwnedFd,
    /// It can be told which packets the guest takes unfinished.
    is_tap: bool,
}

impl Uplink {
    /// Most places from which a packet can be written at once.
    pub(super) const MOST_PLACES: usize = libc::UIO_MAXIOV as usize;

    /// Anything that keeps packets apart, such as a datagram socket; it must not block.
    pub const fn from_packets(fd: OwnedFd) -> Self {
        Self { fd, is_tap: false }
    }

    /// Reads a packet; nothing when none has come.
    pub(super) fn read(&self, packet: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::read(&self.fd, packet) {
            Ok(length) => Ok(Some(length)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a packet.
    pub(super) fn write(&self, packet: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.fd, packet)?;
        Ok(())
    }

    /// Writes a packet that lies in these places, of which there are at most [`Self::MOST_PLACES`].
    ///
    /// # Safety
    /// The places are mapped memory, which stays mapped during the call; others may change its content.
    pub(super) unsafe fn write_from(&self, places: &[libc::iovec]) -> io::Result<()> {
        let count = places.len() as libc::c_int;
        // SAFETY: the caller vouches for the places; the descriptor is open.
        match unsafe { libc::writev(self.fd.as_raw_fd(), places.as_ptr(), count) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Says which packets the guest takes unfinished: bits of [`tap::offloads`].
    pub(super) fn set_offloads(&self, offloads: libc::c_uint) -> io::Result<()> {
        if self.is_tap {
            tap::set_offloads(&self.fd, offloads)?;
        }
        Ok(())
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
