//! A guest's requests to its disk, and their results.

use crate::units::{Extent, Lba, SECTOR_SIZE, Sectors};

/// Identifies a request in flight: an index into the engine's request slots, and the handle of the buffer with the
/// request's data. Smaller than [`Limits::requests`](crate::Limits::requests).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestTag(pub u32);

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Fill the request's buffer from the extent.
    Read(Extent),
    /// Store the request's buffer.
    Write {
        /// Sectors to write.
        extent: Extent,
        /// True if the write must be durable before the acknowledgement.
        fua: bool,
    },
    /// Make the extent read as zeroes. A guest's discard becomes this operation with `unmap`: Godwit makes discarded
    /// sectors read as zeroes, so that both ends of a migration agree about them.
    WriteZeroes {
        /// Sectors to zero.
        extent: Extent,
        /// True if the zeroes must be durable before the acknowledgement.
        fua: bool,
        /// True if the space behind the extent may be released.
        unmap: bool,
    },
    /// Make every write acknowledged before the flush durable.
    Flush,
}

impl Operation {
    /// Returns the operation's extent; a flush has none.
    #[inline]
    pub const fn extent(&self) -> Option<Extent> {
        match *self {
            Self::Read(extent) | Self::Write { extent, .. } | Self::WriteZeroes { extent, .. } => {
                Some(extent)
            }
            Self::Flush => None,
        }
    }

    /// Returns true if the operation changes the disk's content.
    #[inline]
    pub const fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::WriteZeroes { .. })
    }
}

/// Sender of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A client of this node: the guest itself.
    Client,
    /// The previous owner, which still has clients and forwards their I/O here.
    Peer,
}

/// A request that enters the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The request's tag, free until now.
    pub tag: RequestTag,
    /// Sender of the request.
    pub origin: Origin,
    /// Operation to carry out.
    pub operation: Operation,
}

/// Reason why a request failed. The guest sees an I/O error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RequestError {
    /// The extent ends past the end of the disk.
    #[error("the request ends past the end of the disk")]
    OutOfRange,
    /// The offset or length is not a multiple of 512 bytes, or the length is zero or too long.
    #[error("the request is not a positive multiple of 512 bytes, or is too long")]
    Misaligned,
    /// The disk failed.
    #[error("the disk reported an I/O error")]
    Io,
    /// The file system that holds the disk's image is full.
    #[error("no space is left for the disk's image")]
    NoSpace,
    /// This node does not serve the disk and knows no node that does.
    #[error("this node does not serve the disk")]
    NotServing,
    /// The write was forwarded to the disk's owner, the connection was lost, and the owner no longer knows if the write
    /// was carried out. Others have written since, so the write is not repeated.
    #[error("the disk's owner was lost and does not know whether the write was done")]
    Uncertain,
}

impl RequestError {
    /// Returns the error's number in a frame's status field.
    pub const fn code(self) -> u16 {
        match self {
            Self::OutOfRange => 1,
            Self::Misaligned => 2,
            Self::Io => 3,
            Self::NoSpace => 4,
            Self::NotServing => 5,
            Self::Uncertain => 6,
        }
    }

    /// Returns the error with this status number. Unknown numbers are I/O errors.
    pub const fn from_code(code: u16) -> Result<(), Self> {
        Err(match code {
            0 => return Ok(()),
            1 => Self::OutOfRange,
            2 => Self::Misaligned,
            4 => Self::NoSpace,
            5 => Self::NotServing,
            6 => Self::Uncertain,
            _ => Self::Io,
        })
    }
}

/// Turns a byte range from a client into an extent.
///
/// # Errors
/// [`RequestError::Misaligned`] or [`RequestError::OutOfRange`]; no arithmetic overflows.
pub fn checked_extent(offset: u64, length: u32, capacity: Sectors) -> Result<Extent, RequestError> {
    if !offset.is_multiple_of(SECTOR_SIZE) || !u64::from(length).is_multiple_of(SECTOR_SIZE) {
        return Err(RequestError::Misaligned);
    }
    if offset / SECTOR_SIZE >= capacity.0 {
        return Err(RequestError::OutOfRange);
    }
    let extent = Extent::new(Lba(offset / SECTOR_SIZE), length / SECTOR_SIZE as u32)
        .ok_or(RequestError::Misaligned)?;
    if extent.within(capacity) {
        Ok(extent)
    } else {
        Err(RequestError::OutOfRange)
    }
}
