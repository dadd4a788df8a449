//! Instructions from the controller to its body (engine or simulator).

use crate::authority::AuthorityRecord;
use crate::event::Event;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Lba};
use crate::wire::{Message, TrafficClass};

/// A slot of the locking window: the handle of a chunk and of the chunk's buffer at the source, below
/// [`Limits::window_chunks`](crate::Limits::window_chunks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkSlot(pub u16);

/// The handle of a delayed write in flight and of its buffer at the source, below
/// [`Limits::delayed_chunks`](crate::Limits::delayed_chunks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DelayedSlot(pub u16);

/// The handle of a part of the disk that the owner pulls from a node owing this part, below [`PULL_SLOTS`]. At the
/// owner the slot names the buffer into which the part is received and from which the part is written. At the owing
/// node the slot names the buffer into which the part is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PullSlot(pub u16);

/// Maximum number of parts pulled at once.
pub const PULL_SLOTS: u16 = 16;

/// Maximum sectors of a pulled part: 256 KiB.
pub const PULL_SECTORS: u32 = 512;

/// A buffer into which the source reads its own disk. A pause may reuse a buffer while a frame from the buffer is still
/// being sent. The body then starts the new read only after this frame has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceSlot {
    /// A chunk's buffer.
    Chunk(ChunkSlot),
    /// A delayed write's buffer.
    Delayed(DelayedSlot),
    /// The buffer of a part pulled by the owner.
    Pull(PullSlot),
}

/// Identifies the disk operation of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskTag {
    /// A request's operation. The data is in the request's buffer.
    Request(RequestTag),
    /// A chunk that the source reads into the slot's buffer.
    Chunk(ChunkSlot),
    /// A delayed write that the source reads into the slot's buffer.
    Delayed(DelayedSlot),
    /// A frame from the source that the destination applies.
    /// [`Controller::handle_message`](crate::Controller::handle_message) received this tag with the frame. The tag's
    /// buffer holds the payload, or the data read for a verification.
    Replica(RequestTag),
    /// The destination's flush before the destination accepts authority.
    Barrier,
    /// The source's query about the disk ahead of the locking window.
    Layout,
    /// The source's query about the whole disk before the disk leaves.
    Holes,
    /// A part that this node owes of a disk given away, read into the slot's buffer.
    Owed(PullSlot),
    /// A part that this node, the owner, has pulled, written from the slot's buffer.
    Pulled(PullSlot),
    /// The owner's flush before the owner stores a shorter list of missing blocks.
    Checkpoint,
    /// The source's flush before the source gives the disk away and keeps a part.
    OwedFlush,
    /// The flush of the image of a disk that has left and may come back.
    BaseFlush,
    /// The flush of the image of a disk that is followed.
    ActivityFlush,
}

impl DiskTag {
    /// Returns the buffer if the operation is the source's own read.
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
            | Self::BaseFlush
            | Self::ActivityFlush => None,
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

/// A node that forwards its clients' requests to this node. The number is assigned by the body and is the same on every
/// connection of the forwarder. The number is small because the controller keeps a table of forwarders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forwarder(pub u16);

/// A local disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation {
    /// Reads the extent into the tag's buffer and inspects the data as `inspect` says.
    Read {
        /// Sectors to read.
        extent: Extent,
        /// Property of the data that the controller asks for.
        inspect: Inspect,
    },
    /// Writes the tag's buffer.
    Write {
        /// Sectors to write.
        extent: Extent,
        /// True if the write must be durable before completion.
        fua: bool,
    },
    /// Makes the extent read as zeroes.
    WriteZeroes {
        /// Sectors to zero.
        extent: Extent,
        /// True if the zeroes must be durable before completion.
        fua: bool,
        /// True if the space is to be released.
        unmap: bool,
    },
    /// Keeps the tag's buffer apart from the disk, to be written by [`Action::ApplyKept`] or dropped by
    /// [`Action::DropKept`]. The body keeps operations in the order in which they are started.
    Keep {
        /// Sectors to write.
        extent: Extent,
        /// Number of the checkpoint that the operation is applied with. Never decreases.
        epoch: u64,
    },
    /// Keeps apart an operation that makes the extent read as zeroes.
    KeepZeroes {
        /// Sectors to zero.
        extent: Extent,
        /// True if the space is to be released.
        unmap: bool,
        /// As in [`Self::Keep`].
        epoch: u64,
    },
    /// Makes every completed write durable.
    Flush,
    /// Finds the length of the hole at the extent's start: the sectors that read as zeroes and take no space. Reported
    /// as [`Content::Hole`]. No data is read.
    FindHole {
        /// Sectors to examine.
        extent: Extent,
    },
    /// Finds the first hole of at least [`LONG_HOLE_SECTORS`] at or behind `from`. Reported as [`Content::LongHole`].
    /// No data is read.
    FindLongHole {
        /// First sector of the search.
        from: Lba,
    },
}

