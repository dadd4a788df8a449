//! Progress of a migration, its promise, and the errors of a start.

use core::time::Duration;

use crate::event::{Obstacle, PauseReason, Phase};
use crate::units::MigrationId;

/// Progress of an outgoing migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The migration.
    pub migration: MigrationId,
    /// Current phase.
    pub phase: Phase,
    /// Bytes of the disk that the current pass has finished.
    pub bytes_done: u64,
    /// Bytes of the disk that the current pass covers.
    pub bytes_total: u64,
    /// Bytes of the disk copied in the first pass, including zeroes.
    pub bytes_copied: u64,
    /// Data bytes of copies sent: `bytes_copied` without zeroes, plus copies discarded by a pause.
    pub copy_bytes_sent: u64,
    /// Data bytes of double writes sent.
    pub double_write_bytes_sent: u64,
    /// Bytes compared by verification, over all passes.
    pub bytes_verified: u64,
    /// Bytes that the destination lacks if the disk changes hands now, or lacked at the switchover.
    pub bytes_owed: u64,
    /// True if every byte was compared and found equal.
    pub verified: bool,
    /// Data left out because the destination has a copy; `None` if the whole disk is sent.
    pub delta: Option<DeltaProgress>,
    /// Promise and its fulfilment.
    pub promise: PromiseProgress,
}

/// Data left out of a migration to a node with an older copy of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaProgress {
    /// Method of finding the differences.
    pub by: DeltaBy,
    /// True while the differences are being determined: nothing has been copied.
    pub comparing: bool,
    /// Bytes of the disk left out by the first copying pass, once the pass has begun.
    pub bytes_skipped: u64,
}

/// Method of finding the differences from an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaBy {
    /// The blocks written since the disk came from the destination.
    Written,
    /// Both nodes read the whole disk and compared hashes.
    Compared,
}

/// Fulfilment of the promise to the guest by an outgoing migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromiseProgress {
    /// Longest promised latency.
    pub limit: Option<Duration>,
    /// Current bound on requests: the limit, or more if the guest's requests take longer without the migration, or if
    /// the migration could not end under an implicit limit.
    pub allowed: Option<Duration>,
    /// Sampling periods so far with guest requests.
    pub periods: u64,
    /// Part of `periods` in which a request exceeded the limit.
    pub breached_periods: u64,
    /// Reason for the current pause, if any.
    pub paused: Option<PauseReason>,
    /// Pauses so far, by reason, in the order of [`PauseReason::ALL`].
    pub pauses: [u32; 3],
    /// Time spent in pauses.
    pub paused_for: Duration,
    /// Bytes of the disk still to be sent by delayed writes.
    pub delayed_bytes: u64,
    /// Data bytes of delayed writes sent.
    pub delayed_bytes_sent: u64,
    /// Delayed bytes made obsolete by a later double write before they were sent.
    pub delayed_bytes_cancelled: u64,
    /// Current bytes per second of copies and delayed writes; `None` while unbounded.
    pub rate_limit: Option<u64>,
    /// The obstacle between the migration and its end, if any.
    pub obstacle: Option<Obstacle>,
}

/// Reason why a migration cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// This node does not own the disk.
    #[error("this node does not serve the disk")]
    NotServing,
    /// Some missing blocks of the disk are not in an image.
    #[error("a part of it is still at the node that gave it away")]
    NeedsSource,
    /// Another migration of the disk is under way.
    #[error("another migration of the disk is under way")]
    Busy,
    /// An option is out of range.
    #[error("the {0} is out of range")]
    Option(&'static str),
}
