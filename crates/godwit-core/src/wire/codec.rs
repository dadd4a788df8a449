//! Encoding and decoding of the frames between controllers.

use core::num::NonZeroU64;

use super::DecodeError;
use super::header::{
    FLAG_CHECKPOINTS, FLAG_FAILED, FLAG_FUA, FLAG_LACKS, FLAG_SHARED, FLAG_UNMAP, FLAG_ZEROES,
    Header, Kind,
};
use super::message::{INLINE_LIMIT, Message, Taken, double_write_id};
use crate::action::{ChunkSlot, DelayedSlot, PullSlot};
use crate::event::AbortReason;
use crate::request::{Operation, RequestError, RequestTag};
use crate::units::{Epoch, Extent, Generation, Lba, MigrationId};

impl Message {
    /// Returns the frame's header, the payload that is not in a buffer, and this payload's length.
    pub fn encode(&self) -> (Header, [u8; INLINE_LIMIT], usize) {
        let mut inline = [0; INLINE_LIMIT];
        let mut header;
        match *self {
            Self::Ping => header = Header::new(Kind::Ping),
            Self::Pong => header = Header::new(Kind::Pong),
            Self::Prepare {
                migration,
                epoch,
                shared,
                lacks,
            } => {
                header = about_epoch(Kind::Prepare, migration, epoch, &mut inline);
                header.flags =
                    if shared { FLAG_SHARED } else { 0 } | if lacks { FLAG_LACKS } else { 0 };
            }
            Self::Prepared { migration } => header = about(Kind::Prepared, migration, &mut inline),
            Self::Commit { migration, epoch } => {
                header = about_epoch(Kind::Commit, migration, epoch, &mut inline);
            }
            Self::Committed { migration } => {
                header = about(Kind::Committed, migration, &mut inline);
            }
            Self::Abort { migration, reason } => {
                header = about(Kind::Abort, migration, &mut inline);
                header.status = reason.code();
            }
            Self::Query { migration } => header = about(Kind::Query, migration, &mut inline),
            Self::GuestArrived { migration } => {
                header = about(Kind::GuestArrived, migration, &mut inline);
            }
            Self::Follow {
                migration,
                epoch,
                checkpoints,
            } => {
                header = about_epoch(Kind::Follow, migration, epoch, &mut inline);
                header.flags = if checkpoints { FLAG_CHECKPOINTS } else { 0 };
            }
            Self::CheckpointMark { migration, number } => {
                header = about(Kind::CheckpointMark, migration, &mut inline);
                header.start = Lba(number);
            }
            Self::Follows { migration } => header = about(Kind::Follows, migration, &mut inline),
            Self::Copy {
                slot,
                generation,
                extent,
                zeroes,
            } => header = data(Kind::Copy, u32::from(slot.0), generation, extent, zeroes),
            Self::DoubleWrite {
                tag,
                turn,
                generation,
                extent,
                zeroes,
                unmap,
            } => {
                let id = double_write_id(tag, turn);
                header = data(Kind::DoubleWrite, id, generation, extent, zeroes);
                header.flags |= if unmap { FLAG_UNMAP } else { 0 };
            }
            Self::Ack {
                tag,
                generation,
                result,
            } => header = answer(Kind::Ack, tag, generation, result),
            Self::Verify {
                slot,
                generation,
                extent,
                digest,
            } => {
                header = at(Kind::Verify, u32::from(slot.0), generation, extent);
                inline = digest;
                header.payload_length = 32;
            }
            Self::VerifyHole {
                slot,
                generation,
                extent,
            } => header = at(Kind::VerifyHole, u32::from(slot.0), generation, extent),
            Self::Verified {
                slot,
                generation,
                result,
            } => {
                let done = result.map(|_| ());
                header = answer(Kind::Verified, u32::from(slot.0), generation, done);
                header.sectors = u32::from(result == Ok(true));
            }
            Self::DelayedWrite {
                slot,
                generation,
                extent,
                zeroes,
            } => {
                let tag = u32::from(slot.0);
                header = data(Kind::DelayedWrite, tag, generation, extent, zeroes);
            }
            Self::DelayedWritten {
                slot,
                generation,
                result,
            } => header = answer(Kind::DelayedWritten, u32::from(slot.0), generation, result),
            Self::NewGeneration { generation } => {
                header = Header::new(Kind::NewGeneration);
                header.generation = generation;
            }
            Self::GenerationReached { generation } => {
                header = Header::new(Kind::GenerationReached);
                header.generation = generation;
            }
            Self::ForwardBegin { session } => {
                header = Header::new(Kind::ForwardBegin);
                header.start = Lba(session);
            }
            Self::ClientAttached => header = Header::new(Kind::ClientAttached),
            Self::Fence {
                number,
                taken,
                shared,
                failed,
            } => {
                header = Header::new(Kind::Fence);
                header.tag = number;
                (header.sectors, header.generation) = match taken {
                    Taken::Unknown => (0, Generation(0)),
                    Taken::Nothing => (1, Generation(0)),
                    Taken::Through(last) => (2, Generation(last)),
                };
                header.flags =
                    if shared { FLAG_SHARED } else { 0 } | if failed { FLAG_FAILED } else { 0 };
            }
            Self::FenceReached { number } => {
                header = Header::new(Kind::FenceReached);
                header.tag = number;
            }
            Self::Forward {
                tag,
                number,
                operation,
            } => header = forward(tag, number, operation),
            Self::Lacks {
                start,
                sectors,
                heat,
                at_source,
            } => {
                header = Header::new(Kind::Lacks);
                header.flags = if at_source { FLAG_LACKS } else { 0 };
                (header.start, header.sectors) = (start, sectors);
                header.tag = u32::from(heat);
            }
            Self::Owes {
                migration,
                max_bandwidth,
            } => {
                header = about(Kind::Owes, migration, &mut inline);
                header.start = Lba(max_bandwidth.map_or(0, NonZeroU64::get));
            }
            Self::Whole { migration } => header = about(Kind::Whole, migration, &mut inline),
            Self::Pull { slot, extent } => {
                header = at(Kind::Pull, u32::from(slot.0), Generation(0), extent);
            }
            Self::Pulled {
                slot,
                extent,
                zeroes,
                result,
            } => {
                header = at(Kind::Pulled, u32::from(slot.0), Generation(0), extent);
                header.flags = if zeroes { FLAG_ZEROES } else { 0 };
                header.status = status(result);
                if !zeroes && result.is_ok() {
                    header.payload_length = extent.bytes() as u32;
                }
            }
            Self::ForwardReply {
                tag,
                number,
                length,
                result,
            } => {
                header = answer(Kind::ForwardReply, tag.0, Generation(number), result);
                header.payload_length = length;
            }
        }
        let inline_length = if header.payload_in_buffer() {
            0
        } else {
            header.payload_length as usize
        };
        (header, inline, inline_length)
    }

