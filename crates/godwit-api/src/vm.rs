//! Virtual machines in the API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;
use crate::migration::{MigrateRequest, Migration, Policy};
use crate::nic::RunNic;
use crate::yes;

/// What a VM does, as its node knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Its QEMU is being started.
    Starting,
    /// It runs.
    Running,
    /// Its QEMU is there, the guest stands still.
    Paused,
    /// Its QEMU is there, the guest has shut down, panicked or met an error.
    Halted,
    /// It arrives from another node.
    Incoming,
    /// No QEMU runs it.
    Stopped,
    /// It moved to another node.
    Departed,
}

impl VmState {
    /// Every state.
    pub const ALL: [Self; 7] = [
        Self::Starting,
        Self::Running,
        Self::Paused,
        Self::Halted,
        Self::Incoming,
        Self::Stopped,
        Self::Departed,
    ];

    /// The state's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Halted => "halted",
            Self::Incoming => "incoming",
            Self::Stopped => "stopped",
            Self::Departed => "departed",
        }
    }
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name: the same on every node.
    pub name: String,
    /// What it does.
    pub state: VmState,
    /// The state in a sentence.
    pub status: String,
    /// Its disks, in the order in which the guest sees them.
    pub disks: Vec<String>,
    /// Where it came from: `run`, `adopted`, or the node that it moved from.
    pub origin: String,
    /// The node that it moved to.
    pub moved_to: Option<String>,
    /// The migration under way.
    pub migration: Option<String>,
    /// The process id of its QEMU.
    pub pid: Option<u32>,
    /// Which QEMU runs it.
    pub qemu_version: Option<String>,
    /// The socket of QEMU's monitor. The node holds its connection.
    pub qmp: String,
    /// The socket of the guest's first serial port, when the node has one.
    pub console: Option<String>,
    /// Where QEMU's messages are, when the node started it.
    pub log: Option<String>,
    /// Its memory, when the node knows of a memory pool for it.
    #[serde(default)]
    pub memory: Option<VmMemory>,
    /// The program and the words with which it is started here, some of which differ from node to node.
    #[serde(default)]
    pub command: Vec<String>,
    /// What runs its guest's instructions: `kvm` or `tcg`; nothing when it is neither.
    #[serde(default)]
    pub accelerator: Option<String>,
    /// What is wrong with it.
    pub problem: Option<String>,
    /// What who started it should know.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The memory of a VM that is in a memory pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmMemory {
    /// The pool.
    pub pool: String,
    /// Bytes of the memory.
    pub bytes: u64,
    /// Bytes of it that are in the pool; the rest is local.
    pub bytes_in_pool: u64,
    /// The last move of it between pool and node, under way or ended.
    #[serde(default)]
    pub moving: Option<MemoryMove>,
}

/// A move of a VM's memory between its memory pool and its node, while the guest runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMove {
    /// Where it goes.
    pub to: MemoryPlace,
    /// Whether it has ended.
    pub ended: bool,
    /// Bytes that were to be moved when it began.
    #[serde(default)]
    pub bytes_total: u64,
    /// Bytes that have moved.
    pub bytes_moved: u64,
    /// Seconds that it took so far.
    pub seconds: f64,
    /// Seconds that it takes from now at the rate so far; nothing before anything has moved, or when it has ended.
    #[serde(default)]
    pub seconds_left: Option<f64>,
    /// Longest time for which a page was held, in microseconds.
    pub longest_hold_us: u64,
    /// Longest time for which the disks took no requests, in microseconds.
    pub longest_still_us: u64,
    /// Why it ended before all had moved.
    pub problem: Option<String>,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryPlace {
    /// At the node that runs the VM.
    Local,
    /// In the VM's memory pool.
    Pool,
}

impl MemoryPlace {
    /// The place's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Pool => "pool",
        }
    }
}

/// Asks to move a VM's memory between its memory pool and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveMemory {
    /// Where to.
    pub to: MemoryPlace,
    /// Longest time for which a page should be held, in microseconds; 2000 when left out.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub hold_us: Option<u64>,
    /// Most bytes per second.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_bandwidth: Option<u64>,
}

