//! Requests and answers of the API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::ErrorBody;
use super::promise::MigrationPromise;

/// The node itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Node {
    /// Its name, as in its certificate.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The newest node-to-node protocol it speaks.
    pub protocol_version: u16,
    /// Where it takes connections of other nodes: `HOST:PORT`.
    pub peer_listen: String,
    /// Where its data is.
    pub data_dir: String,
    /// When it started (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// CPU time that the process has used so far, in seconds.
    pub cpu_seconds: f64,
}

/// What a node knows about its right to serve a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    /// This node owns the disk and serves it.
    Serving,
    /// A migration brings the disk here; the image is incomplete.
    Receiving,
    /// In doubt: this node accepted the disk and asks the source whether it gave it away. I/O is
    /// held until the source answers.
    Accepted,
    /// This node gave the disk away and waits for the destination to confirm. I/O is held until
    /// it does.
    Relinquished,
    /// The disk was moved to another node; the image here is stale.
    Departed,
    /// An image is being copied in.
    Importing,
    /// The image cannot be opened or failed; see the disk's `problem`.
    Failed,
}

impl DiskState {
    /// Whether only another node's answer can tell who owns the disk.
    pub const fn in_doubt(self) -> bool {
        matches!(self, Self::Accepted | Self::Relinquished)
    }

    /// The state's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Receiving => "receiving",
            Self::Accepted => "accepted",
            Self::Relinquished => "relinquished",
            Self::Departed => "departed",
            Self::Importing => "importing",
            Self::Failed => "failed",
        }
    }
}

/// What clients did on a disk since the node started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoCounters {
    /// Reads answered.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Discards and write-zeroes answered.
    pub discards: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Requests that were forwarded to the node that owns the disk.
    pub forwarded: u64,
    /// Bytes that left in migrations and were compressed because the link was slow.
    #[serde(default)]
    pub compressed_from_bytes: u64,
    /// Bytes that these became.
    #[serde(default)]
    pub compressed_to_bytes: u64,
}

/// How long clients wait for their requests, over about the last second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestLatency {
    /// Median in microseconds.
    pub p50_us: u64,
    /// 99th percentile in microseconds.
    pub p99_us: u64,
    /// 99.99th percentile in microseconds.
    pub p9999_us: u64,
    /// Longest in microseconds.
    pub max_us: u64,
    /// Requests answered per second.
    pub iops: f64,
}

/// A disk as this node knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Its name: the same on every node.
    pub name: String,
    /// Its size in bytes: a multiple of 512.
    pub size_bytes: u64,
    /// Bytes that the image occupies here, when that can be told.
    pub allocated_bytes: Option<u64>,
    /// The image: a file or block device.
    pub path: String,
    /// Whether the image is the node's own (under its data directory) and goes with the disk.
    pub managed: bool,
    /// What this node knows about its right to serve the disk.
    pub state: DiskState,
    /// The state in a sentence, with the node it is about and what happens next.
    pub status: String,
    /// How many owners the disk has had, as far as this node knows.
    pub epoch: u64,
    /// The other node of the last or current migration.
    pub counterpart: Option<String>,
    /// The node that the disk was moved to, when it is not here any more.
    pub moved_to: Option<String>,
    /// NBD clients attached here.
    pub clients: u32,
    /// Whether guest I/O is answered from this node's image now.
    pub serves: bool,
    /// The migration under way, in or out.
    pub migration: Option<String>,
    /// Where NBD clients can attach, as URIs.
    pub nbd: Vec<String>,
    /// What clients did since the node started.
    pub io: IoCounters,
    /// How long clients wait.
    pub latency: GuestLatency,
    /// Whether writes of its virtual machine wait because its image has no room for them.
    #[serde(default)]
    pub lacks_room: bool,
    /// Why the disk cannot be used, when it cannot.
    pub problem: Option<String>,
    /// What whoever just created it should know.
    #[serde(default)]
    pub warnings: Vec<String>,
}

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
}

impl Policy {
    /// The policy's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DoubleWrite => "double-write",
            Self::PreCopy => "pre-copy",
            Self::Mirror => "mirror",
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

/// The options that a migration runs with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationSettings {
    /// How the disk is moved.
    pub policy: Policy,
    /// How pre-copy goes over it; nothing with another policy.
    #[serde(default)]
    pub rounds: Option<RoundSettings>,
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
    /// What the user should know about the options.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// Another node of this node's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Its name, as in its certificate.
    pub name: String,
    /// Where it takes connections: `HOST:PORT`.
    pub address: String,
    /// Whether it answered just now.
    pub reachable: bool,
    /// The protocol version that both would speak.
    pub protocol_version: Option<u16>,
    /// Whether what is in disks and memory travels encrypted between both; unknown when it did not
    /// answer.
    #[serde(default)]
    pub data_encrypted: Option<bool>,
    /// Whether disks may be compressed on the way between both; unknown when it did not answer.
    #[serde(default)]
    pub compression: Option<bool>,
    /// Why it did not answer.
    pub error: Option<ErrorBody>,
}

/// Asks for a new disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateDisk {
    /// Its name: letters, digits, `.`, `_` and `-`, at most 128, not starting with `.` or `-`.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// Its size in bytes, a positive multiple of 512. Needed unless `path` names an image.
    #[serde(default)]
    #[schema(minimum = 512, multiple_of = 512)]
    pub size_bytes: Option<u64>,
    /// An existing image file or block device on the node, used in place. Without it the node
    /// makes an image of its own.
    #[serde(default)]
    #[schema(pattern = "^/")]
    pub path: Option<String>,
    /// What the image at `path` is taken for. Without it one that looks like another format than raw is
    /// refused.
    #[serde(default)]
    pub format: Option<ImageFormat>,
    /// Whether the new image gets all of its storage at once, so that the disk never runs out of it
    /// unless its guest gives some back. Not for one at `path`.
    #[serde(default)]
    pub preallocate: bool,
}

/// What an image is taken for, whatever it looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageFormat {
    /// Its bytes are the disk's content.
    Raw,
}

/// Asks to copy a raw image into a new disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportDisk {
    /// The new disk's name.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// The raw image on the node; its size is a multiple of 512.
    #[schema(pattern = "^/")]
    pub path: String,
    /// What it is taken for. Without it one that looks like another format than raw is refused.
    #[serde(default)]
    pub format: Option<ImageFormat>,
}

/// Asks to copy a disk out into a raw image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportDisk {
    /// The file to write on the node; it must not exist.
    #[schema(pattern = "^/")]
    pub path: String,
}

/// Forces this node to own a disk that is in doubt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimDisk {
    /// Must be true: if the other node serves the disk too, writes are lost.
    #[serde(default)]
    pub force: bool,
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
    /// How it is moved.
    #[serde(default)]
    pub policy: Policy,
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

const fn yes() -> bool {
    true
}

/// Which kind of copy a job makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// A raw image becomes a disk.
    Import,
    /// A disk becomes a raw image.
    Export,
}

/// Whether a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// It runs.
    Running,
    /// It is done.
    Done,
    /// It failed and left nothing behind; see the job's `error`.
    Failed,
}

/// An import or export, under way or ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Names it while the node runs.
    pub id: String,
    /// What it does.
    pub kind: JobKind,
    /// The disk.
    pub disk: String,
    /// The file outside.
    pub path: String,
    /// Whether it runs.
    pub state: JobState,
    /// Bytes to go over in all.
    pub bytes_total: u64,
    /// Bytes gone over.
    pub bytes_done: u64,
    /// Why it failed.
    pub error: Option<ErrorBody>,
}
