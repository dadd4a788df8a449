//! What the controller tells its body (engine, simulator) to do.

use crate::authority::AuthorityRecord;
use crate::event::Event;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Lba};
use crate::wire::{Message, TrafficClass};

/// One slot of the locking window: the handle of a chunk and of its buffer at the source, below
/// [`Limits::window_chunks`](crate::Limits::window_chunks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkSlot(pub u16);

/// The handle of a delayed write that is on its way, and of its buffer at the source, below
/// [`Limits::delayed_chunks`](crate::Limits::delayed_chunks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DelayedSlot(pub u16);

/// The handle of a part of the disk on its way from a node that owes it to the owner, which pulls it: below
/// [`PULL_SLOTS`]. At the owner it names the buffer into which the part is received and from which it is written; at
/// the other node the buffer into which it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PullSlot(pub u16);

/// Parts that are pulled at once, at most.
pub const PULL_SLOTS: u16 = 16;

/// Sectors of a part that is pulled, at most: 256 KiB.
pub const PULL_SECTORS: u32 = 512;

/// A buffer into which the source reads its own disk. A pause may hand one out again while a frame of it
/// is still being sent: then the body starts the new read only when that frame has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceSlot {
    /// A chunk's.
    Chunk(ChunkSlot),
    /// A delayed write's.
    Delayed(DelayedSlot),
    /// That of a part which the owner pulls.
    Pull(PullSlot),
}

/// Names the disk operation that a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskTag {
    /// A request's operation; its data is in the request's buffer.
    Request(RequestTag),
    /// A chunk that the source reads into the slot's buffer.
    Chunk(ChunkSlot),
    /// A delayed write that the source reads into the slot's buffer.
    Delayed(DelayedSlot),
    /// A frame from the source that the destination applies; the tag was given to
    /// [`Controller::handle_message`](crate::Controller::handle_message) with the frame, and its
    /// payload (or, for a verification, the data read) is in that tag's buffer.
    Replica(RequestTag),
    /// The destination's flush before it accepts authority.
    Barrier,
    /// What the source asks about the disk ahead of the locking window.
    Layout,
    /// What the source asks about the whole disk before that leaves.
    Holes,
    /// A part of a disk that was given away, which this node owes: it is read into the slot's buffer.
    Owed(PullSlot),
    /// A part that this node, the owner, has pulled: it is written from the slot's buffer.
    Pulled(PullSlot),
    /// The owner's flush before it stores what it lacks no longer.
    Checkpoint,
    /// The source's flush before it gives the disk away and keeps a part of it.
    OwedFlush,
    /// The flush of the image of a disk that has left, which may come back.
    BaseFlush,
}

impl DiskTag {
    /// The buffer, when the operation is the source's own read.
    pub const fn source_slot(self) -> Option<SourceSlot> {
        match self {
            Self::Chunk(slot) => Some(SourceSlot::Chunk(slot)),
            Self::Delayed(slot) => Some(SourceSlot::Delayed(slot)),
            Self::Owed(slot) => Some(SourceSlot::Pull(slot)),
            Self::Request(_)
            | Self::Replica(_)
            | Self::Barrier
            | Self::Layout
            | Self::Holes
            | Self::Pulled(_)
            | Self::Checkpoint
            | Self::OwedFlush
            | Self::BaseFlush => None,
        }
    }
}

impl From<SourceSlot> for DiskTag {
    fn from(slot: SourceSlot) -> Self {
        match slot {
            SourceSlot::Chunk(slot) => Self::Chunk(slot),
            SourceSlot::Delayed(slot) => Self::Delayed(slot),
            SourceSlot::Pull(slot) => Self::Owed(slot),
        }
    }
}

/// Names a node that forwards its clients' requests here: the body's number for it, the same on every
/// connection of that node. Small, because the controller keeps a table of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forwarder(pub u16);