    /// Reads a frame whose header is known. `body` is the payload, or empty if [`Header::payload_in_buffer`] says that
    /// the payload belongs in a buffer.
    ///
    /// # Errors
    /// [`DecodeError::Kind`] for greetings, [`DecodeError::Field`] or [`DecodeError::Body`].
    pub fn decode(header: &Header, body: &[u8]) -> Result<Self, DecodeError> {
        let data = matches!(
            header.kind,
            Kind::Copy | Kind::DoubleWrite | Kind::DelayedWrite | Kind::Pulled
        );
        if header.is_compressed() && !data {
            return Err(DecodeError::Field("compression"));
        }
        let expected = inline_length(header.kind);
        if body.len() != expected
            || (!header.payload_in_buffer() && header.payload_length as usize != expected)
        {
            return Err(DecodeError::Body);
        }
        let generation = header.generation;
        Ok(match header.kind {
            Kind::Ping => Self::Ping,
            Kind::Pong => Self::Pong,
            Kind::NewGeneration => Self::NewGeneration { generation },
            Kind::GenerationReached => Self::GenerationReached { generation },
            Kind::Lacks => Self::Lacks {
                start: header.start,
                sectors: header.sectors,
                heat: u8::try_from(header.tag).map_err(|_| DecodeError::Field("heat"))?,
                at_source: header.flags & FLAG_LACKS != 0,
            },
            Kind::Pull => Self::Pull {
                slot: PullSlot(slot_in(header)?),
                extent: header.extent()?,
            },
            Kind::Prepare
            | Kind::Prepared
            | Kind::Commit
            | Kind::Committed
            | Kind::Abort
            | Kind::Query
            | Kind::GuestArrived
            | Kind::Follow
            | Kind::Follows
            | Kind::CheckpointMark
            | Kind::Owes
            | Kind::Whole => Self::about_in(header, body)?,
            Kind::Copy
            | Kind::DoubleWrite
            | Kind::DelayedWrite
            | Kind::Verify
            | Kind::VerifyHole => Self::data_in(header, body)?,
            Kind::Ack
            | Kind::Verified
            | Kind::DelayedWritten
            | Kind::ForwardReply
            | Kind::Pulled => Self::answer_in(header)?,
            Kind::ForwardBegin
            | Kind::ClientAttached
            | Kind::Fence
            | Kind::FenceReached
            | Kind::ForwardRead
            | Kind::ForwardWrite
            | Kind::ForwardFlush => Self::forwarding_in(header)?,
            Kind::Hello | Kind::Welcome | Kind::Refused | Kind::Offer | Kind::Accepted => {
                return Err(DecodeError::Kind(header.kind as u8));
            }
        })
    }

