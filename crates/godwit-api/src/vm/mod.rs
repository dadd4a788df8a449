//! Virtual machines.

mod memory;
mod nic;
mod protection;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;
use crate::migration::{MigrateRequest, Migration};
use crate::options::MoveOptions;

pub use memory::*;
pub use nic::*;
pub use protection::*;

/// The state of a VM, as known to its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// QEMU is being started.
    Starting,
    /// The guest runs.
    Running,
    /// QEMU is present, and the guest is paused.
    Paused,
    /// QEMU is present, and the guest has shut down, panicked or met an error.
    Halted,
    /// The VM arrives from another node.
    Incoming,
    /// No QEMU runs the VM.
    Stopped,
    /// The VM moved to another node.
    Departed,
    /// The VM runs at another node, and this node takes the VM over if that node is lost.
    Backup,
}

impl VmState {
    /// All states.
    pub const ALL: [Self; 8] = [
        Self::Starting,
        Self::Running,
        Self::Paused,
        Self::Halted,
        Self::Incoming,
        Self::Stopped,
        Self::Departed,
        Self::Backup,
    ];

    /// Returns the state's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Halted => "halted",
            Self::Incoming => "incoming",
            Self::Stopped => "stopped",
            Self::Departed => "departed",
            Self::Backup => "backup",
        }
    }
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Name of the VM, the same on every node.
    pub name: String,
    /// State of the VM.
    pub state: VmState,
    /// The state in a sentence.
    pub status: String,
    /// Disks, in the order in which the guest sees them.
    pub disks: Vec<String>,
    /// Origin of the VM: `run`, `adopted`, or the name of the node that the VM moved from.
    pub origin: String,
    /// The node that the VM moved to.
    pub moved_to: Option<String>,
    /// Id of the migration under way.
    pub migration: Option<String>,
    /// Process id of QEMU.
    pub pid: Option<u32>,
    /// Version of QEMU.
    pub qemu_version: Option<String>,
    /// The socket of QEMU's monitor. The node keeps this socket connected.
    pub qmp: String,
    /// The socket of the guest's first serial port, if the node has one.
    pub console: Option<String>,
    /// Path of QEMU's log, if the node started QEMU.
    pub log: Option<String>,
    /// Memory of the VM, if the node knows of a memory pool for it.
    #[serde(default)]
    pub memory: Option<VmMemory>,
    /// The command line that starts QEMU here. Some words differ from node to node.
    #[serde(default)]
    pub command: Vec<String>,
    /// Accelerator of the guest: `kvm` or `tcg`; absent for any other.
    #[serde(default)]
    pub accelerator: Option<String>,
    /// Protection of the VM by a second node, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<VmProtection>,
    /// Description of the problem, if any.
    pub problem: Option<String>,
    /// Warnings for the operator of the VM.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The memory of a VM in a memory pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmMemory {
    /// Name of the memory pool.
    pub pool: String,
    /// Bytes of the memory.
    pub bytes: u64,
    /// Bytes in the pool; the rest is local.
    pub bytes_in_pool: u64,
    /// The last move of the memory between pool and node, under way or ended.
    #[serde(default)]
    pub moving: Option<MemoryMove>,
}

/// A move of a VM's memory between its memory pool and its node, while the guest runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMove {
    /// Destination of the memory.
    pub to: MemoryPlace,
    /// True if the move has ended.
    pub ended: bool,
    /// Bytes to move, as of the start.
    #[serde(default)]
    pub bytes_total: u64,
    /// Bytes moved.
    pub bytes_moved: u64,
    /// Seconds taken so far.
    pub seconds: f64,
    /// Estimated seconds left at the rate so far; absent before the first byte, and after the end.
    #[serde(default)]
    pub seconds_left: Option<f64>,
    /// Longest time for which a page was held, in microseconds.
    pub longest_hold_us: u64,
    /// Longest time for which the disks took no requests, in microseconds.
    pub longest_still_us: u64,
    /// The reason why the move ended early.
    pub problem: Option<String>,
}

/// The place of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryPlace {
    /// The node that runs the VM.
    Local,
    /// The VM's memory pool.
    Pool,
}

impl MemoryPlace {
    /// Returns the place's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Pool => "pool",
        }
    }
}

/// A request to move a VM's memory between its memory pool and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveMemory {
    /// Destination of the memory.
    pub to: MemoryPlace,
    /// Longest time for which a page should be held, in microseconds; 2000 if left out.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub hold_us: Option<u64>,
    /// Most bytes per second.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_bandwidth: Option<u64>,
}

/// A request to start a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunVm {
    /// Name of the VM: letters, digits, `.`, `_` and `-`, at most 128, not starting with `.` or `-`.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// Disks of this node, in the order in which the guest sees them.
    #[serde(default)]
    pub disks: Vec<String>,
    /// NICs that the node serves, in the order in which the guest sees them. If there is any, QEMU adds no NIC of its
    /// own.
    #[serde(default)]
    pub nics: Vec<RunNic>,
    /// Bytes of memory; 512 MiB if left out.
    #[serde(default)]
    #[schema(minimum = 1_048_576, multiple_of = 4096)]
    pub memory_bytes: Option<u64>,
    /// The memory pool for the VM's memory; local memory if left out.
    #[serde(default)]
    pub memory_pool: Option<String>,
    /// Virtual processors; 1 if left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1024)]
    pub cpus: Option<u32>,
    /// Machine type of QEMU; `q35` if neither this field nor the arguments name one.
    #[serde(default)]
    pub machine: Option<String>,
    /// Accelerator of the guest.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// The QEMU program: a name to be looked up, or a path; `qemu-system-x86_64` if left out.
    #[serde(default)]
    pub qemu: Option<String>,
    /// Further arguments for QEMU. Paths should be absolute.
    #[serde(default)]
    pub arguments: Vec<String>,
}

