//! Requests: 28 bytes from the client, and the operations they mean for a disk.

use godwit_core::request::{Operation, RequestError, checked_extent};
use godwit_core::units::Sectors;

use super::Extents;
use crate::nbd::Errno;
use crate::nbd::constants::{
    CMD_BLOCK_STATUS, CMD_DISC, CMD_FLAG_DF, CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE,
    CMD_FLAG_REQ_ONE, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, MAX_PAYLOAD,
    REQUEST_MAGIC,
};

/// Bytes of a request without its data.
pub const REQUEST_HEADER_SIZE: usize = 28;

/// A request as received, not yet checked against a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Command flags, known or not.
    pub flags: u16,
    /// Number of the command, known or not.
    pub kind: u16,
    /// The client's name for the request, repeated in its reply.
    pub cookie: u64,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes on the disk.
    pub length: u32,
}

/// The reason for the end of a connection: the start of the next request is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    /// The first bytes do not start a request.
    #[error("the client sent {0:#010x} where an NBD request must start with 0x25609513")]
    Magic(u32),
}

/// The operation of a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// An operation of the controller: a read, a write or a flush.
    Operation(Operation),
    /// Make a range read as zeroes: one [`Operation::WriteZeroes`] per extent, answered once all are done. A trim has
    /// `unmap` set.
    WriteZeroes {
        /// Range to zero.
        extents: Extents,
        /// True if the zeroes must be durable before the reply.
        fua: bool,
        /// True if the space may be released.
        unmap: bool,
        /// True if a way that is no faster than writing zeroes must be refused with [`Errno::NotSupported`].
        fast: bool,
    },
    /// Report the allocated parts of a range, by [`block_status`](super::block_status). Only for a client that selected
    /// `base:allocation`; for others the answer is [`Errno::Invalid`].
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Length in bytes, not zero.
        length: u32,
        /// True if only one range is wanted.
        one: bool,
    },
    /// Leave once the client's other requests are answered. There is no reply.
    Disconnect,
}

impl RequestHeader {
    /// Decodes a request.
    ///
    /// # Errors
    /// The bytes are not a request: the connection must be closed, because the start of the next request is unknown.
    pub fn decode(bytes: &[u8; REQUEST_HEADER_SIZE]) -> Result<Self, InvalidRequest> {
        let [m0, m1, m2, m3, f0, f1, k0, k1, rest @ ..] = *bytes;
        let magic = u32::from_be_bytes([m0, m1, m2, m3]);
        if magic != REQUEST_MAGIC {
            return Err(InvalidRequest::Magic(magic));
        }
        let [
            c0,
            c1,
            c2,
            c3,
            c4,
            c5,
            c6,
            c7,
            o0,
            o1,
            o2,
            o3,
            o4,
            o5,
            o6,
            o7,
            l0,
            l1,
            l2,
            l3,
        ] = rest;
        Ok(Self {
            flags: u16::from_be_bytes([f0, f1]),
            kind: u16::from_be_bytes([k0, k1]),
            cookie: u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            offset: u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }

    /// Returns the bytes for [`RequestHeader::decode`].
    pub fn encode(&self) -> [u8; REQUEST_HEADER_SIZE] {
        let mut bytes = [0; REQUEST_HEADER_SIZE];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    /// Returns the bytes of data after the header, even of an invalid request: a write's length.
    pub const fn payload_length(&self) -> u32 {
        if self.kind == CMD_WRITE {
            self.length
        } else {
            0
        }
    }

    /// Returns true if the request's data is longer than any server need take. Such a request is answered with its
    /// error and the connection closed: skipping up to 4 GiB only to find the next request would let a client waste the
    /// server's time.
    pub const fn payload_is_absurd(&self) -> bool {
        self.payload_length() > MAX_PAYLOAD
    }

    /// Returns true for a read, whose successful reply is followed by `length` bytes of data.
    pub const fn is_read(&self) -> bool {
        self.kind == CMD_READ
    }

    /// Returns true for a query of allocated ranges.
    pub const fn is_block_status(&self) -> bool {
        self.kind == CMD_BLOCK_STATUS
    }

    /// Returns true if the client accepts the data of a read in several parts, in any order.
    pub const fn takes_chunks(&self, structured: bool) -> bool {
        structured && self.flags & CMD_FLAG_DF == 0
    }

    /// Returns the operation of the request on a disk of `capacity` sectors. `structured` is true if the client
    /// negotiated structured replies, without which `NBD_CMD_FLAG_DF` is not allowed.
    ///
    /// # Errors
    /// The error to reply with. The data of a refused write still follows: skip [`RequestHeader::payload_length`]
    /// bytes, unless [`RequestHeader::payload_is_absurd`].
    pub fn command(&self, capacity: Sectors, structured: bool) -> Result<Command, Errno> {
        let allowed = match self.kind {
            CMD_READ if structured => CMD_FLAG_FUA | CMD_FLAG_DF,
            CMD_WRITE_ZEROES => CMD_FLAG_FUA | CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
            CMD_BLOCK_STATUS => CMD_FLAG_FUA | CMD_FLAG_REQ_ONE,
            _ => CMD_FLAG_FUA,
        };
        if self.flags & !allowed != 0 {
            return Err(Errno::Invalid);
        }
        let fua = self.flags & CMD_FLAG_FUA != 0;
        match self.kind {
            CMD_READ if self.length > MAX_PAYLOAD && self.flags & CMD_FLAG_DF != 0 => {
                Err(Errno::Overflow)
            }
            CMD_READ => match checked_extent(self.offset, self.length, capacity) {
                Ok(extent) => Ok(Command::Operation(Operation::Read(extent))),
                Err(error) => Err(self.errno(error)),
            },
            CMD_WRITE => match checked_extent(self.offset, self.length, capacity) {
                Ok(extent) => Ok(Command::Operation(Operation::Write { extent, fua })),
                Err(error) => Err(self.errno(error)),
            },
            CMD_TRIM | CMD_WRITE_ZEROES => {
                match Extents::new(self.offset, u64::from(self.length), capacity) {
                    Ok(extents) => Ok(Command::WriteZeroes {
                        extents,
                        fua,
                        unmap: self.flags & CMD_FLAG_NO_HOLE == 0,
                        fast: self.flags & CMD_FLAG_FAST_ZERO != 0,
                    }),
                    Err(error) => Err(self.errno(error)),
                }
            }
            CMD_BLOCK_STATUS if structured => {
                match Extents::new(self.offset, u64::from(self.length), capacity) {
                    Ok(_) => Ok(Command::BlockStatus {
                        offset: self.offset,
                        length: self.length,
                        one: self.flags & CMD_FLAG_REQ_ONE != 0,
                    }),
                    Err(error) => Err(self.errno(error)),
                }
            }
            CMD_FLUSH if self.offset == 0 && self.length == 0 => {
                Ok(Command::Operation(Operation::Flush))
            }
            CMD_DISC => Ok(Command::Disconnect),
            _ => Err(Errno::Invalid),
        }
    }

    /// Returns the protocol's error for a failure of this request.
    pub const fn errno(&self, error: RequestError) -> Errno {
        Errno::from_request(error, matches!(self.kind, CMD_WRITE | CMD_WRITE_ZEROES))
    }
}
