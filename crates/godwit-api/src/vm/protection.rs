//! Protections of virtual machines by a second node.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The decision of a node that has lost the other one and has no witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum WhenAlone {
    /// Nobody goes on before an operator decides; the machine's I/O waits.
    Stop,
    /// Each node goes on: a cut between two nodes that live makes two machines.
    Continue,
}

impl WhenAlone {
    /// Returns the decision's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Continue => "continue",
        }
    }
}

/// A request to protect a VM: its disks' writes reach a second node before they are acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectVm {
    /// The backup: a peer's name.
    pub to: String,
    /// True if the VM is started anew at the backup, as after a power failure. Otherwise the VM goes on from its last
    /// checkpoint.
    #[serde(default)]
    pub restart: bool,
    /// Checkpoints a second; 20 if left out.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 100)]
    pub frequency: Option<u32>,
    /// The witness that decides between two nodes that have lost each other.
    #[serde(default)]
    pub witness: Option<String>,
    /// The decision of a node that is alone, without a witness.
    #[serde(default)]
    pub when_alone: Option<WhenAlone>,
    /// Milliseconds of silence after which the other node counts as lost; 3000 if left out.
    #[serde(default)]
    #[schema(minimum = 1000, maximum = 60_000)]
    pub heartbeat_timeout_ms: Option<u64>,
    /// The backup's pool for the images; the data directory if left out.
    #[serde(default)]
    pub pool: Option<String>,
    /// Most bytes per second of each disk's synchronization.
    #[serde(default)]
    #[schema(minimum = 1)]
    pub max_bandwidth: Option<u64>,
}

/// A node's part in a protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectionRole {
    /// The node runs the VM.
    Primary,
    /// The node takes the VM over.
    Backup,
}

/// The state of a protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProtectionState {
    /// The backup cannot be reached, and the VM runs without a backup.
    Alone,
    /// The disks are being copied to the backup.
    Syncing,
    /// Every acknowledged write is at both nodes; the backup may not take the VM yet.
    Pairing,
    /// The backup may take the VM, and loses no acknowledged write.
    Protected,
    /// The other node is lost, and the VM's I/O waits for the decision which node goes on.
    Severed,
    /// The backup has the VM, or is about to.
    Taken,
}

impl ProtectionState {
    /// All states.
    pub const ALL: [Self; 6] = [
        Self::Alone,
        Self::Syncing,
        Self::Pairing,
        Self::Protected,
        Self::Severed,
        Self::Taken,
    ];

    /// Returns the state's name as spelled in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Syncing => "syncing",
            Self::Pairing => "pairing",
            Self::Protected => "protected",
            Self::Severed => "severed",
            Self::Taken => "taken",
        }
    }
}

/// The protection of a VM, as known to one of its nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmProtection {
    /// This node's part.
    pub role: ProtectionRole,
    /// The other node.
    pub peer: String,
    /// State of the protection.
    pub state: ProtectionState,
    /// The witness, if any.
    pub witness: Option<String>,
    /// The decision of a node that is alone, without a witness.
    pub when_alone: Option<WhenAlone>,
    /// Number of changes of the right to run the VM.
    pub term: u64,
    /// Milliseconds of silence after which the other node counts as lost.
    pub heartbeat_timeout_ms: u64,
    /// Primary: bytes of the disks in the current synchronization.
    pub bytes_total: u64,
    /// Primary: bytes of the disks that the current synchronization has finished.
    pub bytes_done: u64,
    /// Primary: milliseconds since the sending of the last ping that the backup answered.
    pub answered_ms_ago: Option<u64>,
    /// Primary: the figures of the checkpoints, while there are any.
    #[serde(default)]
    pub checkpoints: Option<CheckpointFigures>,
    /// The trouble, if any.
    pub problem: Option<String>,
}

/// The figures of a protection's checkpoints since the backup was reached. Quantiles and rates are of the last 512.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointFigures {
    /// Checkpoints a second that the user asked for.
    pub asked_per_second: u32,
    /// Checkpoints a second. A slow backup or link lowers the number.
    pub per_second: f64,
    /// Number of the last captured checkpoint.
    pub captured: u64,
    /// Number of the last checkpoint that the backup has acknowledged.
    pub acknowledged: u64,
    /// Median time for which the guest stood still, in microseconds.
    pub pause_p50_us: u64,
    /// Time for which the guest stood still, in microseconds, at the 99th percentile.
    pub pause_p99_us: u64,
    /// Median time until the guest and its devices have stopped, in microseconds: a part of the pause.
    #[serde(default)]
    pub stop_p50_us: u64,
    /// Median time for the copy of the written pages, in microseconds: a part of the pause.
    #[serde(default)]
    pub copy_p50_us: u64,
    /// Median time for the state of the devices, in microseconds. The state is saved while the pages are copied.
    #[serde(default)]
    pub state_p50_us: u64,
    /// Median time until the guest runs again, in microseconds: a part of the pause.
    #[serde(default)]
    pub resume_p50_us: u64,
    /// Median time from a checkpoint's capture to its acknowledgement, in microseconds.
    pub lag_p50_us: u64,
    /// Time from a checkpoint's capture to its acknowledgement, in microseconds, at the 99th percentile.
    pub lag_p99_us: u64,
    /// Pages of memory captured a second.
    pub pages_per_second: f64,
    /// Bytes of checkpoints a second.
    pub bytes_per_second: f64,
    /// Bytes of all checkpoints.
    pub bytes_sent: u64,
}