    /// Reads a frame about a migration.
    fn about_in(header: &Header, body: &[u8]) -> Result<Self, DecodeError> {
        Ok(match header.kind {
            Kind::Prepare => Self::Prepare {
                migration: migration_in(body)?,
                epoch: epoch_in(body)?,
                shared: header.flags & FLAG_SHARED != 0,
                lacks: header.flags & FLAG_LACKS != 0,
            },
            Kind::Prepared => Self::Prepared {
                migration: migration_in(body)?,
            },
            Kind::Commit => Self::Commit {
                migration: migration_in(body)?,
                epoch: epoch_in(body)?,
            },
            Kind::Committed => Self::Committed {
                migration: migration_in(body)?,
            },
            Kind::Abort => Self::Abort {
                migration: migration_in(body)?,
                reason: AbortReason::from_code(header.status),
            },
            Kind::Query => Self::Query {
                migration: migration_in(body)?,
            },
            Kind::GuestArrived => Self::GuestArrived {
                migration: migration_in(body)?,
            },
            Kind::Follow => Self::Follow {
                migration: migration_in(body)?,
                epoch: epoch_in(body)?,
                checkpoints: header.flags & FLAG_CHECKPOINTS != 0,
            },
            Kind::CheckpointMark => Self::CheckpointMark {
                migration: migration_in(body)?,
                number: header.start.0,
            },
            Kind::Follows => Self::Follows {
                migration: migration_in(body)?,
            },
            Kind::Owes => Self::Owes {
                migration: migration_in(body)?,
                max_bandwidth: NonZeroU64::new(header.start.0),
            },
            Kind::Whole => Self::Whole {
                migration: migration_in(body)?,
            },
            other => return Err(DecodeError::Kind(other as u8)),
        })
    }

