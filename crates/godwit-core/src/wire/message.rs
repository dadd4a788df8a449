//! The frames that two controllers exchange once their connections are up.

use core::num::NonZeroU64;

use super::TrafficClass;
use super::header::{Header, Kind};
use crate::action::{ChunkSlot, DelayedSlot, Digest, PullSlot, SourceSlot};
use crate::event::AbortReason;
use crate::request::{Operation, RequestError, RequestTag};
use crate::units::{Epoch, Extent, Generation, Lba, MigrationId};

/// Maximum payload of a frame whose payload is not a guest's or a chunk's data.
pub(super) const INLINE_LIMIT: usize = 32;

/// Source of an outgoing frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadBuffer {
    /// The buffer of a guest's request.
    Request(RequestTag),
    /// A buffer of the source's read of its own disk.
    Source(SourceSlot),
}

/// Requests of a session that an owner has taken, including all earlier connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Taken {
    /// Unknown to the owner: the session is new to its process, or to its time as the owner.
    Unknown,
    /// Nothing.
    Nothing,
    /// Everything up to the request of this number.
    Through(u32),
}

/// A frame between two controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Asks for a [`Message::Pong`] as a sign of life. On a pull connection the frame is the owner's own sign of life
    /// and is not answered.
    Ping,
    /// Answers a ping.
    Pong,
    /// Source to destination: flush, and accept `epoch` durably.
    Prepare {
        /// The migration.
        migration: MigrationId,
        /// The epoch in which the destination will serve.
        epoch: Epoch,
        /// True if more than one party may have written: see [`Message::Fence`].
        shared: bool,
        /// True if the destination will lack the blocks announced before by [`Message::Lacks`].
        lacks: bool,
    },
    /// Destination to source: done; I hold I/O until you commit or abort.
    Prepared {
        /// The migration.
        migration: MigrationId,
    },
    /// Source to destination: I gave the disk away durably; serve. Repeated until confirmed.
    Commit {
        /// The migration.
        migration: MigrationId,
        /// The epoch in which the destination serves.
        epoch: Epoch,
    },
    /// Destination to source: I serve, durably.
    Committed {
        /// The migration.
        migration: MigrationId,
    },
    /// The sender ended the migration. An abort from the source is final: the source continues to serve.
    Abort {
        /// The migration.
        migration: MigrationId,
        /// Reason for the end.
        reason: AbortReason,
    },
    /// Destination to source: I accepted; did you commit or abort?
    Query {
        /// The migration.
        migration: MigrationId,
    },
    /// Destination to source: the guest's hypervisor has moved the guest here.
    GuestArrived {
        /// The migration.
        migration: MigrationId,
    },
    /// Source to destination: every acknowledged write so far has been acknowledged by you, and from now on I acknowledge
    /// no write before you do. Only for nodes with [`Features::FOLLOWS`](super::Features::FOLLOWS).
    Follow {
        /// The migration.
        migration: MigrationId,
        /// The epoch in which the source serves.
        epoch: Epoch,
        /// True if [`Message::CheckpointMark`] will divide the writes. Only for nodes with
        /// [`Features::CHECKPOINTS`](super::Features::CHECKPOINTS).
        checkpoints: bool,
    },
    /// Source to a destination that follows, between double writes: all earlier ones belong to this checkpoint, and all
    /// later ones do not.
    CheckpointMark {
        /// The migration.
        migration: MigrationId,
        /// Number of the checkpoint, counted from 1.
        number: u64,
    },
    /// Destination to source: the disk follows here.
    Follows {
        /// The migration.
        migration: MigrationId,
    },
    /// A chunk of the first pass. Without `zeroes` the data follows.
    Copy {
        /// The source's slot, returned in the ack.
        slot: ChunkSlot,
        /// Generation of the read.
        generation: Generation,
        /// Sectors of the chunk.
        extent: Extent,
        /// True if the chunk is all zeroes; no data follows.
        zeroes: bool,
    },
    /// A guest's write to the migrated region. Without `zeroes` the data follows.
    DoubleWrite {
        /// The source's request, whose buffer holds the data: less than 65,536.
        tag: RequestTag,
        /// Distinguishes consecutive double writes with the same tag: the guest does not wait for their
        /// acknowledgements, which may come in any order.
        turn: u16,
        /// Generation in which the frame was sent.
        generation: Generation,
        /// Sectors to write.
        extent: Extent,
        /// True if the write zeroes the extent; no data follows.
        zeroes: bool,
        /// True if the zeroed space may be released.
        unmap: bool,
    },
    /// A copy (on the copy connection) or double write (on the sync connection) is on the destination's disk, or
    /// failed.
    Ack {
        /// The slot of a copy, or the [`double_write_id`] of a double write's tag and turn.
        tag: u32,
        /// The generation of the frame.
        generation: Generation,
        /// Result of the write.
        result: Result<(), RequestError>,
    },
    /// Read the extent and compare its hash with this one.
    Verify {
        /// The source's slot, returned in the answer.
        slot: ChunkSlot,
        /// Generation of the source's read.
        generation: Generation,
        /// Sectors to read.
        extent: Extent,
        /// The source's hash.
        digest: Digest,
    },
    /// Check that all of the extent, a hole at the source, reads as zeroes. Answered by [`Message::Verified`]. Only for
    /// nodes with [`Features::HOLES`](super::Features::HOLES).
    VerifyHole {
        /// The source's slot, returned in the answer.
        slot: ChunkSlot,
        /// Generation of the source's examination.
        generation: Generation,
        /// Sectors to check.
        extent: Extent,
    },
    /// The answer to a verification.
    Verified {
        /// The slot of the question.
        slot: ChunkSlot,
        /// The generation of the question.
        generation: Generation,
        /// True if the hashes are equal, or the error of the destination's disk.
        result: Result<bool, RequestError>,
    },
    /// Data of the migrated region that the guest wrote during a pause, or whose double write a pause gave up. Without
    /// `zeroes` the data follows.
    DelayedWrite {
        /// The source's slot, returned in the answer.
        slot: DelayedSlot,
        /// Generation of the read.
        generation: Generation,
        /// Sectors to write.
        extent: Extent,
        /// True if the data is all zeroes; no data follows.
        zeroes: bool,
    },
    /// A delayed write is on the destination's disk, or failed.
    DelayedWritten {
        /// The slot of the frame.
        slot: DelayedSlot,
        /// The generation of the frame.
        generation: Generation,
        /// Result of the write.
        result: Result<(), RequestError>,
    },
    /// A pause began: copies and verifications of older generations must no longer be carried out. Answered at once.
    NewGeneration {
        /// The generation of all later frames on this connection.
        generation: Generation,
    },
    /// Every frame that the source sent on the sync connection before this generation has arrived.
    GenerationReached {
        /// The generation of the question.
        generation: Generation,
    },
    /// Forwarder to owner: requests forwarded on this connection from here on belong to this session. The first frame
    /// of its kind on a connection. Answered by a [`Message::Fence`] unless the owner received the disk on this
    /// connection.
    ForwardBegin {
        /// Id of the session, chosen by the forwarding process and never reused.
        session: u64,
    },
    /// Forwarder to owner: a client has attached to the forwarder. Requests of other forwarders that the owner has not
    /// taken are void.
    ClientAttached,
    /// Owner to forwarder: all forwarded requests that the owner has not taken are void, up to
    /// [`Message::FenceReached`]. The forwarder sends the requests of waiting clients again.
    Fence {
        /// Counts the fences of a session.
        number: u32,
        /// Requests of this session taken before.
        taken: Taken,
        /// True if other parties than this forwarder may have written: a write that may have been carried out must not
        /// be repeated.
        shared: bool,
        /// True if a request of this session has failed.
        failed: bool,
    },
    /// Forwarder to owner: later frames were sent after the fence was seen.
    FenceReached {
        /// Number of the fence.
        number: u32,
    },
    /// I/O of a client that stayed at the previous owner. A write's data follows.
    Forward {
        /// The sender's request, returned in the reply.
        tag: RequestTag,
        /// Counts the forwarded requests of a session, including resent ones; wraps around.
        number: u32,
        /// The client's operation.
        operation: Operation,
    },
    /// Source to destination, before [`Message::Prepare`]: these sectors stay at the source, and are to be pulled once
    /// the destination serves.
    Lacks {
        /// First sector.
        start: Lba,
        /// Number of sectors.
        sectors: u32,
        /// Heat of these sectors: the guest's writes during the migration. Hotter sectors are pulled first.
        heat: u8,
        /// For a disk on an image: true if these sectors are at the source, false if they are in the image.
        at_source: bool,
    },
    /// To the owner from the node that gave the disk away by this migration: as far as known, the owner lacks a part of
    /// the disk. The owner pulls this part on this connection, or answers with [`Message::Whole`].
    Owes {
        /// The migration.
        migration: MigrationId,
        /// Maximum bytes per second that the owner may pull, if the migration was bounded. Older nodes send no bound.
        max_bandwidth: Option<NonZeroU64>,
    },
    /// From the owner to the node that gave the disk away: send this part.
    Pull {
        /// The owner's slot, returned in the answer.
        slot: PullSlot,
        /// Sectors to send.
        extent: Extent,
    },
    /// To the owner: a pulled part. Without `zeroes` and an error the data follows.
    Pulled {
        /// The slot of the question.
        slot: PullSlot,
        /// The extent of the question.
        extent: Extent,
        /// True if the part is all zeroes; no data follows.
        zeroes: bool,
        /// Result of the read.
        result: Result<(), RequestError>,
    },
    /// From the owner: none of the blocks given away by this migration are missing, durably.
    Whole {
        /// The migration.
        migration: MigrationId,
    },
    /// The answer to forwarded I/O. A successful read's data follows.
    ForwardReply {
        /// The forwarder's request.
        tag: RequestTag,
        /// The request's number.
        number: u32,
        /// Bytes of data that follow: a successful read's length, else 0.
        length: u32,
        /// Result of the request.
        result: Result<(), RequestError>,
    },
}