/// Asks to start a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunVm {
    /// Its name: letters, digits, `.`, `_` and `-`, at most 128, not starting with `.` or `-`.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// Disks of this node, in the order in which the guest sees them.
    #[serde(default)]
    pub disks: Vec<String>,
    /// NICs that the node serves, in the order in which the guest sees them. With one, QEMU adds none by itself.
    #[serde(default)]
    pub nics: Vec<RunNic>,
    /// Bytes of memory; 512 MiB when left out.
    #[serde(default)]
    #[schema(minimum = 1_048_576, multiple_of = 4096)]
    pub memory_bytes: Option<u64>,
    /// The memory pool that its memory is put in; local memory when left out.
    #[serde(default)]
    pub memory_pool: Option<String>,
    /// Virtual processors; 1 when left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1024)]
    pub cpus: Option<u32>,
    /// QEMU's machine type; `q35` when neither this nor the arguments name one.
    #[serde(default)]
    pub machine: Option<String>,
    /// What runs the guest's instructions.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// The QEMU program: a name to be looked for, or a path; `qemu-system-x86_64` when left out.
    #[serde(default)]
    pub qemu: Option<String>,
    /// Further arguments for QEMU. Paths in them should be absolute.
    #[serde(default)]
    pub arguments: Vec<String>,
}

/// What runs a guest's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// KVM where it can be used, otherwise TCG.
    #[default]
    Auto,
    /// The host's processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// Asks to take over a VM that runs already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptVm {
    /// Its name from now on.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// The socket of its QEMU's monitor (QMP), on the node's host. The node keeps it connected.
    #[schema(pattern = "^/")]
    pub qmp: String,
}

/// Asks to end a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// At once, as if the power failed, instead of asking the guest to shut down.
    #[serde(default)]
    pub force: bool,
    /// Longest wait for the guest, in seconds; 60 when left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 80)]
    pub timeout_seconds: Option<u64>,
}

/// When the memory of a VM moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// Before the switchover; what is written meanwhile is sent again.
    #[default]
    PreCopy,
    /// After the switchover, as the guest needs it. If the connection is lost before the end, so is
    /// the machine.
    PostCopy,
    /// Once before the switchover; what was written meanwhile follows after it.
    Hybrid,
    /// Never before the switchover: both nodes map it from a memory pool.
    ZeroCopy,
}

impl MemoryMode {
    /// The mode's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PreCopy => "pre-copy",
            Self::PostCopy => "post-copy",
            Self::Hybrid => "hybrid",
            Self::ZeroCopy => "zero-copy",
        }
    }

    /// Whether the guest runs at the destination before all its memory is there.
    pub const fn pulls(self) -> bool {
        matches!(self, Self::PostCopy | Self::Hybrid)
    }
}

/// Asks to move a VM with its disks to another node. The options are those of a disk's migration and
/// apply to each disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateVm {
    /// The destination: a peer's name.
    pub to: String,
    /// The destination's pool that the images are put in; its data directory when left out.
    #[serde(default)]
    pub pool: Option<String>,
    /// What taps and bridges of its NICs are called at the destination, by their names here; the same where left out.
    #[serde(default)]
    pub uplinks: BTreeMap<String, String>,
    /// When the memory moves.
    #[serde(default)]
    pub memory: MemoryMode,
    /// With zero-copy: leave the memory in the memory pool. Left out, it follows into the destination's local
    /// memory.
    #[serde(default)]
    pub stay_in_pool: bool,
    /// How the disks are moved. Left out, the node chooses for each, and may choose otherwise while it runs.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// With pre-copy: bytes of a block of which it is remembered whether it was written, a multiple of 4096.
    #[serde(default)]
    #[schema(minimum = 4096, maximum = 1_073_741_824, multiple_of = 4096)]
    pub round_block_bytes: Option<u64>,
    /// With pre-copy: rounds, the first over each whole disk, after which writes go to both nodes.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_rounds: Option<u32>,
    /// With pre-copy: most bytes of each disk that are copied while the guest is held.
    #[serde(default)]
    pub round_left_bytes: Option<u64>,
    /// With push-pull: a chunk of 64 KiB that was written so often during the move is pushed no more.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds after which nothing more is pushed.
    #[serde(default)]
    pub push_seconds: Option<u64>,
    /// Most bytes in flight per disk, at least one chunk.
    #[serde(default)]
    #[schema(minimum = 4096, maximum = 33_554_432)]
    pub window_bytes: Option<u64>,
    /// Bytes per copy: a multiple of 4096, at most 16 MiB.
    #[serde(default)]
    #[schema(minimum = 4096, maximum = 16_777_216, multiple_of = 4096)]
    pub chunk_bytes: Option<u64>,
    /// Most bytes per second that each disk may take, and the memory after them.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_bandwidth: Option<u64>,
    /// Compare both images of each disk by hash before switchover.
    #[serde(default)]
    pub verify: bool,
    /// Send all of each disk, whatever the destination holds of it from an earlier time.
    #[serde(default)]
    pub whole: bool,
    /// What the guest is promised about each disk; see the migration of a disk.
    #[serde(default)]
    pub sla: Option<String>,
    /// While a disk's migration pauses, keep the guest's writes here and send them later.
    #[serde(default = "yes")]
    pub delayed_writes: bool,
    /// Most bytes per second of those; chosen by the node when left out.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub delayed_write_rate: Option<u64>,
    /// Seconds within which the first pass over each disk should be over.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub deadline_seconds: Option<u64>,
    /// The network interface that `interface_budget` is about.
    #[serde(default)]
    pub interface: Option<String>,
    /// Most bytes per second that may leave by the interface, other traffic included.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub interface_budget: Option<u64>,
}

