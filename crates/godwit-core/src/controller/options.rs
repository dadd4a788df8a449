//! How a disk is moved, and what the body tells of the way.

use core::time::Duration;

use super::governor::arrivals::GuestLoad;
use super::governor::parts::GovernorParts;
use crate::sla::LatencyTarget;
use crate::units::{Bytes, MigrationId, SECTOR_SIZE};

/// How a disk is moved.
#[derive(Clone, Copy, Debug)]
pub struct MigrationOptions {
    /// Names this attempt; never used before.
    pub migration: MigrationId,
    /// Longest copy in sectors: a multiple of 8, at most 16 MiB worth.
    pub chunk_sectors: u32,
    /// Longest copy in sectors while the guest does I/O, whose requests wait for chunks that they
    /// meet: a multiple of 8, at most `chunk_sectors`. With a promise for which no request waits for
    /// chunks they become longer, up to `chunk_sectors`, when many would be in flight.
    pub busy_chunk_sectors: u32,
    /// Chunks in flight at once, at most [`Limits::window_chunks`].
    pub window_chunks: u16,
    /// Chunks in flight at once while the guest is idle, from 1 to `window_chunks`. More than these
    /// only as long as they are quick.
    pub idle_window_chunks: u16,
    /// Chunks in flight at once while the guest does I/O, from 1 to `window_chunks`: what is in
    /// flight is what a double write queues behind, at the link and at the destination's disk.
    pub busy_window_chunks: u16,
    /// What of the disk's image was offered to the destination.
    pub image: ImageOffer,
    /// Most bytes per second that copies, double writes and delayed writes together may take;
    /// double writes are never held back, so a guest that writes more than this gets it all and
    /// the rest waits.
    pub max_bandwidth: Option<u64>,
    /// What the guest was promised: the migration pauses when it would break it (Alg. 2). Without
    /// it nothing but the window holds the migration back.
    pub sla: Option<LatencyTarget>,
    /// What the guest asked for before the migration: copies leave it room for as many requests, as
    /// long as it makes them. Only with [`Self::sla`], and only where nobody stated that: a stated promise is kept
    /// whatever it costs.
    pub guest_load: Option<GuestLoad>,
    /// The longest that a guest waits for chunks in flight when it wakes up: a shorter one lets
    /// fewer be in flight while it is idle. Without it they take 15 ms at most, and 30 ms when the
    /// guest has slept for a second.
    pub wake_up_limit: Option<Duration>,
    /// While paused, acknowledge writes to the migrated region locally and send them later
    /// (Alg. 3). Without it they go to both sides even then.
    pub delayed_writes: bool,
    /// Most bytes per second of delayed writes (`DELAYED_WRITE_RATE`); chosen by the controller
    /// when left out.
    pub delayed_write_rate: Option<u64>,
    /// Most bytes per second of all traffic on the interface, the host's other traffic included:
    /// when [`LinkSignal::interface_rate`] exceeds it the migration pauses.
    pub interface_budget: Option<u64>,
    /// When the first pass should be over, from the start. As it comes near, the migration takes
    /// what it needs even where that costs the guest its promise.
    pub deadline: Option<Duration>,
    /// How the destination comes to have the disk.
    pub policy: PolicyOptions,
    /// What the destination holds of the disk. Only what differs is sent, if that is known or can be found out.
    pub older_copy: OlderCopy,
    /// Compare both images by hash before switchover.
    pub verify: bool,
    /// Ask where the disk has holes, and tell the destination of them instead of reading them. Only where
    /// it has [`Features::HOLES`](crate::wire::Features::HOLES).
    pub find_holes: bool,
    /// Which parts of the governor take part.
    pub governor: GovernorParts,
    /// What the switchover waits for.
    pub switchover: Switchover,
    /// Longest wait for any answer of the other node before the migration is given up.
    pub peer_timeout: Duration,
}