impl Message {
    /// Returns the buffer whose bytes follow the header of this frame when this controller sends the frame. A
    /// [`Message::ForwardReply`] is built by the body, which knows the buffer.
    pub const fn payload(&self) -> Option<PayloadBuffer> {
        match *self {
            Self::Copy {
                slot,
                zeroes: false,
                ..
            } => Some(PayloadBuffer::Source(SourceSlot::Chunk(slot))),
            Self::DelayedWrite {
                slot,
                zeroes: false,
                ..
            } => Some(PayloadBuffer::Source(SourceSlot::Delayed(slot))),
            Self::Pulled {
                slot,
                zeroes: false,
                result: Ok(()),
                ..
            } => Some(PayloadBuffer::Source(SourceSlot::Pull(slot))),
            Self::DoubleWrite {
                tag, zeroes: false, ..
            }
            | Self::Forward {
                tag,
                operation: Operation::Write { .. },
                ..
            } => Some(PayloadBuffer::Request(tag)),
            _ => None,
        }
    }

    /// Returns true if the frame may arrive on a connection of this class.
    pub const fn belongs_on(&self, class: TrafficClass) -> bool {
        match self {
            Self::Copy { .. }
            | Self::Verify { .. }
            | Self::VerifyHole { .. }
            | Self::Verified { .. } => {
                matches!(class, TrafficClass::Copy)
            }
            Self::DoubleWrite { .. }
            | Self::DelayedWrite { .. }
            | Self::DelayedWritten { .. }
            | Self::NewGeneration { .. }
            | Self::GenerationReached { .. }
            | Self::CheckpointMark { .. }
            | Self::ForwardBegin { .. }
            | Self::ClientAttached
            | Self::Fence { .. }
            | Self::FenceReached { .. }
            | Self::Forward { .. }
            | Self::ForwardReply { .. } => matches!(class, TrafficClass::Sync),
            Self::Owes { .. } | Self::Pull { .. } | Self::Pulled { .. } | Self::Whole { .. } => {
                matches!(class, TrafficClass::Pull | TrafficClass::Image)
            }
            Self::Ack { .. } => matches!(class, TrafficClass::Sync | TrafficClass::Copy),
            Self::Ping => matches!(class, TrafficClass::Control | TrafficClass::Pull),
            _ => matches!(class, TrafficClass::Control),
        }
    }
}

impl Header {
    /// Returns true if the payload is a guest's or a chunk's data, which the body receives into a buffer instead of
    /// passing the payload to [`Message::decode`].
    pub const fn payload_in_buffer(&self) -> bool {
        matches!(
            self.kind,
            Kind::Copy
                | Kind::DoubleWrite
                | Kind::DelayedWrite
                | Kind::ForwardWrite
                | Kind::ForwardReply
                | Kind::Pulled
        )
    }
}

/// Returns the number of a double write in its frame and in its acknowledgement.
pub const fn double_write_id(tag: RequestTag, turn: u16) -> u32 {
    debug_assert!(tag.0 <= 0xFFFF);
    tag.0 & 0xFFFF | (turn as u32) << 16
}
