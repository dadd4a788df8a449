//! Options of a move, and link measurements that the body reports.

use core::time::Duration;

use super::governor::arrivals::GuestLoad;
use super::governor::parts::GovernorParts;
use super::limits::Limits;
use super::policy::PolicyOptions;
use super::{MAX_MOVED, MAX_VERIFIED, StartError};
use crate::sla::LatencyTarget;
use crate::units::{MigrationId, SECTOR_SIZE, Sectors};

/// Longest chunk: 16 MiB.
const MAX_CHUNK_SECTORS: u32 = (16 << 20) / SECTOR_SIZE as u32;

/// Options of a move.
#[derive(Clone, Copy, Debug)]
pub struct MigrationOptions {
    /// Id of this attempt, never used before.
    pub migration: MigrationId,
    /// Longest copy in sectors: a multiple of 8, at most 16 MiB worth.
    pub chunk_sectors: u32,
    /// Longest copy in sectors while the guest does I/O, whose requests wait for overlapping chunks: a multiple of 8,
    /// at most `chunk_sectors`. Under a promise with which no request waits for chunks, large amounts in flight use
    /// longer chunks, up to `chunk_sectors`.
    pub busy_chunk_sectors: u32,
    /// Maximum number of chunks in flight, at most [`Limits::window_chunks`].
    pub window_chunks: u16,
    /// Chunks in flight while the guest is idle, from 1 to `window_chunks`. The window grows beyond this number only
    /// while chunks are quick.
    pub idle_window_chunks: u16,
    /// Chunks in flight while the guest does I/O, from 1 to `window_chunks`. A double write queues behind the chunks in
    /// flight, at the link and at the destination's disk.
    pub busy_window_chunks: u16,
    /// Use of the disk's image that was offered to the destination.
    pub image: ImageOffer,
    /// Maximum bytes per second of copies, double writes and delayed writes together. Double writes are never held
    /// back: a guest that writes more takes the whole bandwidth, and the rest waits.
    pub max_bandwidth: Option<u64>,
    /// Promise to the guest: the migration pauses rather than break the promise (Alg. 2). Without a promise only the
    /// window holds the migration back.
    pub sla: Option<LatencyTarget>,
    /// The guest's load before the migration: copies leave room for as many requests while the guest makes as many.
    /// Only with an implicit [`Self::sla`]: an explicit promise is kept at any cost.
    pub guest_load: Option<GuestLoad>,
    /// Maximum wait for chunks in flight of a guest that wakes up. A short wait bounds the chunks in flight while the
    /// guest is idle. `None`: chunks take at most 15 ms, and 30 ms after a second of sleep.
    pub wake_up_limit: Option<Duration>,
    /// True if writes to the migrated region during a pause are acknowledged locally and sent later (Alg. 3). Otherwise
    /// such writes go to both sides even during a pause.
    pub delayed_writes: bool,
    /// Maximum bytes per second of delayed writes (`DELAYED_WRITE_RATE`); `None`: chosen by the controller.
    pub delayed_write_rate: Option<u64>,
    /// Maximum bytes per second of all traffic on the interface, including the host's other traffic. The migration
    /// pauses while [`LinkSignal::interface_rate`] exceeds this maximum.
    pub interface_budget: Option<u64>,
    /// Target end of the first pass, counted from the start. Close to the deadline the migration takes the necessary
    /// bandwidth, even at the cost of the promise.
    pub deadline: Option<Duration>,
    /// Method by which the destination gets the disk.
    pub policy: PolicyOptions,
    /// The destination's earlier copy of the disk. Only differences are sent, if they are known or can be determined.
    pub older_copy: OlderCopy,
    /// True if both images are compared by hash before switchover.
    pub verify: bool,
    /// True if holes are looked up and announced to the destination instead of being read. Requires
    /// [`Features::HOLES`](crate::wire::Features::HOLES) at the destination.
    pub find_holes: bool,
    /// Active parts of the governor.
    pub governor: GovernorParts,
    /// Condition for the switchover.
    pub switchover: Switchover,
    /// Maximum wait for any answer of the other node before the migration is given up.
    pub peer_timeout: Duration,
}

/// A destination's earlier copy of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OlderCopy {
    /// None, or none to be used.
    #[default]
    None,
    /// The disk as of the switchover of this migration, durable and untouched since.
    Since(MigrationId),
    /// An image that reads as zeroes, created or emptied for this migration.
    Zeroes,
    /// An image with arbitrary content: both images are compared first. Push and pull skips the comparison, because
    /// push and pull is to leave soon, and treats the image as [`Self::None`].
    Unknown,
}

