//! The 32 bytes that start every frame.

use super::DecodeError;
use crate::units::{Extent, Generation, Lba, MAX_EXTENT_SECTORS};

/// Bytes in a frame's header.
pub const HEADER_SIZE: usize = 32;

/// Longest payload in bytes: the longest extent's data.
pub const MAX_PAYLOAD: u32 = MAX_EXTENT_SECTORS * 512;

/// The data must be durable before the acknowledgement.
pub const FLAG_FUA: u8 = 1;
/// The space behind a zeroed extent may be released.
pub const FLAG_UNMAP: u8 = 2;
/// The extent's data is all zeroes and no payload follows.
pub const FLAG_ZEROES: u8 = 4;
/// The payload is data of a migration, compressed.
pub const FLAG_COMPRESSED: u8 = 8;
/// More than one party may have written to the disk.
pub const FLAG_SHARED: u8 = 16;
/// A forwarded request has failed.
pub const FLAG_FAILED: u8 = 32;
/// A part of the disk stays at the source.
pub const FLAG_LACKS: u8 = 64;
/// The writes of a disk that stays are divided by checkpoints.
pub const FLAG_CHECKPOINTS: u8 = 128;

const MAGIC: [u8; 4] = *b"GDW1";

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(
    missing_docs,
    reason = "each is documented on the type that it carries"
)]
pub enum Kind {
    Hello = 1,
    Welcome = 2,
    Refused = 3,
    Offer = 4,
    Accepted = 5,
    Ping = 16,
    Pong = 17,
    Prepare = 18,
    Prepared = 19,
    Commit = 20,
    Committed = 21,
    Abort = 22,
    Query = 23,
    GuestArrived = 24,
    Follow = 25,
    Follows = 26,
    Copy = 32,
    DoubleWrite = 33,
    Ack = 34,
    Verify = 35,
    Verified = 36,
    DelayedWrite = 37,
    DelayedWritten = 38,
    NewGeneration = 39,
    GenerationReached = 40,
    VerifyHole = 41,
    CheckpointMark = 42,
    ForwardRead = 48,
    ForwardWrite = 49,
    ForwardFlush = 50,
    ForwardReply = 51,
    ForwardBegin = 52,
    ClientAttached = 53,
    Fence = 54,
    FenceReached = 55,
    Lacks = 64,
    Owes = 65,
    Pull = 66,
    Pulled = 67,
    Whole = 68,
}

impl Kind {
    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Refused,
            4 => Self::Offer,
            5 => Self::Accepted,
            16 => Self::Ping,
            17 => Self::Pong,
            18 => Self::Prepare,
            19 => Self::Prepared,
            20 => Self::Commit,
            21 => Self::Committed,
            22 => Self::Abort,
            23 => Self::Query,
            24 => Self::GuestArrived,
            25 => Self::Follow,
            26 => Self::Follows,
            32 => Self::Copy,
            33 => Self::DoubleWrite,
            34 => Self::Ack,
            35 => Self::Verify,
            36 => Self::Verified,
            37 => Self::DelayedWrite,
            38 => Self::DelayedWritten,
            39 => Self::NewGeneration,
            40 => Self::GenerationReached,
            41 => Self::VerifyHole,
            42 => Self::CheckpointMark,
            48 => Self::ForwardRead,
            49 => Self::ForwardWrite,
            50 => Self::ForwardFlush,
            51 => Self::ForwardReply,
            52 => Self::ForwardBegin,
            53 => Self::ClientAttached,
            54 => Self::Fence,
            55 => Self::FenceReached,
            64 => Self::Lacks,
            65 => Self::Owes,
            66 => Self::Pull,
            67 => Self::Pulled,
            68 => Self::Whole,
            _ => return None,
        })
    }
}

/// A decoded header. The length fields are within bounds, the other fields are as sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: Kind,
    /// The `FLAG_*` bits.
    pub flags: u8,
    /// 0, or the code of an error.
    pub status: u16,
    /// Bytes that follow the header.
    pub payload_length: u32,
    /// The sender's number for the frame, returned in the answer.
    pub tag: u32,
    /// The migration's generation.
    pub generation: Generation,
    /// First sector.
    pub start: Lba,
    /// Number of sectors.
    pub sectors: u32,
}

impl Header {
    /// Creates a header of this kind with every other field zero.
    pub const fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            status: 0,
            payload_length: 0,
            tag: 0,
            generation: Generation(0),
            start: Lba(0),
            sectors: 0,
        }
    }

    /// Returns the frame's extent.
    ///
    /// # Errors
    /// [`DecodeError::Field`] if the extent is empty or too long.
    pub const fn extent(&self) -> Result<Extent, DecodeError> {
        match Extent::new(self.start, self.sectors) {
            Some(extent) => Ok(extent),
            None => Err(DecodeError::Field("extent")),
        }
    }

    /// Returns true if the payload is compressed.
    pub const fn is_compressed(&self) -> bool {
        self.flags & FLAG_COMPRESSED != 0
    }

    /// Returns the header of the same frame with its data compressed to `length` bytes.
    #[must_use]
    pub const fn compressed(self, length: u32) -> Self {
        Self {
            flags: self.flags | FLAG_COMPRESSED,
            payload_length: length,
            ..self
        }
    }

    /// Returns the header's bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.flags;
        bytes[6..8].copy_from_slice(&self.status.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.payload_length.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.start.0.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.sectors.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`DecodeError::Magic`], [`DecodeError::Kind`] or [`DecodeError::PayloadLength`].
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self, DecodeError> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[0..4] != MAGIC {
            return Err(DecodeError::Magic);
        }
        let kind = Kind::from_code(bytes[4]).ok_or(DecodeError::Kind(bytes[4]))?;
        let payload_length = u32_at(8);
        if payload_length > MAX_PAYLOAD {
            return Err(DecodeError::PayloadLength(payload_length));
        }
        Ok(Self {
            kind,
            flags: bytes[5],
            status: u16::from_le_bytes([bytes[6], bytes[7]]),
            payload_length,
            tag: u32_at(12),
            generation: Generation(u32_at(16)),
            start: Lba(u64::from(u32_at(20)) | u64::from(u32_at(24)) << 32),
            sectors: u32_at(28),
        })
    }
}