    /// Reads a frame of the source for the destination's disk.
    fn data_in(header: &Header, body: &[u8]) -> Result<Self, DecodeError> {
        let generation = header.generation;
        let zeroes = header.flags & FLAG_ZEROES != 0;
        Ok(match header.kind {
            Kind::Copy => Self::Copy {
                slot: ChunkSlot(slot_in(header)?),
                generation,
                extent: data_extent(header, zeroes)?,
                zeroes,
            },
            Kind::DoubleWrite => Self::DoubleWrite {
                tag: RequestTag(header.tag & 0xFFFF),
                turn: (header.tag >> 16) as u16,
                generation,
                extent: data_extent(header, zeroes)?,
                zeroes,
                unmap: header.flags & FLAG_UNMAP != 0,
            },
            Kind::DelayedWrite => Self::DelayedWrite {
                slot: DelayedSlot(slot_in(header)?),
                generation,
                extent: data_extent(header, zeroes)?,
                zeroes,
            },
            Kind::Verify => Self::Verify {
                slot: ChunkSlot(slot_in(header)?),
                generation,
                extent: header.extent()?,
                digest: array(body)?,
            },
            Kind::VerifyHole => Self::VerifyHole {
                slot: ChunkSlot(slot_in(header)?),
                generation,
                extent: header.extent()?,
            },
            other => return Err(DecodeError::Kind(other as u8)),
        })
    }

    /// Reads an answer.
    fn answer_in(header: &Header) -> Result<Self, DecodeError> {
        let generation = header.generation;
        let zeroes = header.flags & FLAG_ZEROES != 0;
        Ok(match header.kind {
            Kind::Ack => Self::Ack {
                tag: header.tag,
                generation,
                result: RequestError::from_code(header.status),
            },
            Kind::Verified => Self::Verified {
                slot: ChunkSlot(slot_in(header)?),
                generation,
                result: RequestError::from_code(header.status).map(|()| header.sectors == 1),
            },
            Kind::DelayedWritten => Self::DelayedWritten {
                slot: DelayedSlot(slot_in(header)?),
                generation,
                result: RequestError::from_code(header.status),
            },
            Kind::ForwardReply => Self::ForwardReply {
                tag: RequestTag(header.tag),
                number: generation.0,
                length: header.payload_length,
                result: RequestError::from_code(header.status),
            },
            Kind::Pulled => {
                let result = RequestError::from_code(header.status);
                Self::Pulled {
                    slot: PullSlot(slot_in(header)?),
                    extent: data_extent(header, zeroes || result.is_err())?,
                    zeroes,
                    result,
                }
            }
            other => return Err(DecodeError::Kind(other as u8)),
        })
    }

    /// Reads a frame of a forwarder, or of the owner for a forwarder.
    fn forwarding_in(header: &Header) -> Result<Self, DecodeError> {
        let generation = header.generation;
        let zeroes = header.flags & FLAG_ZEROES != 0;
        let tag = RequestTag(header.tag);
        Ok(match header.kind {
            Kind::ForwardBegin => Self::ForwardBegin {
                session: header.start.0,
            },
            Kind::ClientAttached => Self::ClientAttached,
            Kind::Fence => Self::Fence {
                number: header.tag,
                taken: match header.sectors {
                    0 => Taken::Unknown,
                    1 => Taken::Nothing,
                    2 => Taken::Through(generation.0),
                    _ => return Err(DecodeError::Field("taken")),
                },
                shared: header.flags & FLAG_SHARED != 0,
                failed: header.flags & FLAG_FAILED != 0,
            },
            Kind::FenceReached => Self::FenceReached { number: header.tag },
            Kind::ForwardRead => Self::Forward {
                tag,
                number: generation.0,
                operation: Operation::Read(header.extent()?),
            },
            Kind::ForwardWrite => {
                let extent = data_extent(header, zeroes)?;
                let fua = header.flags & FLAG_FUA != 0;
                let unmap = header.flags & FLAG_UNMAP != 0;
                let operation = if zeroes {
                    Operation::WriteZeroes { extent, fua, unmap }
                } else {
                    Operation::Write { extent, fua }
                };
                Self::Forward {
                    tag,
                    number: generation.0,
                    operation,
                }
            }
            Kind::ForwardFlush => Self::Forward {
                tag,
                number: generation.0,
                operation: Operation::Flush,
            },
            other => return Err(DecodeError::Kind(other as u8)),
        })
    }
}

