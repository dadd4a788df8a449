//! Processes with RDMA connections, and their moves.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;
use crate::yes;

/// A process that uses the RDMA library and has opened a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Process {
    /// Process id on this host.
    pub pid: u32,
    /// Name of the program, as known to the kernel.
    pub command: String,
    /// Number of queue pairs.
    pub queue_pairs: usize,
    /// Number of connected queue pairs.
    pub connected: usize,
    /// RDMA devices in use.
    pub devices: Vec<String>,
    /// Obstacles to a move, one sentence each.
    pub obstacles: Vec<String>,
}

/// Options of a move of a process or container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ProcessMoveOptions {
    /// An IP address of its own, which moves along to the interface of the same name, with all of its TCP connections.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ADDRESS", value_parser = address))]
    pub address: Option<String>,
    /// Path on the host of a file that is brought along (may be repeated). Every open file must exist at the
    /// destination.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long = "file", value_name = "PATH"))]
    pub files: Vec<String>,
    /// True to copy memory while it works, so that less is left for the pause. The move goes on without parts that
    /// could not be copied, with a warning.
    #[serde(default = "yes")]
    #[cfg_attr(feature = "clap", arg(long = "no-pre-copy", action = clap::ArgAction::SetFalse,
        help = "Copy all memory while it stands still, and none before"))]
    pub pre_copy: bool,
}

/// Checks an IP address.
#[cfg(feature = "clap")]
fn address(text: &str) -> Result<String, std::net::AddrParseError> {
    let parsed: std::net::IpAddr = text.parse()?;
    Ok(parsed.to_string())
}

/// A request to move a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateProcess {
    /// The destination node.
    pub to: String,
    /// True to make the device's objects at the destination and at partners while the process works. The move goes on
    /// without objects that could not be made ahead, with a warning.
    #[serde(default)]
    pub pre_setup: bool,
    /// Options of the move.
    #[serde(flatten)]
    pub options: ProcessMoveOptions,
}

/// A container under runc.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Container {
    /// Name of the container.
    pub id: String,
    /// Status of the container according to runc, such as running.
    pub status: String,
    /// Id of the first process on this host; absent if no process runs.
    pub pid: Option<u32>,
    /// The folder with the container's config.json.
    pub bundle: String,
    /// Processes of the container that use the RDMA library and have opened a device.
    pub rdma_processes: Vec<u32>,
    /// Obstacles of the container itself to a move, one sentence each.
    pub obstacles: Vec<String>,
}

/// A request to move a container with all of its processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateContainer {
    /// The destination node. The bundle must be there, at the same path.
    pub to: String,
    /// Options of the move.
    #[serde(flatten)]
    pub options: ProcessMoveOptions,
}

/// The phase of a process's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProcessMigrationPhase {
    /// Another move has the process or one of its partners; this move waits until the other has ended.
    Waiting,
    /// Memory is copied to the destination while the process works.
    PreCopy,
    /// The device's objects are made at the destination and at partners while the process works.
    PreSetup,
    /// The process and its partners hold new requests back until no request is in flight.
    Stopping,
    /// The process gives its device back and becomes an image.
    Dumping,
    /// The image is copied to the destination.
    Sending,
    /// The destination restores the process from the image.
    Restoring,
    /// The destination does not say whether the process runs there. The source asks until the destination answers; the
    /// process stays in its image meanwhile.
    InDoubt,
    /// The process and its partners reconnect.
    Connecting,
    /// The process is restored at the source.
    GoingBack,
    /// The process runs at the destination.
    Completed,
    /// The move ended without moving the process, or the process was lost: see the error.
    Aborted,
}

impl ProcessMigrationPhase {
    /// Returns true if the move has ended.
    pub const fn ended(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// Returns the phase's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::PreCopy => "pre_copy",
            Self::PreSetup => "pre_setup",
            Self::Stopping => "stopping",
            Self::Dumping => "dumping",
            Self::Sending => "sending",
            Self::Restoring => "restoring",
            Self::InDoubt => "in_doubt",
            Self::Connecting => "connecting",
            Self::GoingBack => "going_back",
            Self::Completed => "completed",
            Self::Aborted => "aborted",
        }
    }
}

/// A process connected to a moving process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessPartner {
    /// The partner's node.
    pub node: String,
    /// Process id of the partner on its host.
    pub pid: u32,
    /// Number of connections with the moving process.
    pub connections: usize,
}

/// The parts of a move's blackout, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProcessBreakdown {
    /// Release of the device's objects.
    pub dump_rdma: f64,
    /// CRIU's dump.
    pub dump_others: f64,
    /// Transfer of the image.
    pub transfer: f64,
    /// Restoration of the device's objects, or use of the objects made ahead, and their connection.
    pub restore_rdma: f64,
    /// CRIU's restore.
    pub full_restore: f64,
    /// Posting of the requests held back on both sides.
    pub resume: f64,
}

/// A move of a process, under way or ended. The source node knows the move until the node ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProcessMigration {
    /// Id of the move: 32 hexadecimal digits.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// Process id. In a container, the id differs between hosts: this is the last one at the source.
    pub pid: u32,
    /// The container that moves with the process; absent if the process moves by itself.
    #[serde(default)]
    pub container: Option<String>,
    /// Name of the program.
    pub command: String,
    /// The source node.
    pub from: String,
    /// The destination node.
    pub to: String,
    /// Current phase.
    pub phase: ProcessMigrationPhase,
    /// Description of the move that this one waits for; absent if there is none.
    #[serde(default)]
    pub waits_for: Option<String>,
    /// The processes at the other ends of the connections.
    pub partners: Vec<ProcessPartner>,
    /// Number of queue pairs that move.
    pub queue_pairs: usize,
    /// Bytes sent of the image, and of memory before the image.
    pub image_bytes: u64,
    /// Time of the request (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// Time of the end (RFC 3339).
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Milliseconds of pre-copy while the process worked; absent without pre-copy.
    #[serde(default)]
    pub pre_copy_ms: Option<f64>,
    /// Bytes sent by pre-copy.
    #[serde(default)]
    pub pre_copied_bytes: u64,
    /// Rounds of pre-copy: the first copies everything, and each further round the changes since the one before.
    #[serde(default)]
    pub pre_copy_rounds: u32,
    /// Milliseconds of pre-setup while the process worked; absent if no object was made ahead.
    pub pre_setup_ms: Option<f64>,
    /// Milliseconds from the first request held back until all processes went on.
    pub blackout_ms: Option<f64>,
    /// The part of the blackout spent waiting for requests in flight, in milliseconds.
    pub wait_ms: Option<f64>,
    /// The other parts of the blackout.
    pub breakdown_ms: ProcessBreakdown,
    /// The reason why the move ended without moving the process.
    pub error: Option<ErrorBody>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}