/// Condition for the switchover once the destination has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switchover {
    /// None: the guest's I/O is held for a moment and continues at the destination.
    WhenConverged,
    /// None that is ever met: the disk stays, and the destination follows. Every acknowledged write is at both nodes.
    Never {
        /// True if the destination keeps the writes behind each checkpoint apart from its disk until told to apply them
        /// ([`Controller::mark_checkpoint`]). Requires [`Features::CHECKPOINTS`](crate::wire::Features::CHECKPOINTS) at
        /// the destination.
        ///
        /// [`Controller::mark_checkpoint`]: crate::Controller::mark_checkpoint
        checkpoints: bool,
    },
    /// [`Controller::switch_over`], or the destination's message about the guest's arrival: the guest runs on behind
    /// double writes until its hypervisor has moved the guest.
    WhenTold,
}

impl Switchover {
    /// Returns true if the disk stays.
    pub const fn is_never(self) -> bool {
        matches!(self, Self::Never { .. })
    }
}

impl MigrationOptions {
    /// Returns the defaults: 8 to 32 MiB in flight in chunks of 1 MiB, 1 MiB in chunks of 256 KiB while the guest does
    /// I/O, no promise and no limit.
    pub const fn new(migration: MigrationId) -> Self {
        Self {
            migration,
            chunk_sectors: 2048,
            busy_chunk_sectors: 512,
            window_chunks: 32,
            idle_window_chunks: 8,
            busy_window_chunks: 4,
            max_bandwidth: None,
            sla: None,
            guest_load: None,
            wake_up_limit: None,
            image: ImageOffer::None,
            delayed_writes: true,
            delayed_write_rate: None,
            interface_budget: None,
            deadline: None,
            policy: PolicyOptions::DoubleWrite,
            older_copy: OlderCopy::None,
            verify: false,
            find_holes: false,
            governor: GovernorParts::ALL,
            switchover: Switchover::WhenConverged,
            peer_timeout: Duration::from_secs(10),
        }
    }

    /// Checks the options for a disk of this size.
    ///
    /// # Errors
    /// [`StartError::Option`].
    pub(in crate::controller) fn check(
        &self,
        limits: &Limits,
        capacity: Sectors,
    ) -> Result<(), StartError> {
        if !is_length(self.chunk_sectors, MAX_CHUNK_SECTORS) {
            return Err(StartError::Option("chunk size"));
        }
        if !is_length(self.busy_chunk_sectors, self.chunk_sectors) {
            return Err(StartError::Option("chunk size for a busy guest"));
        }
        if self.window_chunks == 0 || self.window_chunks > limits.window_chunks {
            return Err(StartError::Option("window"));
        }
        if self.idle_window_chunks == 0 || self.idle_window_chunks > self.window_chunks {
            return Err(StartError::Option("window for an idle guest"));
        }
        if self.busy_window_chunks == 0 || self.busy_window_chunks > self.window_chunks {
            return Err(StartError::Option("window for a busy guest"));
        }
        if self.peer_timeout.is_zero() {
            return Err(StartError::Option("peer timeout"));
        }
        self.policy.check(self, capacity)?;
        let stays = self.switchover.is_never();
        if stays && (self.verify || !matches!(self.image, ImageOffer::None)) {
            return Err(StartError::Option(
                "comparison or image of a disk that stays",
            ));
        }
        if stays && (self.policy.push().is_some() || self.policy.rounds().is_some()) {
            return Err(StartError::Option("policy for a disk that stays"));
        }
        if capacity.bytes() > MAX_MOVED {
            return Err(StartError::Option("size of the disk"));
        }
        if self.verify && capacity.bytes() > MAX_VERIFIED {
            return Err(StartError::Option("disk that is to be verified"));
        }
        Ok(())
    }
}

/// Returns true if the sectors are whole blocks of 4 KiB, at least one and at most `most` sectors.
pub(in crate::controller) const fn is_length(sectors: u32, most: u32) -> bool {
    sectors > 0 && sectors.is_multiple_of(8) && sectors <= most
}

/// Use of the image that a disk was created from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageOffer {
    /// Unused: the destination gets the whole disk from here.
    #[default]
    None,
    /// The destination fetches unchanged blocks from the image, and gets the rest from here before the disk leaves.
    OnePlace,
    /// Like [`Self::OnePlace`], but the disk may leave earlier: the destination then lacks blocks in two places.
    TwoPlaces,
}

/// Measurements of the sync connection of an outgoing migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSignal {
    /// Bytes of frames not acknowledged by the other node: in the body's queue and in the socket.
    pub queued: u64,
    /// Smoothed round-trip time; zero if unknown.
    pub round_trip: Duration,
    /// Recent delivery rate of the connection in bytes per second; zero if unknown.
    pub delivery_rate: u64,
    /// Bytes per second leaving by the interface, including the host's other traffic; `None` if the interface is not
    /// watched.
    pub interface_rate: Option<u64>,
}
