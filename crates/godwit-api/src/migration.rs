//! Migrations of disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::disk::GuestLatency;
use crate::error::ErrorBody;
use crate::promise::MigrationPromise;
use crate::yes;

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

/// The policy of a disk's move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// A single pass; writes to copied parts go to both nodes.
    #[default]
    DoubleWrite,
    /// Passes over the blocks written since the previous pass, until little is left.
    PreCopy,
    /// A single pass; all writes go to both nodes from the start.
    Mirror,
    /// Seldom written chunks are pushed; then the disk changes hands, and the destination pulls the rest.
    PushPull,
    /// The disk changes hands at once, and the destination pulls everything.
    PostCopy,
}

impl Policy {
    /// Returns the policy's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DoubleWrite => "double-write",
            Self::PreCopy => "pre-copy",
            Self::Mirror => "mirror",
            Self::PushPull => "push-pull",
            Self::PostCopy => "post-copy",
        }
    }
}

/// The settings of pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RoundSettings {
    /// Bytes of a block in the record of written blocks.
    pub block_bytes: u64,
    /// Rounds after which the guest's writes go to both nodes if too much is left.
    pub max_rounds: u32,
    /// Most bytes that are copied while the guest is held.
    pub left_bytes: u64,
}

/// The settings of the push phase before a disk changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PushSettings {
    /// Number of writes after which a chunk of 64 KiB is no longer pushed.
    pub threshold: u8,
    /// Seconds after which the disk changes hands, even if chunks are left to push.
    pub longest_seconds: Option<u64>,
}

