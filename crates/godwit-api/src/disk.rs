//! Disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// This node owns the disk by its own record, and another node has had it since: its data directory was put back to an
    /// earlier state, or an operator claimed the disk there. I/O is held.
    Outdated,
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
            Self::Outdated => "outdated",
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
    /// Bytes that are still at the node which gave the disk away, or in the image that it was created from, while this
    /// node serves it without.
    #[serde(default)]
    pub missing_bytes: Option<u64>,
    /// Whether the node that the disk moved to still needs a part of it from here.
    #[serde(default)]
    pub owes: bool,
    /// Whether the image of the disk, which has left, was kept as the disk was then: if it comes back, only what was
    /// written since is sent.
    #[serde(default)]
    pub kept: bool,
    /// The image that it was created from here.
    #[serde(default)]
    pub image: Option<DiskImage>,
    /// Whether writes of its virtual machine wait because its image has no room for them.
    #[serde(default)]
    pub lacks_room: bool,
    /// Why the disk cannot be used, when it cannot, or why the node disconnected its virtual machine.
    pub problem: Option<String>,
    /// What whoever created it, or looks after it, should know.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The image that a disk was created from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskImage {
    /// Its name then.
    pub name: String,
    /// What stands for its content: its manifest's BLAKE3 hash in hexadecimal.
    pub content: String,
    /// Whether a part of it has not been fetched yet.
    pub fetching: bool,
    /// Whether what nobody reads is fetched, too.
    pub prefetch: bool,
    /// Why a part cannot be fetched now, when that is so: reads of it wait.
    pub trouble: Option<String>,
    /// Whether the repository knows that the disk needs it, if it does. It does not yet where the disk was created while the
    /// repository was away.
    #[serde(default = "crate::yes")]
    pub noted: bool,
}

/// Asks for a new disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateDisk {
    /// Its name: letters, digits, `.`, `_` and `-`, at most 128, not starting with `.` or `-`.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// Its size in bytes, a positive multiple of 512. Needed unless `path` or `image` names an image.
    #[serde(default)]
    #[schema(minimum = 512, multiple_of = 512)]
    pub size_bytes: Option<u64>,
    /// An image of the node's repository that the disk begins as. It can be used at once; what it has is fetched as
    /// it is read, and kept. `size_bytes` may make it larger.
    #[serde(default)]
    pub image: Option<String>,
    /// Whether the rest of that image is fetched in the background, too.
    #[serde(default = "crate::yes")]
    pub prefetch: bool,
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

/// Asks to make a disk larger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeDisk {
    /// Its size from now on, in bytes: a multiple of 512, and of a block device what that has. Left out: what the image
    /// has by now.
    #[serde(default)]
    #[schema(minimum = 512, multiple_of = 512)]
    pub size_bytes: Option<u64>,
}

/// Goes on without what a disk lacks, because the node that has it is lost for good.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AbandonMissing {
    /// Must be true: reads of what is missing fail from then on.
    #[serde(default)]
    pub lost: bool,
}

/// Forces this node to own a disk that is in doubt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimDisk {
    /// Must be true: if the other node serves the disk too, writes are lost.
    #[serde(default)]
    pub force: bool,
}