/// A local disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation {
    /// Read the extent into the tag's buffer and look at what came, as `inspect` says.
    Read {
        /// Where.
        extent: Extent,
        /// What the controller wants to know of the data.
        inspect: Inspect,
    },
    /// Write the tag's buffer.
    Write {
        /// Where.
        extent: Extent,
        /// Durable before completion.
        fua: bool,
    },
    /// Make the extent read as zeroes.
    WriteZeroes {
        /// Where.
        extent: Extent,
        /// Durable before completion.
        fua: bool,
        /// Release the space.
        unmap: bool,
    },
    /// Make every completed write durable.
    Flush,
    /// Find out how much of the extent, from its start on, reads as zeroes and takes no space: report
    /// [`Content::Hole`]. No data is read.
    FindHole {
        /// Where.
        extent: Extent,
    },
    /// Find the first hole of [`LONG_HOLE_SECTORS`] or more at or behind a place: report [`Content::LongHole`]. No data is
    /// read.
    FindLongHole {
        /// The place.
        from: Lba,
    },
}

/// Sectors of a hole that is worth being found for itself: 1 MiB.
pub const LONG_HOLE_SECTORS: u32 = 2048;

/// What the body should find out about data that it has just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inspect {
    /// Nothing: report [`Content::Data`].
    Nothing,
    /// Whether it is all zeroes: report [`Content::Zeroes`] or [`Content::Data`].
    Zeroes,
    /// Its BLAKE3 hash: report [`Content::Digest`].
    Digest,
}

/// A BLAKE3 hash: the root of a hash tree over the data's 1 KiB blocks.
pub type Digest = [u8; 32];

/// What a completed disk operation found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing was asked, or the data is not all zeroes.
    Data,
    /// All zeroes.
    Zeroes,
    /// The hash that was asked for.
    Digest(Digest),
    /// So many sectors from the extent's start on are a hole; 0 where that cannot be told.
    Hole(u32),
    /// These sectors are a hole. Where the body has found none it is empty, and ends where the body has looked to, or at
    /// the disk's end.
    LongHole {
        /// The first of them.
        start: Lba,
        /// The first behind them.
        end: Lba,
    },
}

/// An instruction to the body. Each is carried out once, in the order in which
/// [`Controller::poll_action`](crate::Controller::poll_action) hands them out per target: messages
/// of one traffic class are sent in order, disk operations may overtake each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a disk operation; report it with
    /// [`Controller::handle_disk_done`](crate::Controller::handle_disk_done).
    Disk {
        /// Names it.
        tag: DiskTag,
        /// What to do.
        operation: DiskOperation,
    },
    /// Send a frame to the peer. When [`Message::payload`] names a buffer, the buffer's bytes
    /// follow the header; the body keeps the buffer until the send has left it.
    Send {
        /// The connection to use.
        class: TrafficClass,
        /// The frame.
        message: Message,
    },
    /// Send a frame to a node that forwards here, on the connection that it forwards on.
    SendForwarder {
        /// Which node.
        forwarder: Forwarder,
        /// The frame.
        message: Message,
    },
    /// Drop the frames of the current migration that wait to be sent on this class's connections and
    /// of which no byte has left. A pause wants the link free at once.
    DiscardUnsent {
        /// Copy or sync.
        class: TrafficClass,
    },
    /// Answer a request. Its tag and buffer are free afterwards, once the answer has left.
    Complete {
        /// Which.
        tag: RequestTag,
        /// How it went. A read's data is in the tag's buffer.
        result: Result<(), RequestError>,
    },
    /// A frame given to `handle_message` with this tag needs its buffer no longer.
    ReleaseReplica {
        /// Which.
        tag: RequestTag,
    },
    /// Make the record durable, then call
    /// [`Controller::handle_persisted`](crate::Controller::handle_persisted).
    Persist {
        /// What to store for this disk in place of what is stored.
        record: AuthorityRecord,
    },
    /// What arrived for this slot ([`Message::Pulled`]) needs its buffer no longer.
    ReleasePulled {
        /// Which.
        slot: PullSlot,
    },
    /// Note that the disk lacks this extent no longer, so that it outlasts this process, but not the host: the next
    /// process on this host is told by [`Controller::restore_missing`](crate::Controller::restore_missing). Before
    /// the actions that follow.
    NoteHere {
        /// Whole blocks of 4 KiB, but for the disk's end.
        extent: Extent,
    },
    /// Make durable what the disk lacks now, as [`Controller::missing_to_store`](crate::Controller::missing_to_store)
    /// says, and then call [`Controller::handle_missing_stored`](crate::Controller::handle_missing_stored). After a
    /// power loss that is what the disk lacks; a mixture with what was stored before is as good.
    StoreMissing,
    /// Tell whoever watches.
    Notify(Event),
}
