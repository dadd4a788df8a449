//! Disks, and the imports and exports that fill and copy them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// A node's right to serve a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    /// This node owns the disk and serves it.
    Serving,
    /// A migration brings the disk here; the image is incomplete.
    Receiving,
    /// In doubt: this node accepted the disk, and asks the source about the decision. I/O is held until the source
    /// answers.
    Accepted,
    /// In doubt: this node gave the disk away, and waits for the destination's confirmation. I/O is held until then.
    Relinquished,
    /// The disk was moved to another node; the image here is stale.
    Departed,
    /// This node owns the disk by its own record, but another node has had the disk since: the data directory was put
    /// back to an earlier state, or an operator claimed the disk at the other node. I/O is held.
    Outdated,
    /// An image is being copied in.
    Importing,
    /// The image cannot be opened, or has failed; see the disk's `problem`.
    Failed,
}

impl DiskState {
    /// Returns true if only another node's answer can settle the ownership of the disk.
    pub const fn in_doubt(self) -> bool {
        matches!(self, Self::Accepted | Self::Relinquished)
    }

    /// Returns the state's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Receiving => "receiving",
            Self::Accepted => "accepted",
            Self::Relinquished => "relinquished",
            Self::Departed => "departed",
            Self::Outdated => "outdated",
            Self::Importing => "importing",
            Self::Failed => "failed",
        }
    }
}

/// Counters of client I/O on a disk since the node started.
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
    /// Requests answered with an error.
    pub errors: u64,
    /// Requests forwarded to the node that owns the disk.
    pub forwarded: u64,
    /// Bytes sent compressed in migrations because the link was slow, counted before compression.
    #[serde(default)]
    pub compressed_from_bytes: u64,
    /// The same bytes after compression.
    #[serde(default)]
    pub compressed_to_bytes: u64,
}

/// The latency of client requests over about the last second.
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

/// A disk as seen by this node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Name of the disk, the same on every node.
    pub name: String,
    /// Size in bytes: a multiple of 512.
    pub size_bytes: u64,
    /// Bytes that the image occupies here, if known.
    pub allocated_bytes: Option<u64>,
    /// Path of the image: a file or block device.
    pub path: String,
    /// True if the image is the node's own (under its data directory) and is removed with the disk.
    pub managed: bool,
    /// This node's right to serve the disk.
    pub state: DiskState,
    /// The state in a sentence, with the other node and the next step.
    pub status: String,
    /// Number of owners that the disk has had, as far as this node knows.
    pub epoch: u64,
    /// The other node of the last or current migration.
    pub counterpart: Option<String>,
    /// The node that the disk was moved to, if the disk is no longer here.
    pub moved_to: Option<String>,
    /// NBD clients attached here.
    pub clients: u32,
    /// True while guest I/O is answered from this node's image.
    pub serves: bool,
    /// Id of the migration under way, outgoing or incoming.
    pub migration: Option<String>,
    /// URIs at which NBD clients can attach.
    pub nbd: Vec<String>,
    /// Counters of client I/O since the node started.
    pub io: IoCounters,
    /// Latency of client requests.
    pub latency: GuestLatency,
    /// Bytes still missing here while this node serves the disk: they are at the node that gave the disk away, or in
    /// the image that the disk was created from.
    #[serde(default)]
    pub missing_bytes: Option<u64>,
    /// True if the disk's new node still needs a part of the disk from here.
    #[serde(default)]
    pub owes: bool,
    /// True if the image of a departed disk was kept unchanged. If the disk comes back, only later writes are sent.
    #[serde(default)]
    pub kept: bool,
    /// The image that the disk was created from on this node.
    #[serde(default)]
    pub image: Option<DiskImage>,
    /// True while guest writes wait because the image has no room for them.
    #[serde(default)]
    pub lacks_room: bool,
    /// The reason why the disk cannot be used, or why the node disconnected the disk's VM.
    pub problem: Option<String>,
    /// Warnings for the operator of the disk.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The image that a disk was created from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskImage {
    /// Name of the image when the disk was created.
    pub name: String,
    /// BLAKE3 hash of the image's manifest in hexadecimal, which identifies the content.
    pub content: String,
    /// True while a part of the image has not been fetched.
    pub fetching: bool,
    /// True if unread parts are fetched in the background too.
    pub prefetch: bool,
    /// The reason why a part cannot be fetched now, if so; reads of the part wait.
    pub trouble: Option<String>,
    /// True if the repository knows that the disk needs the image, or if the disk needs nothing from the image. False
    /// if the disk was created while the repository was away.
    #[serde(default = "crate::yes")]
    pub noted: bool,
}

