//! The arguments of `godwit process` and `godwit container`.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum ProcessCommand {
    /// List the processes that use the RDMA library and have opened a device
    List,
    /// Show a process and what keeps it from moving
    Show {
        /// The process
        pid: u32,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ContainerCommand {
    /// List the containers under runc, and what keeps them from moving
    List,
}