/// Minimum sectors of a long hole: 1 MiB.
pub const LONG_HOLE_SECTORS: u32 = 2048;

/// Property of freshly read data that the body determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inspect {
    /// Nothing: the body reports [`Content::Data`].
    Nothing,
    /// Test for all zeroes: the body reports [`Content::Zeroes`] or [`Content::Data`].
    Zeroes,
    /// BLAKE3 hash of the data: the body reports [`Content::Digest`].
    Digest,
}

/// A BLAKE3 hash: the root of a hash tree over the data's 1 KiB blocks.
pub type Digest = [u8; 32];

/// Result of a completed disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing was asked, or the data is not all zeroes.
    Data,
    /// All zeroes.
    Zeroes,
    /// The requested hash.
    Digest(Digest),
    /// Sectors of the hole at the extent's start; 0 where the body cannot tell.
    Hole(u32),
    /// The hole found. If the body found no hole, the range is empty and ends where the search ended or at the disk's
    /// end.
    LongHole {
        /// First sector of the hole.
        start: Lba,
        /// First sector behind the hole.
        end: Lba,
    },
}

/// An instruction to the body, carried out once. [`Controller::poll_action`](crate::Controller::poll_action) defines
/// the order per target: messages of one traffic class are sent in order, disk operations may overtake each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Starts a disk operation. The body reports completion with
    /// [`Controller::handle_disk_done`](crate::Controller::handle_disk_done).
    Disk {
        /// Identifies the operation.
        tag: DiskTag,
        /// Operation to carry out.
        operation: DiskOperation,
    },
    /// Sends a frame to the peer. If [`Message::payload`] names a buffer, the buffer's bytes follow the header, and the
    /// body keeps the buffer until they have been sent.
    Send {
        /// Connection to use.
        class: TrafficClass,
        /// The frame.
        message: Message,
    },
    /// Sends a frame to a forwarder on the connection over which the forwarder forwards.
    SendForwarder {
        /// The forwarder.
        forwarder: Forwarder,
        /// The frame.
        message: Message,
    },
    /// Drops the current migration's frames that are queued on this class's connections and of which no byte has left.
    /// A pause needs the link free at once.
    DiscardUnsent {
        /// Copy or sync.
        class: TrafficClass,
    },
    /// Answers a request. The tag and the buffer are free once the answer has left.
    Complete {
        /// Tag of the request.
        tag: RequestTag,
        /// Result for the client. A read's data is in the tag's buffer.
        result: Result<(), RequestError>,
    },
    /// Releases the buffer of a frame given to `handle_message` with this tag.
    ReleaseReplica {
        /// Tag of the frame.
        tag: RequestTag,
    },
    /// Makes the record durable. The body then calls
    /// [`Controller::handle_persisted`](crate::Controller::handle_persisted).
    Persist {
        /// Record that replaces the stored record of this disk.
        record: AuthorityRecord,
    },
    /// Releases the buffer of the data that arrived for this slot ([`Message::Pulled`]).
    ReleasePulled {
        /// Slot of the data.
        slot: PullSlot,
    },
    /// Notes that this extent is no longer missing. The note outlasts this process but not the host:
    /// [`Controller::restore_missing`](crate::Controller::restore_missing) gives the note to the next process on this
    /// host. The body takes the note before the following actions.
    NoteHere {
        /// Whole blocks of 4 KiB, except at the disk's end.
        extent: Extent,
    },
    /// Makes durable the current list of missing blocks, as returned by
    /// [`Controller::missing_to_store`](crate::Controller::missing_to_store). The body then calls
    /// [`Controller::handle_missing_stored`](crate::Controller::handle_missing_stored). After a power loss the disk
    /// lacks the stored blocks; a mixture with the previously stored list is as good.
    StoreMissing,
    /// Makes durable the activity log, or its absence, as returned by
    /// [`Controller::activity_to_store`](crate::Controller::activity_to_store). The body then calls
    /// [`Controller::handle_activity_stored`](crate::Controller::handle_activity_stored). A log is stored in one step.
    StoreActivity,
    /// Carries out on the disk all kept operations of epochs up to this one; of overlapping ones the last one counts. The
    /// body then calls [`Controller::handle_kept_applied`](crate::Controller::handle_kept_applied).
    ApplyKept {
        /// Last epoch to apply.
        through: u64,
    },
    /// Drops all kept operations but those that are being applied.
    DropKept,
    /// Reports an event to observers.
    Notify(Event),
}