impl MigrateVm {
    /// The request for one of the disks.
    pub fn for_disk(&self, disk: &str) -> MigrateRequest {
        MigrateRequest {
            disk: disk.to_owned(),
            to: self.to.clone(),
            pool: self.pool.clone(),
            into: None,
            policy: self.policy,
            round_block_bytes: self.round_block_bytes,
            max_rounds: self.max_rounds,
            round_left_bytes: self.round_left_bytes,
            push_threshold: self.push_threshold,
            push_seconds: self.push_seconds,
            window_bytes: self.window_bytes,
            chunk_bytes: self.chunk_bytes,
            max_bandwidth: self.max_bandwidth,
            verify: self.verify,
            whole: self.whole,
            with_guest: true,
            sla: self.sla.clone(),
            delayed_writes: self.delayed_writes,
            delayed_write_rate: self.delayed_write_rate,
            deadline_seconds: self.deadline_seconds,
            interface: self.interface.clone(),
            interface_budget: self.interface_budget,
        }
    }
}

/// What the move of a VM does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmMigrationPhase {
    /// Both nodes look for what stands in the way.
    Checking,
    /// The disks are copied, and the destination starts its QEMU; at its end only double writes remain.
    CopyingDisks,
    /// The destination's QEMU takes longer to start than the disks took to be copied.
    Starting,
    /// The memory is copied.
    CopyingMemory,
    /// The guest stands still; disks and machine change hands.
    SwitchingOver,
    /// The guest runs at the destination and pulls the rest of its memory.
    PullingMemory,
    /// The guest runs at the destination.
    Completed,
    /// It ended without moving the VM.
    Aborted,
}

impl VmMigrationPhase {
    /// Whether the move has ended.
    pub const fn ended(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// The phase's name as the API spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Checking => "checking",
            Self::CopyingDisks => "copying_disks",
            Self::Starting => "starting",
            Self::CopyingMemory => "copying_memory",
            Self::SwitchingOver => "switching_over",
            Self::PullingMemory => "pulling_memory",
            Self::Completed => "completed",
            Self::Aborted => "aborted",
        }
    }
}

/// How far the memory of a VM is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryProgress {
    /// Bytes of memory in all.
    pub bytes_total: u64,
    /// Bytes that are left in the current pass.
    pub bytes_left: u64,
    /// Bytes that were sent.
    pub bytes_sent: u64,
    /// Passes over what was written meanwhile.
    pub passes: u64,
}

/// The move of a VM, under way or ended; known at the node that the VM leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmMigration {
    /// Names it: 32 hexadecimal digits.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// The VM.
    pub vm: String,
    /// The node it leaves.
    pub from: String,
    /// The node it goes to.
    pub to: String,
    /// What it does now.
    pub phase: VmMigrationPhase,
    /// When the memory moves.
    pub memory_mode: MemoryMode,
    /// How far the memory is.
    pub memory: MemoryProgress,
    /// The migrations of its disks.
    pub disks: Vec<Migration>,
    /// When it was asked for (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended (RFC 3339).
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Seconds from the request to the end, or until now.
    pub total_seconds: Option<f64>,
    /// Milliseconds for which no guest ran: from QEMU's stop at the source to its start at the
    /// destination.
    pub blackout_ms: Option<f64>,
    /// The part of that in which the disks changed hands, in milliseconds: from when they were told
    /// to until all belonged to the destination.
    pub switchover_ms: Option<f64>,
    /// Bytes of memory that were sent.
    pub memory_bytes: u64,
    /// Bytes of the disks that were sent: copies, double writes and delayed writes.
    pub disk_bytes: u64,
    /// Why it ended without moving the VM.
    pub error: Option<ErrorBody>,
    /// What the user should know.
    #[serde(default)]
    pub warnings: Vec<String>,
}
