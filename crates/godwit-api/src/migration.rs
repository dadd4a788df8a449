//! Moves of disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::disk::GuestLatency;
use crate::error::ErrorBody;
use crate::promise::MigrationPromise;
use crate::yes;

/// Whether a migration leaves this node or arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// This node is the source.
    Outgoing,
    /// This node is the destination.
    Incoming,
}

/// What a migration does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// Outgoing: the destination is dialled and asked to take the disk.
    Offering,
    /// Incoming: the image is filled.
    Receiving,
    /// Outgoing: every part of the disk goes to the destination once.
    Copying,
    /// Outgoing: both images are compared by hash.
    Verifying,
    /// Outgoing: the destination has everything; double writes go on until the machine has moved.
    Converged,
    /// Outgoing: guest I/O is held while what is in flight finishes.
    Draining,
    /// Outgoing: the destination is asked to accept the disk.
    Preparing,
    /// Incoming: the disk is accepted; the source decides.
    Accepted,
    /// Outgoing: the destination accepted; the source stores that it gave the disk away.
    Relinquishing,
    /// Outgoing: the disk is given away; the destination has not confirmed yet.
    Committing,
    /// The destination serves.
    Completed,
    /// It ended, and the source serves on.
    Aborted,
}

impl MigrationPhase {
    /// Whether the migration has ended.
    pub const fn ended(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// The phase's name as the API spells it.
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

/// How a disk is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// A single pass; writes to what was copied already go to both nodes.
    #[default]
    DoubleWrite,
    /// Passes over what was written since the last one, until little is left.
    PreCopy,
    /// A single pass; all writes go to both nodes from the start.
    Mirror,
    /// What is seldom written is pushed; the disk changes hands, and the destination pulls the rest.
    PushPull,
    /// The disk changes hands at once, and the destination pulls all of it.
    PostCopy,
}

impl Policy {
    /// The policy's name as the API spells it.
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

/// How pre-copy goes over a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RoundSettings {
    /// Bytes of a block of which it is remembered whether it was written.
    pub block_bytes: u64,
    /// Rounds after which the guest's writes go to both nodes if too much is left.
    pub max_rounds: u32,
    /// Most bytes that are copied while the guest is held.
    pub left_bytes: u64,
}

/// What is pushed before a disk changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PushSettings {
    /// A chunk of 64 KiB that was written so often is pushed no more.
    pub threshold: u8,
    /// Seconds after which the disk changes hands, whatever could still be pushed.
    pub longest_seconds: Option<u64>,
}

/// The options that a migration runs with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationSettings {
    /// How the disk is moved.
    pub policy: Policy,
    /// Why, where the node chose.
    #[serde(default)]
    pub policy_reason: Option<String>,
    /// How pre-copy goes over it; nothing with another policy.
    #[serde(default)]
    pub rounds: Option<RoundSettings>,
    /// What is pushed before the disk changes hands; nothing with a policy that pulls nothing.
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
    /// Most bytes per second that copies, double writes and delayed writes may take.
    pub max_bandwidth: Option<u64>,
    /// Whether both images are compared before switchover.
    pub verify: bool,
    /// Whether all of the disk is sent, whatever the destination holds of it.
    #[serde(default)]
    pub whole: bool,
    /// Whether the switchover waits for the guest's hypervisor.
    #[serde(default)]
    pub with_guest: bool,
    /// What the guest is promised, as it was settled: `p99.99<3.2ms`. Nothing when nothing is.
    #[serde(default)]
    pub sla: Option<String>,
    /// Whether the node chose the promise.
    #[serde(default)]
    pub sla_auto: bool,
    /// Whether the guest's writes stay at the source during pauses and are sent later.
    #[serde(default)]
    pub delayed_writes: bool,
    /// Most bytes per second of those; chosen by the node when left out.
    #[serde(default)]
    pub delayed_write_rate: Option<u64>,
    /// Seconds from the start within which the first pass should be over.
    #[serde(default)]
    pub deadline_seconds: Option<u64>,
    /// The network interface that is watched.
    #[serde(default)]
    pub interface: Option<String>,
    /// Most bytes per second that may leave by it, other traffic included.
    #[serde(default)]
    pub interface_budget: Option<u64>,
}

/// How far a migration is. Of an incoming migration only the size is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationProgress {
    /// Bytes of the disk that the current pass goes over in all.
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
    /// Bytes that the destination lacks if the disk changes hands now, or lacked when it did.
    #[serde(default)]
    pub bytes_owed: u64,
    /// What is left out, because the destination has it from an earlier time; nothing when all of the disk is sent.
    #[serde(default)]
    pub delta: Option<MigrationDelta>,
}

/// What is left out of a migration to a node that holds an older copy of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationDelta {
    /// How it is known what differs.
    pub by: DeltaBy,
    /// It is being found out: nothing has been copied.
    pub comparing: bool,
    /// Bytes of the disk that the first copying pass leaves out, once it has begun.
    pub bytes_skipped: u64,
}

