//! The arguments of `godwit process`.

use std::path::PathBuf;

use clap::Subcommand;
use godwit_api::ProcessMoveOptions;

#[derive(Debug, Subcommand)]
pub(crate) enum ProcessCommand {
    /// List the processes that use the RDMA library and have opened a device
    List,
    /// Show a process and what keeps it from moving
    Show {
        /// The process
        pid: u32,
    },
    /// Move a running process with its RDMA and TCP connections, and those that descend from it, to another node
    Migrate {
        /// The process
        #[arg(required_unless_present = "cgroup", conflicts_with = "cgroup")]
        pid: Option<u32>,
        /// Move the process of this control group that has started all others in it
        #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::DirPath)]
        cgroup: Option<PathBuf>,
        /// The node to move it to
        #[arg(long, value_name = "NODE")]
        to: String,
        #[command(flatten)]
        options: ProcessMoveOptions,
        /// Make the device's objects at the destination and at partners while the process still works
        #[arg(long)]
        pre_setup: bool,
        /// Print the move's id and return at once
        #[arg(long)]
        detach: bool,
    },
    /// List moves of processes away from the node, since its start
    Moves,
    /// Follow a move of a process until it ends
    Watch {
        /// Its id, or as many of its first digits as tell it apart
        id: String,
    },
    /// Cancel a move of a process; it goes on at the source
    Cancel {
        /// Its id, or as many of its first digits as tell it apart
        id: String,
    },
}
