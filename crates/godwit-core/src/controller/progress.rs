//! How far a migration is, how it keeps its promise, and why one cannot start.

use core::time::Duration;

use crate::event::{Obstacle, PauseReason, Phase};
use crate::units::MigrationId;

/// How far an outgoing migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which migration.
    pub migration: MigrationId,
    /// What it does now.
    pub phase: Phase,
    /// Bytes of the disk that the current pass has finished.
    pub bytes_done: u64,
    /// Bytes of the disk that the current pass goes over in all.
    pub bytes_total: u64,
    /// Bytes of the disk that were copied in the first pass, zeroes included.
    pub bytes_copied: u64,
    /// Data bytes of copies that were sent: `bytes_copied` less what was all zeroes, plus what a
    /// pause discarded.
    pub copy_bytes_sent: u64,
    /// Data bytes of double writes that were sent.
    pub double_write_bytes_sent: u64,
    /// Bytes that verification compared, over all passes.
    pub bytes_verified: u64,
    /// Bytes that the destination lacks if the disk changes hands now, or lacked when it did.
    pub bytes_owed: u64,
    /// Whether every byte was compared and found equal.
    pub verified: bool,
    /// What is not sent, because the destination has it; nothing where all of the disk is.
    pub delta: Option<DeltaProgress>,
    /// What was promised and how it is kept.
    pub promise: PromiseProgress,
}

/// What is left out of a migration to a node that has an older copy of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaProgress {
    /// How it is known what differs.
    pub by: DeltaBy,
    /// It is being found out: nothing has been copied.
    pub comparing: bool,
    /// Bytes of the disk that the first copying pass left out, once it has begun.
    pub bytes_skipped: u64,
}

/// How it is known what differs from an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaBy {
    /// It is what was written since the disk came from there.
    Written,
    /// Both nodes read all of the disk and compared hashes.
    Compared,
}

/// How an outgoing migration keeps its promise to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromiseProgress {
    /// The longest latency promised.
    pub limit: Option<Duration>,
    /// How long requests may take at the moment: the limit, or more where the guest's take longer by
    /// themselves, or where nobody stated the limit and the migration could not end with it.
    pub allowed: Option<Duration>,
    /// Sampling periods so far in which the guest had requests.
    pub periods: u64,
    /// Those of them in which a request took longer than the limit.
    pub breached_periods: u64,
    /// Why the migration pauses now, if it does.
    pub paused: Option<PauseReason>,
    /// Pauses so far, by reason, in the order of [`PauseReason::ALL`].
    pub pauses: [u32; 3],
    /// Time spent in pauses.
    pub paused_for: Duration,
    /// Bytes of the disk that delayed writes still have to bring to the destination.
    pub delayed_bytes: u64,
    /// Data bytes of delayed writes that were sent.
    pub delayed_bytes_sent: u64,
    /// Delayed bytes that a later double write made obsolete before they were sent.
    pub delayed_bytes_cancelled: u64,
    /// Bytes per second that copies and delayed writes may take at the moment; `None` while nothing
    /// holds them back.
    pub rate_limit: Option<u64>,
    /// What keeps the migration from coming to its end, when something does.
    pub obstacle: Option<Obstacle>,
}

/// Why a migration cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// This node does not own the disk.
    #[error("this node does not serve the disk")]
    NotServing,
    /// What this node lacks of the disk is not all in an image.
    #[error("a part of it is still at the node that gave it away")]
    NeedsSource,
    /// Another migration of the disk is under way.
    #[error("another migration of the disk is under way")]
    Busy,
    /// An option is out of its range.
    #[error("the {0} is out of range")]
    Option(&'static str),
}