/// Returns the length of the payload that is not in a buffer.
const fn inline_length(kind: Kind) -> usize {
    match kind {
        Kind::Prepare | Kind::Commit | Kind::Follow => 24,
        Kind::Prepared
        | Kind::Committed
        | Kind::Abort
        | Kind::Query
        | Kind::GuestArrived
        | Kind::Follows
        | Kind::CheckpointMark
        | Kind::Owes
        | Kind::Whole => 16,
        Kind::Verify => 32,
        _ => 0,
    }
}

fn about(kind: Kind, migration: MigrationId, inline: &mut [u8; INLINE_LIMIT]) -> Header {
    inline[..16].copy_from_slice(&migration.0);
    Header {
        payload_length: 16,
        ..Header::new(kind)
    }
}

fn about_epoch(
    kind: Kind,
    migration: MigrationId,
    epoch: Epoch,
    inline: &mut [u8; INLINE_LIMIT],
) -> Header {
    inline[16..24].copy_from_slice(&epoch.0.to_le_bytes());
    Header {
        payload_length: 24,
        ..about(kind, migration, inline)
    }
}

fn at(kind: Kind, tag: u32, generation: Generation, extent: Extent) -> Header {
    Header {
        tag,
        generation,
        start: extent.start(),
        sectors: extent.sectors(),
        ..Header::new(kind)
    }
}

fn data(kind: Kind, tag: u32, generation: Generation, extent: Extent, zeroes: bool) -> Header {
    Header {
        flags: if zeroes { FLAG_ZEROES } else { 0 },
        payload_length: if zeroes { 0 } else { extent.bytes() as u32 },
        ..at(kind, tag, generation, extent)
    }
}

fn forward(tag: RequestTag, number: u32, operation: Operation) -> Header {
    let generation = Generation(number);
    match operation {
        Operation::Read(extent) => at(Kind::ForwardRead, tag.0, generation, extent),
        Operation::Write { extent, fua } => Header {
            flags: if fua { FLAG_FUA } else { 0 },
            payload_length: extent.bytes() as u32,
            ..at(Kind::ForwardWrite, tag.0, generation, extent)
        },
        Operation::WriteZeroes { extent, fua, unmap } => Header {
            flags: FLAG_ZEROES
                | if fua { FLAG_FUA } else { 0 }
                | if unmap { FLAG_UNMAP } else { 0 },
            ..at(Kind::ForwardWrite, tag.0, generation, extent)
        },
        Operation::Flush => Header {
            tag: tag.0,
            generation,
            ..Header::new(Kind::ForwardFlush)
        },
    }
}

fn answer(
    kind: Kind,
    tag: u32,
    generation: Generation,
    result: Result<(), RequestError>,
) -> Header {
    Header {
        status: status(result),
        tag,
        generation,
        ..Header::new(kind)
    }
}

const fn status(result: Result<(), RequestError>) -> u16 {
    match result {
        Ok(()) => 0,
        Err(error) => error.code(),
    }
}

fn data_extent(header: &Header, zeroes: bool) -> Result<Extent, DecodeError> {
    let extent = header.extent()?;
    let expected = if zeroes { 0 } else { extent.bytes() };
    let length = u64::from(header.payload_length);
    let fits = if header.is_compressed() {
        0 < length && length < expected
    } else {
        length == expected
    };
    if fits {
        Ok(extent)
    } else {
        Err(DecodeError::Field("payload length"))
    }
}

fn slot_in(header: &Header) -> Result<u16, DecodeError> {
    u16::try_from(header.tag).map_err(|_| DecodeError::Field("slot"))
}

fn migration_in(body: &[u8]) -> Result<MigrationId, DecodeError> {
    array(body).map(MigrationId)
}

fn epoch_in(body: &[u8]) -> Result<Epoch, DecodeError> {
    array(&body[16..]).map(|bytes| Epoch(u64::from_le_bytes(bytes)))
}

fn array<const N: usize>(body: &[u8]) -> Result<[u8; N], DecodeError> {
    body.first_chunk().copied().ok_or(DecodeError::Body)
}
