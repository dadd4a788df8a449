//! Migrations of disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::disk::GuestLatency;
use crate::error::ErrorBody;
use crate::options::{MigrationSettings, MoveOptions};
use crate::promise::MigrationPromise;

/// The direction of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// This node is the source.
    Outgoing,
    /// This node is the destination.
    Incoming,
}

/// The phase of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// Outgoing: the source connects to the destination, and offers the disk.
    Offering,
    /// Incoming: the image is being filled.
    Receiving,
    /// Outgoing: every part of the disk is copied to the destination once.
    Copying,
    /// Outgoing: both images are compared by hash.
    Verifying,
    /// Outgoing: the destination has everything; double writes go on until the VM has moved.
    Converged,
    /// Outgoing: the disk stays, and every write is acknowledged once the destination has the write, too.
    Following,
    /// Outgoing: guest I/O is held while requests in flight finish.
    Draining,
    /// Outgoing: the destination is asked to accept the disk.
    Preparing,
    /// Incoming: the disk is accepted; the source decides.
    Accepted,
    /// Outgoing: the destination has accepted; the source stores durably that the disk is given away.
    Relinquishing,
    /// Outgoing: the disk is given away; the destination has not confirmed yet.
    Committing,
    /// The destination serves the disk.
    Completed,
    /// The migration has ended, and the source still serves the disk.
    Aborted,
}

impl MigrationPhase {
    /// Returns true if the migration has ended.
    pub const fn ended(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// Returns the phase's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Offering => "offering",
            Self::Receiving => "receiving",
            Self::Copying => "copying",
            Self::Verifying => "verifying",
            Self::Converged => "converged",
            Self::Following => "following",
            Self::Draining => "draining",
            Self::Preparing => "preparing",
            Self::Accepted => "accepted",
            Self::Relinquishing => "relinquishing",
            Self::Committing => "committing",
            Self::Completed => "completed",
            Self::Aborted => "aborted",
        }
    }
}

/// The progress of a migration. For an incoming migration, only the size is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationProgress {
    /// Bytes of the disk in the current pass.
    pub bytes_total: u64,
    /// Bytes of the disk that the current pass has finished.
    pub bytes_done: u64,
    /// Bytes of the disk that the first pass has copied, zeroes included.
    pub bytes_copied: u64,
    /// Data bytes of copies that were sent.
    pub bytes_sent: u64,
    /// Data bytes of double writes that were sent.
    pub double_write_bytes: u64,
    /// Bytes compared by verification.
    pub bytes_verified: u64,
    /// Bytes that the destination would lack if the disk changed hands now, or lacked when the disk did.
    #[serde(default)]
    pub bytes_owed: u64,
    /// The part left out because the destination holds an older copy; absent if the whole disk is sent.
    #[serde(default)]
    pub delta: Option<MigrationDelta>,
}

/// The part of a disk left out of a migration to a node that holds an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationDelta {
    /// Method of finding the differences.
    pub by: DeltaBy,
    /// True while the differences are being determined; no data has been copied yet.
    pub comparing: bool,
    /// Bytes of the disk that the first copying pass leaves out, once the pass has begun.
    pub bytes_skipped: u64,
}

/// The method of finding the differences from an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeltaBy {
    /// The node recorded all writes since the disk came from the other node.
    Written,
    /// Both nodes read the whole disk and compare hashes.
    Compared,
}

/// A migration, under way or ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// Id of the migration: 32 hexadecimal digits, the same on both nodes.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// Name of the disk.
    pub disk: String,
    /// The source node.
    pub from: String,
    /// The destination node.
    pub to: String,
    /// Direction of the migration, as seen by this node.
    pub direction: Direction,
    /// Current phase.
    pub phase: MigrationPhase,
    /// Options in effect; absent for an incoming migration.
    pub options: Option<MigrationSettings>,
    /// Progress of the migration.
    pub progress: MigrationProgress,
    /// State of the promise to the guest; absent for an incoming migration.
    #[serde(default)]
    pub promise: Option<MigrationPromise>,
    /// Bytes of the disk per second finished by the current pass over the last ten seconds, pauses included.
    pub rate_bytes_per_second: Option<f64>,
    /// Estimated seconds until the current pass is done and delayed writes are sent; absent while there is an obstacle.
    pub eta_seconds: Option<f64>,
    /// Latency of the disk's clients at this node, over about the last second.
    pub guest: Option<GuestLatency>,
    /// Time of the request (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// Time of the end (RFC 3339).
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Seconds from the accepted offer to the end, or until now.
    pub lm_seconds: Option<f64>,
    /// The reason why the migration ended without moving the disk.
    pub error: Option<ErrorBody>,
    /// True if every byte was compared and found equal.
    pub verified: bool,
    /// True while a part of the moved disk is still at the source only: the source is needed.
    #[serde(default)]
    pub source_needed: bool,
    /// Bytes still at the source, if the answering node is the destination.
    #[serde(default)]
    pub missing_bytes: Option<u64>,
    /// Warnings about the options.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// A request to move a disk to another node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Name of the disk.
    pub disk: String,
    /// The destination: a peer's name.
    pub to: String,
    /// The destination's pool for the image; the data directory if left out.
    pub pool: Option<String>,
    /// Path of the image in one of the destination's pools: a new file, or a block device of the disk's size, whose
    /// content is lost.
    pub into: Option<String>,
    /// True to let the guest run on here once the destination has everything. The disk is handed over when the guest's
    /// hypervisor has moved the guest: when the disk's rings are started at the destination.
    #[serde(default)]
    pub with_guest: bool,
    /// Options of the move.
    #[serde(flatten)]
    pub options: MoveOptions,
}