/// The accelerator of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// KVM if available, otherwise TCG.
    #[default]
    Auto,
    /// KVM, the host's processor.
    Kvm,
    /// TCG, QEMU's translator.
    Tcg,
}

/// A request to take over a running VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptVm {
    /// Name of the VM from now on.
    #[schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    pub name: String,
    /// The socket of QEMU's monitor (QMP), on the node's host. The node keeps this socket connected.
    #[schema(pattern = "^/")]
    pub qmp: String,
}

/// A request to end a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// True to end the VM at once, like a power failure, instead of asking the guest to shut down.
    #[serde(default)]
    pub force: bool,
    /// Longest wait for the guest, in seconds; 60 if left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 80)]
    pub timeout_seconds: Option<u64>,
}

/// The mode of a VM's memory transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum MemoryMode {
    /// Before the switchover; pages written meanwhile are sent again.
    #[default]
    PreCopy,
    /// After the switchover, on demand of the guest, which waits while the connection is lost.
    PostCopy,
    /// Once before the switchover; pages written meanwhile follow after the switchover, as with post-copy.
    Hybrid,
    /// Never before the switchover: both nodes map the memory from a memory pool, so the guest stands still for
    /// milliseconds whatever the memory's size.
    ZeroCopy,
}

impl MemoryMode {
    /// Returns the mode's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PreCopy => "pre-copy",
            Self::PostCopy => "post-copy",
            Self::Hybrid => "hybrid",
            Self::ZeroCopy => "zero-copy",
        }
    }

    /// Returns true if the guest runs at the destination before all of its memory is there.
    pub const fn pulls(self) -> bool {
        matches!(self, Self::PostCopy | Self::Hybrid)
    }
}

/// A request to move a VM with its disks to another node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateVm {
    /// The destination: a peer's name.
    pub to: String,
    /// The destination's pool for the images; the data directory if left out.
    pub pool: Option<String>,
    /// Names of the NICs' taps and bridges at the destination, by their names here. A name that is left out stays the
    /// same.
    #[serde(default)]
    pub uplinks: BTreeMap<String, String>,
    /// Mode of the memory transfer.
    #[serde(default)]
    pub memory: MemoryMode,
    /// With zero-copy: true to leave the memory in the memory pool. Otherwise the memory follows into the destination's
    /// local memory.
    #[serde(default)]
    pub stay_in_pool: bool,
    /// Options of each disk's move; the bandwidth also limits the memory.
    #[serde(flatten)]
    pub options: MoveOptions,
}

impl MigrateVm {
    /// Returns the request for one of the disks.
    pub fn for_disk(&self, disk: &str) -> MigrateRequest {
        MigrateRequest {
            disk: disk.to_owned(),
            to: self.to.clone(),
            pool: self.pool.clone(),
            into: None,
            with_guest: true,
            options: self.options.clone(),
        }
    }
}

/// The phase of a VM's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmMigrationPhase {
    /// Both nodes look for obstacles.
    Checking,
    /// The disks are copied, and the destination starts QEMU; at the end only double writes remain.
    CopyingDisks,
    /// The disks are copied, and the destination's QEMU is still starting.
    Starting,
    /// The memory is copied.
    CopyingMemory,
    /// The guest is paused; disks and VM change hands.
    SwitchingOver,
    /// The guest runs at the destination and pulls the rest of its memory.
    PullingMemory,
    /// The guest runs at the destination.
    Completed,
    /// The move ended without moving the VM.
    Aborted,
}

impl VmMigrationPhase {
    /// Returns true if the move has ended.
    pub const fn ended(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// Returns the phase's name as spelled in the API.
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

/// The progress of a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryProgress {
    /// Total bytes of memory.
    pub bytes_total: u64,
    /// Bytes left in the current pass.
    pub bytes_left: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Passes over pages written meanwhile.
    pub passes: u64,
}

/// A move of a VM, under way or ended, as known to the source node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmMigration {
    /// Id of the move: 32 hexadecimal digits.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// Name of the VM.
    pub vm: String,
    /// The source node.
    pub from: String,
    /// The destination node.
    pub to: String,
    /// Current phase.
    pub phase: VmMigrationPhase,
    /// Mode of the memory transfer.
    pub memory_mode: MemoryMode,
    /// Progress of the memory.
    pub memory: MemoryProgress,
    /// Migrations of the disks.
    pub disks: Vec<Migration>,
    /// Time of the request (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// Time of the end (RFC 3339).
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Seconds from the request to the end, or until now.
    pub total_seconds: Option<f64>,
    /// Milliseconds for which no guest ran: from QEMU's stop at the source to its start at the destination.
    pub blackout_ms: Option<f64>,
    /// The part of the blackout in which the disks changed hands, in milliseconds: from the order to do so until all
    /// disks belonged to the destination.
    pub switchover_ms: Option<f64>,
    /// Bytes of memory sent.
    pub memory_bytes: u64,
    /// Bytes of the disks sent: copies, double writes and delayed writes.
    pub disk_bytes: u64,
    /// The reason why the move ended without moving the VM.
    pub error: Option<ErrorBody>,
    /// Warnings for the user.
    #[serde(default)]
    pub warnings: Vec<String>,
}
