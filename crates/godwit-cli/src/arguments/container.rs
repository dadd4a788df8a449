//! The arguments of `godwit container`.

use std::net::IpAddr;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum ContainerCommand {
    /// List the containers under runc, and what keeps them from moving
    List,
    /// Move a running container, with its RDMA connections, to another node
    Migrate {
        /// The container
        id: String,
        /// The node to move it to: its bundle has to be there, at the same path
        #[arg(long, value_name = "NODE")]
        to: String,
        /// An IP address of the container's own that moves along, with its TCP connections
        #[arg(long, value_name = "ADDRESS")]
        address: Option<IpAddr>,
        /// A file that is brought along (may be repeated), such as one that was written into its root file system
        #[arg(long = "file", value_name = "PATH")]
        files: Vec<String>,
        /// Copy all of its memory while it stands still, and none before
        #[arg(long)]
        no_pre_copy: bool,
        /// Print the move's id and return at once; it is one of 'godwit process moves'
        #[arg(long)]
        detach: bool,
    },
}