/// The options of a migration in effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationSettings {
    /// Policy of the move.
    pub policy: Policy,
    /// The reason for the policy, if the node chose it.
    #[serde(default)]
    pub policy_reason: Option<String>,
    /// Settings of pre-copy; absent with another policy.
    #[serde(default)]
    pub rounds: Option<RoundSettings>,
    /// Settings of the push phase; absent with a policy that pulls nothing.
    #[serde(default)]
    pub push: Option<PushSettings>,
    /// Most bytes in flight from the source's disk to the destination's.
    pub window_bytes: u64,
    /// Bytes in flight while the guest is idle; up to `window_bytes` while copies are quick.
    #[serde(default)]
    pub idle_window_bytes: u64,
    /// Most bytes in flight while the guest does I/O.
    #[serde(default)]
    pub busy_window_bytes: u64,
    /// Bytes per copy.
    pub chunk_bytes: u64,
    /// Bytes per copy while the guest does I/O.
    #[serde(default)]
    pub busy_chunk_bytes: u64,
    /// Most bytes per second of copies, double writes and delayed writes.
    pub max_bandwidth: Option<u64>,
    /// True if both images are compared before switchover.
    pub verify: bool,
    /// True if the whole disk is sent, even if the destination holds an older copy.
    #[serde(default)]
    pub whole: bool,
    /// True if the switchover waits for the guest's hypervisor.
    #[serde(default)]
    pub with_guest: bool,
    /// The latency promised to the guest, such as `p99.99<3.2ms`; absent without a promise.
    #[serde(default)]
    pub sla: Option<String>,
    /// True if the node chose the promise.
    #[serde(default)]
    pub sla_auto: bool,
    /// True if the guest's writes stay at the source during pauses and are sent later.
    #[serde(default)]
    pub delayed_writes: bool,
    /// Most bytes per second of delayed writes; chosen by the node if absent.
    #[serde(default)]
    pub delayed_write_rate: Option<u64>,
    /// Seconds from the start within which the first pass should end.
    #[serde(default)]
    pub deadline_seconds: Option<u64>,
    /// The network interface that is watched.
    #[serde(default)]
    pub interface: Option<String>,
    /// Most bytes per second that may leave through the interface, other traffic included.
    #[serde(default)]
    pub interface_budget: Option<u64>,
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Name of the disk.
    pub disk: String,
    /// The destination: a peer's name.
    pub to: String,
    /// The destination's pool for the image; the data directory if left out.
    #[serde(default)]
    pub pool: Option<String>,
    /// Path of the image in one of the destination's pools: a new file, or a block device of the disk's size, whose
    /// content is lost.
    #[serde(default)]
    pub into: Option<String>,
    /// Policy of the move. Left out, the node chooses, and may choose again during the migration.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// With pre-copy: bytes of a block in the record of written blocks, a multiple of 4096.
    #[serde(default)]
    #[schema(minimum = 4096, maximum = 1_073_741_824, multiple_of = 4096)]
    pub round_block_bytes: Option<u64>,
    /// With pre-copy: rounds, the first over the whole disk, after which writes go to both nodes.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_rounds: Option<u32>,
    /// With pre-copy: most bytes that are copied while the guest is held.
    #[serde(default)]
    pub round_left_bytes: Option<u64>,
    /// With push-pull: number of writes during the move after which a chunk of 64 KiB is no longer pushed.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds after which the disk changes hands, even if chunks are left to push.
    #[serde(default)]
    pub push_seconds: Option<u64>,
    /// Most bytes in flight, at least one chunk.
    #[serde(default)]
    #[schema(minimum = 4096, maximum = 33_554_432)]
    pub window_bytes: Option<u64>,
    /// Bytes per copy: a multiple of 4096, at most 16 MiB.
    #[serde(default)]
    #[schema(minimum = 4096, maximum = 16_777_216, multiple_of = 4096)]
    pub chunk_bytes: Option<u64>,
    /// Most bytes per second of copies, double writes and delayed writes; double writes are never held back.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_bandwidth: Option<u64>,
    /// True to compare both images by hash before switchover.
    #[serde(default)]
    pub verify: bool,
    /// True to send the whole disk, even if the destination holds an older copy.
    #[serde(default)]
    pub whole: bool,
    /// True to let the guest run on here once the destination has everything. The disk is handed over when the guest's
    /// hypervisor has moved the guest: when the disk's rings are started at the destination.
    #[serde(default)]
    pub with_guest: bool,
    /// The latency promised to the guest: `auto` (the default; the node measures the guest), `off`, or a percentile and
    /// a time such as `p99.99<2ms`.
    #[serde(default)]
    pub sla: Option<String>,
    /// True to keep the guest's writes here while the migration pauses, and to send them later.
    #[serde(default = "yes")]
    pub delayed_writes: bool,
    /// Most bytes per second of delayed writes; chosen by the node if left out.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub delayed_write_rate: Option<u64>,
    /// Seconds within which the first pass should end. Near the deadline, the migration takes the bandwidth that it
    /// needs, even if the promise to the guest is broken.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub deadline_seconds: Option<u64>,
    /// The network interface of `interface_budget`.
    #[serde(default)]
    pub interface: Option<String>,
    /// Most bytes per second that may leave through the interface, other traffic included; above the budget the
    /// migration pauses.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub interface_budget: Option<u64>,
}

/// A request to change the options of a migration under way. Options that are left out stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwitchMigration {
    /// `push-pull` or `post-copy`, whatever the policy before: the disk changes hands with the data already sent, and
    /// the destination pulls the rest.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// With push-pull: number of writes from now on after which a chunk of 64 KiB is no longer pushed.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds from now after which the disk changes hands, even if chunks are left to push. Left out,
    /// the disk changes hands when no chunk is left to push.
    #[serde(default)]
    pub push_seconds: Option<u64>,
    /// Most bytes per second of copies, double writes and delayed writes; 0 for no limit.
    #[serde(default)]
    pub max_bandwidth: Option<u64>,
    /// The latency promised to the guest: `off`, or a percentile and a time such as `p99.99<2ms`.
    #[serde(default)]
    pub sla: Option<String>,
    /// Seconds from the migration's start within which the first pass should end; 0 for no deadline.
    #[serde(default)]
    pub deadline_seconds: Option<u64>,
}
