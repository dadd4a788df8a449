//! The frames that two controllers exchange once their connections are up.

use core::num::NonZeroU64;

use super::TrafficClass;
use super::header::{Header, Kind};
use crate::action::{ChunkSlot, DelayedSlot, Digest, PullSlot, SourceSlot};
use crate::event::AbortReason;
use crate::request::{Operation, RequestError, RequestTag};
use crate::units::{Epoch, Extent, Generation, Lba, MigrationId};

/// Longest payload of a frame whose payload is not a guest's or a chunk's data.
pub(super) const INLINE_LIMIT: usize = 32;

/// Where the body of an outgoing frame takes its payload from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadBuffer {
    /// The buffer of a guest's request.
    Request(RequestTag),
    /// A buffer of what the source read of its own disk.
    Source(SourceSlot),
}

/// What an owner has taken of what a session forwarded, all connections before included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Taken {
    /// The owner does not know: the session is new to its process, or to its time as the owner.
    Unknown,
    /// Nothing.
    Nothing,
    /// Everything up to the request of this number.
    Through(u32),
}

/// A frame between two controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Asks for a [`Message::Pong`], to see that the peer lives. On a connection on which an owner pulls, its sign of life, which
    /// is not answered.
    Ping,
    /// Answers a ping.
    Pong,
    /// Source to destination: flush, and accept `epoch` durably.
    Prepare {
        /// Which migration.
        migration: MigrationId,
        /// The epoch in which the destination will serve.
        epoch: Epoch,
        /// More than one party may have written: see [`Message::Fence`].
        shared: bool,
        /// The destination will lack what [`Message::Lacks`] told of before.
        lacks: bool,
    },
    /// Destination to source: done; I hold I/O until you commit or abort.
    Prepared {
        /// Which migration.
        migration: MigrationId,
    },
    /// Source to destination: I gave the disk away durably; serve. Repeated until confirmed.
    Commit {
        /// Which migration.
        migration: MigrationId,
        /// The epoch in which the destination serves.
        epoch: Epoch,
    },
    /// Destination to source: I serve, durably.
    Committed {
        /// Which migration.
        migration: MigrationId,
    },
    /// The sender ended the migration. From the source it is final: it serves on.
    Abort {
        /// Which migration.
        migration: MigrationId,
        /// Why.
        reason: AbortReason,
    },
    /// Destination to source: I accepted; did you commit or abort?
    Query {
        /// Which migration.
        migration: MigrationId,
    },
    /// Destination to source: the guest's hypervisor has moved the guest here.
    GuestArrived {
        /// Which migration.
        migration: MigrationId,
    },
    /// A chunk of the first pass. Without `zeroes` its data follows.
    Copy {
        /// The source's slot, returned in the ack.
        slot: ChunkSlot,
        /// The generation it was read in.
        generation: Generation,
        /// Where it belongs.
        extent: Extent,
        /// It is all zeroes; no data follows.
        zeroes: bool,
    },
    /// A guest's write to the migrated region. Without `zeroes` its data follows.
    DoubleWrite {
        /// The source's request, in whose buffer the data is: less than 65,536.
        tag: RequestTag,
        /// Tells double writes apart whose requests had the same tag one after the other: the guest does
        /// not wait for their acknowledgements, and those need not come in order.
        turn: u16,
        /// The generation it was sent in.
        generation: Generation,
        /// Where it belongs.
        extent: Extent,
        /// It zeroes the extent; no data follows.
        zeroes: bool,
        /// The zeroed space may be released.
        unmap: bool,
    },
    /// A copy (on the copy connection) or double write (on the sync connection) is on the
    /// destination's disk, or failed.
    Ack {
        /// The slot of a copy, or what [`double_write_id`] makes of a double write's tag and turn.
        tag: u32,
        /// The generation of the frame.
        generation: Generation,
        /// Whether it worked.
        result: Result<(), RequestError>,
    },
    /// Read the extent and compare its hash with this one.
    Verify {
        /// The source's slot, returned in the answer.
        slot: ChunkSlot,
        /// The generation it was read in.
        generation: Generation,
        /// What to read.
        extent: Extent,
        /// The source's hash.
        digest: Digest,
    },
    /// Look whether all of the extent reads as zeroes: it is a hole at the source. Answered by
    /// [`Message::Verified`]. Only for nodes with [`Features::HOLES`](super::Features::HOLES).
    VerifyHole {
        /// The source's slot, returned in the answer.
        slot: ChunkSlot,
        /// The generation in which the source looked.
        generation: Generation,
        /// Where to look.
        extent: Extent,
    },
    /// The answer to a verification.
    Verified {
        /// The slot of the question.
        slot: ChunkSlot,
        /// The generation of the question.
        generation: Generation,
        /// Whether the hashes are equal, or the destination's disk failed.
        result: Result<bool, RequestError>,
    },
    /// Data of the migrated region that the guest wrote while the migration paused, or whose double
    /// write a pause gave up. Without `zeroes` it follows.
    DelayedWrite {
        /// The source's slot, returned in the answer.
        slot: DelayedSlot,
        /// The generation it was read in.
        generation: Generation,
        /// Where it belongs.
        extent: Extent,
        /// It is all zeroes; no data follows.
        zeroes: bool,
    },
    /// A delayed write is on the destination's disk, or failed.
    DelayedWritten {
        /// The slot of the frame.
        slot: DelayedSlot,
        /// The generation of the frame.
        generation: Generation,
        /// Whether it worked.
        result: Result<(), RequestError>,
    },
    /// A pause began: copies and verifications of older generations must not be carried out any
    /// more. Answered at once.
    NewGeneration {
        /// The generation of all that follows on this connection.
        generation: Generation,
    },
    /// Everything that the source sent on the sync connection before this generation has arrived.
    GenerationReached {
        /// The generation of the question.
        generation: Generation,
    },
    /// Forwarder to owner: what this connection forwards from here on belongs to this session. The first
    /// frame of its kind on a connection, and answered by a [`Message::Fence`] unless the connection is the
    /// one on which the owner received the disk.
    ForwardBegin {
        /// Names the forwarding process's stay away from this disk; never used again.
        session: u64,
    },
    /// Forwarder to owner: a client has attached to the forwarder. What other forwarders have sent and the
    /// owner has not taken is void.
    ClientAttached,
    /// Owner to forwarder: everything forwarded that the owner has not taken is void, up to
    /// [`Message::FenceReached`]. The forwarder sends what its clients still wait for again.
    Fence {
        /// Counts the fences of a session.
        number: u32,
        /// What of this session was taken before.
        taken: Taken,
        /// Others than this forwarder may have written, so that a write which may have been done must not
        /// be done again.
        shared: bool,
        /// A request of this session has failed.
        failed: bool,
    },
    /// Forwarder to owner: what follows was sent after the fence was seen.
    FenceReached {
        /// The fence.
        number: u32,
    },
    /// I/O of a client that stayed at the node which served before. A write's data follows.
    Forward {
        /// The sender's request, returned in the reply.
        tag: RequestTag,
        /// Counts what a session has forwarded, resent requests included; it wraps around.
        number: u32,
        /// What the client asked.
        operation: Operation,
    },
    /// Source to destination, before [`Message::Prepare`]: these sectors stay at the source, and are to be pulled
    /// once the destination serves.
    Lacks {
        /// The first of them.
        start: Lba,
        /// How many.
        sectors: u32,
        /// How often the guest wrote there during the migration: what it wrote more often is pulled first.
        heat: u8,
        /// Of a disk on an image: these are at the source, and what is told of without this is in the image.
        at_source: bool,
    },
    /// To the owner from the node that gave it the disk: as far as that knows, the owner lacks a part of the disk that was given away by
    /// this migration. The owner pulls it on this connection, or answers with [`Message::Whole`].
    Owes {
        /// Which migration.
        migration: MigrationId,
        /// The most bytes per second that the owner may pull, if the migration had a bound. Older nodes tell of none.
        max_bandwidth: Option<NonZeroU64>,
    },
    /// From the owner to the node that gave it the disk: send this.
    Pull {
        /// The owner's slot, returned in the answer.
        slot: PullSlot,
        /// What to send.
        extent: Extent,
    },
    /// To the owner: what it pulled. Without `zeroes` and an error its data follows.
    Pulled {
        /// The slot of the question.
        slot: PullSlot,
        /// The extent of the question.
        extent: Extent,
        /// It is all zeroes; no data follows.
        zeroes: bool,
        /// Whether it could be read.
        result: Result<(), RequestError>,
    },
    /// From the owner: it lacks nothing that was given away by this migration, durably.
    Whole {
        /// Which migration.
        migration: MigrationId,
    },
    /// The answer to forwarded I/O. A successful read's data follows.
    ForwardReply {
        /// The request of the other side.
        tag: RequestTag,
        /// Its number.
        number: u32,
        /// Bytes of data that follow: a successful read's length, else 0.
        length: u32,
        /// How it went.
        result: Result<(), RequestError>,
    },
}

impl Message {
    /// The buffer whose bytes follow the header of this frame when this controller sends it. A
    /// [`Message::ForwardReply`] is built by the body, which knows its buffer.
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

    /// Whether the frame may arrive on a connection of this class.
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
    /// Whether the payload is a guest's or a chunk's data, which the body receives into a buffer
    /// instead of handing it to [`Message::decode`].
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

/// The name of a double write in its frame and in its acknowledgement.
pub const fn double_write_id(tag: RequestTag, turn: u16) -> u32 {
    debug_assert!(tag.0 <= 0xFFFF);
    tag.0 & 0xFFFF | (turn as u32) << 16
}
