//! The errors that an NBD reply can carry.

use godwit_core::request::RequestError;

/// An error number of the NBD protocol, independent of the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// `NBD_EIO`: the disk failed.
    Io = 5,
    /// `NBD_EINVAL`: the request cannot be carried out in this form.
    Invalid = 22,
    /// `NBD_ENOSPC`: the write ends past the end of the disk, or no storage is left.
    NoSpace = 28,
    /// `NBD_EOVERFLOW`: the read is too long for an answer in one piece.
    Overflow = 75,
    /// `NBD_ENOTSUP`: zeroes cannot be made faster than they are written.
    NotSupported = 95,
    /// `NBD_ESHUTDOWN`: the disk is no longer served here.
    Shutdown = 108,
}

impl Errno {
    /// Returns the number for a reply.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Returns the protocol's error for a failed request. `writes` is true for `NBD_CMD_WRITE` and
    /// `NBD_CMD_WRITE_ZEROES`, which report a range past the end as `NBD_ENOSPC`; reads and trims report `NBD_EINVAL`.
    pub const fn from_request(error: RequestError, writes: bool) -> Self {
        match error {
            RequestError::OutOfRange if writes => Self::NoSpace,
            RequestError::OutOfRange | RequestError::Misaligned => Self::Invalid,
            RequestError::Io | RequestError::Uncertain => Self::Io,
            RequestError::NoSpace => Self::NoSpace,
            RequestError::NotServing => Self::Shutdown,
        }
    }
}