/// A request to create a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateDisk {
    /// Name of the disk: letters, digits, `.`, `_` and `-`, at most 128, not starting with `.` or `-`.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// Size in bytes, a positive multiple of 512. Required unless `path` or `image` names an image.
    #[serde(default)]
    #[schema(minimum = 512, multiple_of = 512)]
    pub size_bytes: Option<u64>,
    /// An image in the node's repository as the disk's initial content. The disk can be used at once; content is
    /// fetched on first read, and kept. `size_bytes` may make the disk larger than the image.
    #[serde(default)]
    pub image: Option<String>,
    /// True to fetch the rest of the image in the background too.
    #[serde(default = "crate::yes")]
    pub prefetch: bool,
    /// An existing image file or block device on the node, used in place. Without a path, the node makes an image of
    /// its own.
    #[serde(default)]
    #[schema(pattern = "^/")]
    pub path: Option<String>,
    /// Format of the image at `path`. Without a format, an image that looks like another format than raw is refused.
    #[serde(default)]
    pub format: Option<ImageFormat>,
    /// True to allocate all storage of the new image at once, so that the disk never runs out of storage unless the
    /// guest discards some. Not allowed with `path`.
    #[serde(default)]
    pub preallocate: bool,
}

/// The format of an image, overriding detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageFormat {
    /// The image's bytes are the disk's content.
    Raw,
}

/// A request to copy a raw image into a new disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportDisk {
    /// Name of the new disk.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// Path of the raw image on the node; the image's size is a multiple of 512.
    #[schema(pattern = "^/")]
    pub path: String,
    /// Format of the image. Without a format, an image that looks like another format than raw is refused.
    #[serde(default)]
    pub format: Option<ImageFormat>,
}

/// A request to copy a disk out into a raw image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportDisk {
    /// Path of the file to write on the node; the file must not exist.
    #[schema(pattern = "^/")]
    pub path: String,
}

/// A request to make a disk larger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeDisk {
    /// New size in bytes: a multiple of 512, and for a block device the size of the device. Left out: the present size
    /// of the image.
    #[serde(default)]
    #[schema(minimum = 512, multiple_of = 512)]
    pub size_bytes: Option<u64>,
}

/// A request to give up the missing part of a disk, because the node that has the part is lost for good.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AbandonMissing {
    /// Must be true: reads of the missing part fail from then on.
    #[serde(default)]
    pub lost: bool,
}

/// A request to force this node to own a disk in doubt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimDisk {
    /// Must be true: if the other node serves the disk too, writes are lost.
    #[serde(default)]
    pub force: bool,
}

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// A raw image is copied into a disk.
    Import,
    /// A disk is copied into a raw image.
    Export,
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// The job is running.
    Running,
    /// The job has succeeded.
    Done,
    /// The job failed and left nothing behind; see the job's `error`.
    Failed,
}

/// An import or export, under way or ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Id of the job, unique while the node runs.
    pub id: String,
    /// Kind of the job.
    pub kind: JobKind,
    /// Name of the disk.
    pub disk: String,
    /// Path of the raw image.
    pub path: String,
    /// State of the job.
    pub state: JobState,
    /// Total bytes to process.
    pub bytes_total: u64,
    /// Bytes processed.
    pub bytes_done: u64,
    /// The error of a failed job.
    pub error: Option<ErrorBody>,
}
