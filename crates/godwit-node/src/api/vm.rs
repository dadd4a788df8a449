//! Virtual machines in the API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// Asks to start a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunVm {
    /// Its name: letters, digits, `.`, `_` and `-`, at most 128, not starting with `.` or `-`.
    pub name: String,
    /// Disks of this node, in the order in which the guest sees them.
    #[serde(default)]
    pub disks: Vec<String>,
    /// Bytes of memory; 512 MiB when left out.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Virtual processors; 1 when left out.
    #[serde(default)]
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
    pub name: String,
    /// The socket of its QEMU's monitor (QMP), on the node's host. The node keeps it connected.
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
    pub timeout_seconds: Option<u64>,
}