/// How the destination comes to have the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyOptions {
    /// The disk is copied once; what the guest writes where it has been copied goes to both nodes (Alg. 1 of the
    /// SmartNIC storage-migration paper).
    DoubleWrite,
    /// The disk is copied once; whatever the guest writes goes to both nodes from the start.
    Mirror,
    /// The guest writes to its own disk; what it wrote is copied again until little is left.
    PreCopy(RoundOptions),
    /// What the guest seldom writes is pushed; the disk changes hands, and the destination pulls the rest (Alg. 1
    /// to 4 of the hybrid storage-transfer paper). Only where the other node has
    /// [`Features::PULLS`](crate::wire::Features::PULLS).
    PushPull(PushOptions),
}

/// What the destination of a migration holds of an earlier time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OlderCopy {
    /// Nothing, or nothing that is to be used.
    #[default]
    None,
    /// The disk as it was when it changed hands by this migration, durably and untouched since.
    Since(MigrationId),
    /// An image that reads as zeroes: it was made for this migration, or emptied for it.
    Zeroes,
    /// An image of the disk with any content: both images are compared first. Push and pull, which is to leave soon,
    /// takes it for nothing.
    Unknown,
}

/// What push and pull pushes before the disk changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushOptions {
    /// A chunk of 64 KiB that was written so often during the migration is pushed no more. With 0 nothing is
    /// pushed: all of the disk is pulled.
    pub threshold: u8,
    /// After this long the disk changes hands, whatever could still be pushed. Without it, when nothing is left to
    /// push.
    pub longest_push: Option<Duration>,
}

impl Default for PushOptions {
    /// Three writes, as long as it takes.
    fn default() -> Self {
        Self {
            threshold: 3,
            longest_push: None,
        }
    }
}

/// How pre-copy goes over the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundOptions {
    /// Sectors of a block of which it is remembered whether it was written: a multiple of 8, from 4 KiB to 1
    /// GiB.
    pub block_sectors: u32,
    /// Rounds, the first over all of the disk included, after which the guest's writes go to both nodes if too
    /// much is left; at least 1.
    pub most_rounds: u32,
    /// What may be left to be copied while the guest is held.
    pub most_left: Bytes,
}

impl RoundOptions {
    /// The largest disk that can be moved with blocks of this length: what remembers the writes of a larger one,
    /// more than 2 GiB, may be more than there is.
    pub const fn largest_disk(&self) -> Bytes {
        Bytes((self.block_sectors as u64 * SECTOR_SIZE).saturating_mul(1 << 34))
    }
}

impl Default for RoundOptions {
    /// Blocks of 64 KiB, 8 rounds, 4 MiB.
    fn default() -> Self {
        Self {
            block_sectors: 128,
            most_rounds: 8,
            most_left: Bytes(4 << 20),
        }
    }
}

/// What the switchover waits for once the destination has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switchover {
    /// Nothing: the guest's I/O is held for a moment and goes on at the destination.
    WhenConverged,
    /// [`Controller::switch_over`], or the destination's word that the guest is there: the guest runs
    /// on behind double writes until its hypervisor has moved it.
    WhenTold,
}

impl MigrationOptions {
    /// The usual: 8 to 32 MiB in flight in chunks of 1 MiB, 1 MiB in chunks of 256 KiB while the
    /// guest does I/O, no promise and no limit.
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
}

/// What a move makes of the image that a disk was created from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageOffer {
    /// It is nothing to the destination, which gets all of the disk from here.
    #[default]
    None,
    /// The destination fetches from there what is as it is there, and gets the rest from here before the disk leaves.
    OnePlace,
    /// The same, but the disk may leave before: then the destination lacks something in two places.
    TwoPlaces,
}

/// What the body sees of the sync connection of an outgoing migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSignal {
    /// Bytes of frames that the other node has not acknowledged: in the body's queue and in the
    /// socket.
    pub queued: u64,
    /// Smoothed round trip; zero when unknown.
    pub round_trip: Duration,
    /// Bytes per second that the connection delivered lately; zero when unknown.
    pub delivery_rate: u64,
    /// Bytes per second that leave by the interface, the host's other traffic included, when it is
    /// watched.
    pub interface_rate: Option<u64>,
}
