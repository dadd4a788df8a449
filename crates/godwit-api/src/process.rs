//! Processes with RDMA connections, and their moves.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// A process that uses the RDMA library and has opened a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Process {
    /// Its number at this host.
    pub pid: u32,
    /// Its program's name, as the kernel knows it.
    pub command: String,
    /// Its queue pairs.
    pub queue_pairs: usize,
    /// Its queue pairs that are connected.
    pub connected: usize,
    /// The RDMA devices that it uses.
    pub devices: Vec<String>,
    /// What keeps it from moving anywhere, one sentence each.
    pub obstacles: Vec<String>,
}

fn yes() -> bool {
    true
}

/// Asks for a move of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateProcess {
    /// The node to move it to.
    pub to: String,
    /// An IP address of the process's own, which moves along: its TCP connections have to be from or to it. It goes to the
    /// interface of the same name.
    #[serde(default)]
    pub address: Option<String>,
    /// Files of the process that are brought along, by their paths: what it has open has to be at the destination.
    #[serde(default)]
    pub files: Vec<String>,
    /// Whether its memory is copied while it works, so that less is left for when it stands still. A move goes on without what
    /// could not be copied, and warns.
    #[serde(default = "yes")]
    pub pre_copy: bool,
    /// Whether the device's objects are made at the destination and at partners while the process still works. A move
    /// goes on without what could not be made ahead, and warns.
    #[serde(default)]
    pub pre_setup: bool,
}

/// A container under runc.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Container {
    /// Its name.
    pub id: String,
    /// runc's word for how it is, such as running.
    pub status: String,
    /// Its first process's number at this host; absent if nothing of it runs.
    pub pid: Option<u32>,
    /// The folder with its config.json.
    pub bundle: String,
    /// Its processes that use the RDMA library and have opened a device.
    pub rdma_processes: Vec<u32>,
    /// What of the container itself keeps it from moving anywhere, one sentence each.
    pub obstacles: Vec<String>,
}

/// Asks for a move of a container, with all that runs in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateContainer {
    /// The node to move it to. Its bundle has to be there, at the same path.
    pub to: String,
    /// An IP address of the container's own, which moves along: its TCP connections have to be from or to it. It goes to
    /// the interface of the same name.
    #[serde(default)]
    pub address: Option<String>,
    /// Files that are brought along, by their paths at the host: what has been written into its root file system, for one.
    #[serde(default)]
    pub files: Vec<String>,
    /// Whether its memory is copied while it works, so that less is left for when it stands still. A move goes on without what
    /// could not be copied, and warns.
    #[serde(default = "yes")]
    pub pre_copy: bool,
}

/// What a move of a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProcessMigrationPhase {
    /// Another move has the process or one of its partners; nothing is done before that one has ended.
    Waiting,
    /// Its memory is copied to the destination, while it works.
    PreCopy,
    /// What the process will need is made at its destination and at its partners, while it works.
    PreSetup,
    /// The process and its partners keep new requests back, until nothing is in flight.
    Stopping,
    /// The process gives its device back and becomes an image.
    Dumping,
    /// The image is copied to the destination.
    Sending,
    /// The destination makes the process of the image.
    Restoring,
    /// The destination does not say whether the process runs there. It is asked until it does; the process stays in its
    /// image meanwhile.
    InDoubt,
    /// The process and its partners connect to each other anew.
    Connecting,
    /// The process is made to go on at the source.
    GoingBack,
    /// The process runs at the destination.
    Completed,
    /// It ended without moving the process, or with the process lost: see the error.
    Aborted,
}

impl ProcessMigrationPhase {
    /// Whether the move has ended.
    pub const fn ended(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// The phase's name as the API spells it.
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

/// A process that a moving one is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessPartner {
    /// The node of its host.
    pub node: String,
    /// Its number there.
    pub pid: u32,
    /// Its connections with the moving process.
    pub connections: usize,
}

/// Where the time of a move went, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProcessBreakdown {
    /// Giving the device's objects back.
    pub dump_rdma: f64,
    /// CRIU's dump.
    pub dump_others: f64,
    /// The image on its way.
    pub transfer: f64,
    /// Making the objects again, or taking what was made ahead, and connecting them.
    pub restore_rdma: f64,
    /// CRIU's restore.
    pub full_restore: f64,
    /// Both sides post what was kept back, and go on.
    pub resume: f64,
}

/// The move of a process, under way or ended; known at the node that the process leaves, until that node ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProcessMigration {
    /// Names it: 32 hexadecimal digits.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// The process. In a container it has another number at each host: this is the last at the node that it leaves.
    pub pid: u32,
    /// The container that moves with it; absent if it moves by itself.
    #[serde(default)]
    pub container: Option<String>,
    /// Its program's name.
    pub command: String,
    /// The node it leaves.
    pub from: String,
    /// The node it goes to.
    pub to: String,
    /// What it does now.
    pub phase: ProcessMigrationPhase,
    /// Which move it waits for, in words; absent if it waits for none.
    #[serde(default)]
    pub waits_for: Option<String>,
    /// The processes at the other ends of its connections.
    pub partners: Vec<ProcessPartner>,
    /// Queue pairs that move.
    pub queue_pairs: usize,
    /// Bytes of the image and of the memory before it that were sent.
    pub image_bytes: u64,
    /// When it was asked for (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended (RFC 3339).
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Milliseconds for which memory was copied while the process worked; absent if none was.
    #[serde(default)]
    pub pre_copy_ms: Option<f64>,
    /// Bytes that were copied then.
    #[serde(default)]
    pub pre_copied_bytes: u64,
    /// In so many rounds: the first copies all, and each other one what has changed since the one before.
    #[serde(default)]
    pub pre_copy_rounds: u32,
    /// Milliseconds that pre-setup took while the process worked; absent if nothing was made ahead.
    pub pre_setup_ms: Option<f64>,
    /// Milliseconds from the first request kept back until all went on.
    pub blackout_ms: Option<f64>,
    /// The part of that in which requests in flight were waited for.
    pub wait_ms: Option<f64>,
    /// Its other parts.
    pub breakdown_ms: ProcessBreakdown,
    /// Why it ended without moving the process.
    pub error: Option<ErrorBody>,
    /// What the user should know.
    pub warnings: Vec<String>,
}
