//! The arguments of `godwit container`.

use clap::Subcommand;
use godwit_api::ProcessMoveOptions;

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
        #[command(flatten)]
        options: ProcessMoveOptions,
        /// Print the move's id and return at once; it is one of 'godwit process moves'
        #[arg(long)]
        detach: bool,
    },
}
