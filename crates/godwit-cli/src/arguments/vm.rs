//! The arguments of `godwit vm` and `godwit memory-pool`.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, ValueEnum};
use godwit_api::{RunNic, WhenAlone};

use super::nic::parse_nic;
use godwit_api::text::{parse_duration, parse_rate, parse_size};

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Start a virtual machine
    Run(Box<VmRunArguments>),
    /// Take over a virtual machine that runs already on disks of the node
    Adopt {
        /// Its name from now on
        name: String,
        /// The socket of its QEMU's monitor (QMP); the node keeps it connected
        #[arg(long, value_name = "PATH")]
        qmp: PathBuf,
    },
    /// List virtual machines
    List,
    /// Show a virtual machine
    Show {
        /// The virtual machine
        name: String,
    },
    /// Shut a virtual machine down and forget it; its disks stay
    Stop {
        /// The virtual machine
        name: String,
        /// At once, as if the power failed
        #[arg(long)]
        force: bool,
        /// How long the guest may take, like 30s
        #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "force")]
        timeout: Option<u64>,
    },
    /// Move a virtual machine's memory between its memory pool and its node, while it runs
    Memory {
        /// The virtual machine
        name: String,
        /// Where to
        #[arg(long, value_enum, required_unless_present = "cancel")]
        to: Option<MemoryPlaceArgument>,
        /// Longest time for which a page should be held, in microseconds; 2000 when left out
        #[arg(long, value_name = "MICROSECONDS", requires = "to")]
        memory_hold: Option<u64>,
        /// Most bytes per second
        #[arg(long, value_name = "SIZE[/s]", value_parser = parse_rate, requires = "to")]
        max_bandwidth: Option<u64>,
        /// End a move under way: what has moved stays where it is
        #[arg(long, conflicts_with = "to")]
        cancel: bool,
    },
    /// Let a virtual machine go on that stands still
    Resume {
        /// The virtual machine
        name: String,
        /// Also one that arrived from a node which does not say whether it gave it away: if it runs there, it then runs twice
        #[arg(long)]
        force: bool,
    },
    /// Protect a virtual machine: if this node dies, it goes on at a second one from its last checkpoint, and no client has
    /// seen anything newer; with --restart only its disks are kept there, and it is started anew
    Protect(VmProtectArguments),
    /// End the protection of a virtual machine, which goes on without a backup
    Unprotect {
        /// The virtual machine
        name: String,
        /// Ask neither the witness nor the other node: if it runs there, it then runs twice
        #[arg(long)]
        force: bool,
    },
    /// At the backup of a virtual machine whose node is down: take it over, if nobody else decides that
    Failover {
        /// The virtual machine
        name: String,
    },
    /// Take a virtual machine that moved to another node off this node's list
    Forget {
        /// The virtual machine
        name: String,
        /// Also while the other node does not have all of its memory
        #[arg(long)]
        force: bool,
    },
    /// Connect the terminal to the first serial port; Ctrl-] leaves it
    Console {
        /// The virtual machine
        name: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryPlaceArgument {
    /// The node that runs the machine
    Local,
    /// The machine's memory pool
    Pool,
}

#[derive(Debug, Args)]
pub(crate) struct VmRunArguments {
    /// Its name, the same on every node
    pub name: String,
    /// Its disks in the guest's order (repeat, or separate by commas)
    #[arg(long = "disk", value_name = "DISK", value_delimiter = ',', action = ArgAction::Append)]
    pub disks: Vec<String>,
    /// A NIC that moves with it: tap=NAME or bridge=NAME, mac=ADDRESS if it must be that, queues=N for more than one pair of
    /// queues, and for a bridge vlan=N or trunk=N-M (repeat for more NICs)
    #[arg(long = "nic", value_name = "NIC", value_parser = parse_nic, action = ArgAction::Append)]
    pub nics: Vec<RunNic>,
    /// Its memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "512M")]
    pub memory: u64,
    /// The memory pool that its memory is put in; local memory when left out
    #[arg(long, value_name = "NAME")]
    pub memory_pool: Option<String>,
    /// Its processors
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// QEMU's machine type, q35 unless QEMU's own arguments name one
    #[arg(long, value_name = "TYPE")]
    pub machine: Option<String>,
    /// What runs the guest's instructions
    #[arg(long, value_enum, default_value_t)]
    pub accel: AcceleratorArgument,
    /// The QEMU program on the node's host
    #[arg(long, value_name = "PROGRAM")]
    pub qemu: Option<String>,
    /// Further arguments for QEMU, after --; paths in them should be absolute
    #[arg(last = true, value_name = "QEMU ARGUMENTS", allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum AcceleratorArgument {
    /// KVM where it can be used, otherwise TCG
    #[default]
    Auto,
    /// The host's processor
    Kvm,
    /// QEMU's translator
    Tcg,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MemoryPoolCommand {
    /// List the node's memory pools and how much is free
    List,
    /// Show the machines whose memory is in a memory pool, and which node may run each
    Show {
        /// The memory pool
        name: String,
    },
    /// Make a memory pool of its DAX device or file, once and at one of the nodes that map it: an empty table is written at
    /// its start
    Format {
        /// The memory pool
        name: String,
        /// Also when something else is there that nobody needs
        #[arg(long)]
        overwrite: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct VmProtectArguments {
    /// The virtual machine
    pub name: String,
    /// The backup: a peer's name
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// Keep only its disks at the backup, and start it anew there, like after a power failure
    #[arg(long)]
    pub restart: bool,
    /// Checkpoints a second, 1 to 100; 20 when left out
    #[arg(long, value_name = "NUMBER", conflicts_with = "restart")]
    pub frequency: Option<u32>,
    /// Who decides between two nodes that have lost each other
    #[arg(long, value_name = "WITNESS", conflicts_with = "when_alone")]
    pub witness: Option<String>,
    /// What a node does that has lost the other one, without a witness
    #[arg(long, value_enum)]
    pub when_alone: Option<WhenAlone>,
    /// Silence after which the other node counts as lost, 1s to 60s; 3s when left out
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub heartbeat_timeout: Option<u64>,
    /// The backup's pool for the disks; its data directory when left out
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,
    /// Most bytes per second of each disk's synchronization
    #[arg(long, value_name = "SIZE[/s]", value_parser = parse_rate)]
    pub max_bandwidth: Option<u64>,
}
