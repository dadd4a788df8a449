//! Frames between two nodes: versioned, binary, little-endian, one codec for every body.
//!
//! Every frame is a 32-byte header, then `payload_length` bytes:
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic, `GDW1` |
//! | 4 | kind |
//! | 5 | flags: 1 FUA, 2 unmap, 4 zeroes, 8 compressed, 16 shared, 32 failed, 64 lacks |
//! | 6..8 | status: 0 or an error's code |
//! | 8..12 | payload length in bytes, at most 32 MiB |
//! | 12..16 | tag |
//! | 16..20 | generation |
//! | 20..28 | first sector |
//! | 28..32 | sectors |
//!
//! A connection starts with a [`Hello`] and its answer ([`Reply`]). A migration's control connection then carries an
//! [`Offer`] and its answer. [`Message`]s follow. All of these travel in the same frames.

mod codec;
mod greeting;
mod header;
mod message;

pub use greeting::{
    Features, GREETING_LIMIT, Greeting, Hello, MAX_NAME, MAX_PLACE, MIN_PROTOCOL_VERSION, Offer,
    OfferedImage, PROTOCOL_VERSION, Place, Purpose, Refusal, RefusalCode, Reply,
};
pub use header::{
    FLAG_CHECKPOINTS, FLAG_COMPRESSED, FLAG_FAILED, FLAG_FUA, FLAG_LACKS, FLAG_SHARED, FLAG_UNMAP,
    FLAG_ZEROES, HEADER_SIZE, Header, Kind, MAX_PAYLOAD,
};
pub use message::{Message, PayloadBuffer, Taken, double_write_id};

/// Traffic class of a connection between two nodes. Each class has connections of its own, so that a bulk copy never
/// delays a double write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrafficClass {
    /// Offers, the authority protocol, heartbeats.
    Control,
    /// Double writes, and after switchover the I/O of clients that stayed.
    Sync,
    /// Bulk copies and verification.
    Copy,
    /// After switchover, missing blocks that the owner pulls.
    Pull,
    /// Within a host: the owner's missing blocks of the image, while another node owes a part too. Never named in a
    /// hello.
    Image,
}

impl TrafficClass {
    /// Returns the class's number in a hello.
    pub const fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Sync => 2,
            Self::Copy => 3,
            Self::Pull => 4,
            Self::Image => 5,
        }
    }

    /// Returns the class with this number in a hello; `None` for [`Self::Image`], which no other node may open.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Control),
            2 => Some(Self::Sync),
            3 => Some(Self::Copy),
            4 => Some(Self::Pull),
            _ => None,
        }
    }
}

/// Error: the bytes are not a frame of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The magic bytes are missing.
    #[error("these bytes are not a Godwit frame")]
    Magic,
    /// The kind is not known.
    #[error("frame kind {0} is not known")]
    Kind(u8),
    /// The payload is longer than its kind allows.
    #[error("a payload of {0} bytes is too long for its frame")]
    PayloadLength(u32),
    /// A field holds a value not allowed for its kind.
    #[error("the frame's {0} is not valid")]
    Field(&'static str),
    /// The body ends early or late.
    #[error("the frame's body is malformed")]
    Body,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(kind: Kind, flags: u8, payload_length: u32) -> Result<Message, DecodeError> {
        let header = Header {
            flags,
            payload_length,
            sectors: 16,
            ..Header::new(kind)
        };
        Message::decode(&header, &[])
    }

    #[test]
    fn only_data_of_a_migration_may_be_compressed_and_then_it_is_shorter() {
        for kind in [Kind::Copy, Kind::DoubleWrite, Kind::DelayedWrite] {
            let plain = decoded(kind, 0, 8192).expect("a frame");
            for length in [1, 4000, 8191] {
                assert_eq!(decoded(kind, FLAG_COMPRESSED, length), Ok(plain));
            }
        }
        for (flags, length) in [
            (FLAG_COMPRESSED, 0),
            (FLAG_COMPRESSED, 8192),
            (FLAG_COMPRESSED, 8193),
            (FLAG_COMPRESSED | FLAG_ZEROES, 0),
            (FLAG_COMPRESSED | FLAG_ZEROES, 4000),
            (0, 4000),
        ] {
            let wrong = DecodeError::Field("payload length");
            assert_eq!(
                decoded(Kind::Copy, flags, length),
                Err(wrong),
                "{flags}, {length}"
            );
        }
        for kind in [Kind::ForwardWrite, Kind::ForwardReply] {
            let wrong = DecodeError::Field("compression");
            assert_eq!(decoded(kind, FLAG_COMPRESSED, 4000), Err(wrong), "{kind:?}");
        }
    }
}