/// How it is known what differs from an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeltaBy {
    /// It is what was written since the disk came from there.
    Written,
    /// Both nodes read all of the disk and compare hashes.
    Compared,
}

/// A migration, under way or ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Migration {
    /// Names it: 32 hexadecimal digits, the same on both nodes.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// The disk.
    pub disk: String,
    /// The node it leaves.
    pub from: String,
    /// The node it goes to.
    pub to: String,
    /// Whether this node is the source or the destination.
    pub direction: Direction,
    /// What it does now.
    pub phase: MigrationPhase,
    /// The options it runs with; an incoming migration does not know them.
    pub options: Option<MigrationSettings>,
    /// How far it is.
    pub progress: MigrationProgress,
    /// How it keeps its promise to the guest; an incoming migration does not know.
    #[serde(default)]
    pub promise: Option<MigrationPromise>,
    /// Bytes of the disk per second that the current pass finished over the last ten seconds, pauses
    /// included.
    pub rate_bytes_per_second: Option<f64>,
    /// Seconds until the current pass is done and delayed writes are sent, if it goes on like that;
    /// nothing while there is an obstacle.
    pub eta_seconds: Option<f64>,
    /// How long the disk's clients at this node wait, over about the last second.
    pub guest: Option<GuestLatency>,
    /// When it was asked for (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended (RFC 3339).
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Seconds from the accepted offer to the end, or until now.
    pub lm_seconds: Option<f64>,
    /// Why it ended without moving the disk.
    pub error: Option<ErrorBody>,
    /// Whether every byte was compared and found equal.
    pub verified: bool,
    /// Whether a part of the disk, which has moved, is still at the source only: the source is needed.
    #[serde(default)]
    pub source_needed: bool,
    /// How much that is, where the destination is asked.
    #[serde(default)]
    pub missing_bytes: Option<u64>,
    /// What the user should know about the options.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// Asks to move a disk to another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The disk.
    pub disk: String,
    /// The destination: a peer's name.
    pub to: String,
    /// The destination's pool that the image is put in; its data directory when left out.
    #[serde(default)]
    pub pool: Option<String>,
    /// The path there of the image, in one of its pools: of a new file, or of a block device that has
    /// the disk's size and loses what it holds.
    #[serde(default)]
    pub into: Option<String>,
    /// How it is moved. Left out, the node chooses, and may choose otherwise while it runs.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// With pre-copy: bytes of a block of which it is remembered whether it was written, a multiple of 4096.
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
    /// With push-pull: a chunk of 64 KiB that was written so often during the move is pushed no more.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds after which the disk changes hands, whatever could still be pushed.
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
    /// Most bytes per second that copies, double writes and delayed writes may take; double writes
    /// are never held back.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_bandwidth: Option<u64>,
    /// Compare both images by hash before switchover.
    #[serde(default)]
    pub verify: bool,
    /// Send all of the disk, whatever the destination holds of it from an earlier time.
    #[serde(default)]
    pub whole: bool,
    /// Once the destination has everything, let the guest run on here, and hand the disk over when
    /// its hypervisor has moved it: when the disk's rings are started at the destination.
    #[serde(default)]
    pub with_guest: bool,
    /// What the guest is promised: `auto` (as when left out; the node measures the guest), `off`, or
    /// a percentile and a time such as `p99.99<2ms`.
    #[serde(default)]
    pub sla: Option<String>,
    /// While the migration pauses, keep the guest's writes here and send them later.
    #[serde(default = "yes")]
    pub delayed_writes: bool,
    /// Most bytes per second of those; chosen by the node when left out.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub delayed_write_rate: Option<u64>,
    /// Seconds within which the first pass should be over. As they run out the migration takes what
    /// it needs, even where that costs the guest its promise.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub deadline_seconds: Option<u64>,
    /// The network interface that `interface_budget` is about.
    #[serde(default)]
    pub interface: Option<String>,
    /// Most bytes per second that may leave by the interface, other traffic included; above it the
    /// migration pauses.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub interface_budget: Option<u64>,
}

/// Asks to go on otherwise with a migration that is under way. What is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwitchMigration {
    /// `push-pull` or `post-copy`, whatever it was before: the disk changes hands with what is there, and the
    /// destination pulls the rest.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// With push-pull: a chunk of 64 KiB that is written so often from now on is pushed no more.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds from now after which the disk changes hands, whatever could still be pushed; when
    /// nothing is left to push when left out.
    #[serde(default)]
    pub push_seconds: Option<u64>,
    /// Most bytes per second that copies, double writes and delayed writes may take; 0 for as much as there is.
    #[serde(default)]
    pub max_bandwidth: Option<u64>,
    /// What the guest is promised: `off`, or a percentile and a time such as `p99.99<2ms`.
    #[serde(default)]
    pub sla: Option<String>,
    /// Seconds from the migration's start within which the first pass should be over; 0 for no deadline.
    #[serde(default)]
    pub deadline_seconds: Option<u64>,
}
