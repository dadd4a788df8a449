//! The command line.

mod environment;
mod image;
mod moving;
mod nic;
mod node;
mod process;
mod vm;

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use godwit_api::{ImageFormat, SwitchMigration};

pub(crate) use self::image::{ImageArguments, ImageCommand, ImageFile, RepositoryArguments};
pub(crate) use self::moving::{MigrateArguments, Subject};
pub(crate) use self::nic::NicCommand;
pub(crate) use self::node::{LogFormatArgument, NodeArguments, ReadWaitThen};
pub(crate) use self::process::{ContainerCommand, ProcessCommand};
pub(crate) use self::vm::{
    AcceleratorArgument, MemoryPlaceArgument, MemoryPoolCommand, VmCommand, VmProtectArguments,
    VmRunArguments,
};
use crate::failure::EXIT_CODES;
use godwit_api::text::parse_size;

/// Default data directory of a node.
pub(crate) const DEFAULT_DATA_DIR: &str = "/var/lib/godwit";

/// Moves running disks from one host to another.
#[derive(Debug, Parser)]
#[command(
    name = "godwit",
    version,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = exit_codes()
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub connection: Connection,
    /// Print JSON instead of text; fields are those of the API
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// Which node the command talks to, and as whom.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct Connection {
    /// The node's API socket
    #[arg(long, global = true, env = "GODWIT_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// A node's API on the network, over mutual TLS
    #[arg(
        long,
        global = true,
        env = "GODWIT_API",
        value_name = "https://HOST:PORT"
    )]
    pub api: Option<String>,
    /// Certificate to show: PEM
    #[arg(long, global = true, env = "GODWIT_CERT", value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// The certificate's private key: PEM
    #[arg(long, global = true, env = "GODWIT_KEY", value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Certificate of the authority to trust: PEM
    #[arg(long, global = true, env = "GODWIT_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Move a running disk, virtual machine, process or container to another node
    Migrate(Box<MigrateArguments>),
    /// Look at migrations, follow or cancel them
    #[command(subcommand)]
    Migration(MigrationCommand),
    /// Create, import, export, show and remove disks
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Keep images that disks are created from in a repository
    Image(ImageArguments),
    /// Run virtual machines on disks of a node
    #[command(subcommand)]
    Vm(VmCommand),
    /// The NICs of virtual machines, and NICs for machines that others start
    #[command(subcommand)]
    Nic(NicCommand),
    /// Look at processes with RDMA connections
    #[command(subcommand)]
    Process(ProcessCommand),
    /// Look at containers under runc
    #[command(subcommand)]
    Container(ContainerCommand),
    /// Look at memory that other nodes map, too
    #[command(subcommand)]
    MemoryPool(MemoryPoolCommand),
    /// Look at the other nodes
    #[command(subcommand)]
    Peer(PeerCommand),
    /// Run a node
    Node(Box<NodeArguments>),
    /// Make certificates for nodes and clients
    #[command(subcommand)]
    Certs(CertsCommand),
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write manual pages
    #[command(hide = true)]
    Manual {
        /// Where to: a directory that exists
        directory: PathBuf,
    },
    /// What a node starts beside a machine that moves, never a user
    #[command(hide = true, name = godwit_node::KEEP_STREAM)]
    KeepStream,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Its bytes are the disk's content
    Raw,
}

impl From<Format> for ImageFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// Yes
    #[default]
    On,
    /// No
    Off,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MigrationCommand {
    /// List migrations of disks, virtual machines, processes and containers, those under way first
    List,
    /// Show a migration
    Show {
        /// Its id, or as many of its first digits as tell it apart
        id: String,
    },
    /// Follow a migration until it ends
    Watch {
        /// Its id, or as many of its first digits as tell it apart
        id: String,
    },
    /// Go on otherwise with a migration: leave now, or other bounds
    Switch {
        /// Its id, or as many of its first digits as tell it apart
        id: String,
        #[command(flatten)]
        change: SwitchMigration,
    },
    /// Cancel a migration; the source serves on
    Cancel {
        /// Its id, or as many of its first digits as tell it apart
        id: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Create a disk: empty, from an image of the repository, or from an image file that is used in place
    Create {
        /// Its name, the same on every node
        name: String,
        /// Its size; needed unless --path or --image names an image
        #[arg(long, value_name = "SIZE", value_parser = parse_size, required_unless_present_any = ["path", "image"])]
        size: Option<u64>,
        /// Use this image file or block device on the node's host
        #[arg(long)]
        path: Option<PathBuf>,
        /// What the image at --path is taken for, whatever it looks like
        #[arg(long, value_enum, requires = "path")]
        format: Option<Format>,
        /// Take all of its storage at once
        #[arg(long, conflicts_with = "path")]
        preallocate: bool,
        /// Begin as this image of the node's repository: usable at once, fetched as it is read
        #[arg(long, conflicts_with_all = ["path", "preallocate"])]
        image: Option<String>,
        /// With --image: fetch in the background what nobody reads, too
        #[arg(long, value_enum, default_value_t, value_name = "on|off")]
        prefetch: Switch,
    },
    /// Copy a raw image into a new disk
    Import {
        /// The new disk's name
        name: String,
        /// The raw image on the node's host
        file: PathBuf,
        /// What it is taken for, whatever it looks like
        #[arg(long, value_enum)]
        format: Option<Format>,
    },
    /// Copy a disk into a new raw image
    Export {
        /// The disk
        name: String,
        /// The file to write on the node's host; it must not exist
        file: PathBuf,
    },
    /// List disks
    List,
    /// Show a disk: who serves it, its clients, what they do
    Show {
        /// The disk
        name: String,
    },
    /// Remove a disk and, unless it was created with --path, its image
    Rm {
        /// The disk
        name: String,
        /// Also when clients are attached or its owner is in doubt
        #[arg(long)]
        force: bool,
    },
    /// Print where NBD clients reach a disk
    Attach {
        /// The disk
        name: String,
        /// The address on the network instead of the unix socket
        #[arg(long)]
        tcp: bool,
    },
    /// Make a disk larger
    Resize {
        /// The disk
        name: String,
        /// Its size from now on; as large as its image or device is by now when left out
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
    },
    /// Go on without what a disk lacks, because the node that has it is lost for good: reads of that fail
    Abandon {
        /// The disk
        name: String,
        /// Needed: the guest sees I/O errors where it reads what is missing
        #[arg(long)]
        lost: bool,
    },
    /// Make this node the owner of a disk whose owner is in doubt and will never answer
    Claim {
        /// The disk
        name: String,
        /// Needed: if the other node has the disk and comes back, writes are lost
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PeerCommand {
    /// List the nodes that this node knows, and whether they answer
    List,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArgument {
    /// A node: nodes that name it as a peer take disks and machines from it
    #[default]
    Node,
    /// Everything that the API does and every disk; that includes running programs on the host
    Operator,
    /// Metrics and lists
    Reader,
    /// NBD over TLS
    NbdClient,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CertsCommand {
    /// Make a certificate authority, valid for ten years
    Init {
        /// Where its files go
        #[arg(long, value_name = "DIR", default_value = "godwit-certs")]
        dir: PathBuf,
        /// Replace the authority that is there; what it issued is not trusted any more
        #[arg(long)]
        force: bool,
    },
    /// Issue a certificate for a node, an API client or an NBD client
    Issue {
        /// The holder's name; for a node, the node's name
        name: String,
        /// The authority's directory
        #[arg(long, value_name = "DIR", default_value = "godwit-certs")]
        dir: PathBuf,
        /// A further DNS name of the holder (may be repeated)
        #[arg(long, value_name = "NAME")]
        dns: Vec<String>,
        /// An IP address of the holder (may be repeated)
        #[arg(long, value_name = "ADDRESS")]
        ip: Vec<IpAddr>,
        /// Days of validity, up to 3650
        #[arg(
            long,
            default_value_t = 365,
            value_parser = clap::value_parser!(u32).range(1..=i64::from(godwit_node::certificates::MAX_DAYS))
        )]
        days: u32,
        /// Make a certificate that has ended already, for tests
        #[arg(long, hide = true)]
        expired: bool,
        /// What the holder may do (nbd-client: a directory that QEMU and libnbd read)
        #[arg(long, value_enum, default_value_t)]
        role: RoleArgument,
        /// A disk that an NBD client may attach (may be repeated); without it, every disk
        #[arg(long = "disk", value_name = "NAME")]
        disks: Vec<String>,
        /// The same as --role nbd-client
        #[arg(long, conflicts_with = "role")]
        nbd_client: bool,
        /// Replace files that are there
        #[arg(long)]
        force: bool,
    },
    /// Add a certificate to the authority's list of revoked ones, which nodes read with --crl
    Revoke {
        /// The holder's name: its certificate in the authority's directory
        #[arg(required_unless_present = "serial")]
        name: Option<String>,
        /// The certificate's serial number in hexadecimal, when its file is gone
        #[arg(long, value_name = "HEX", conflicts_with = "name")]
        serial: Option<String>,
        /// The authority's directory
        #[arg(long, value_name = "DIR", default_value = "godwit-certs")]
        dir: PathBuf,
    },
}

/// Returns the exit codes, printed after the help of all commands.
fn exit_codes() -> String {
    let codes = EXIT_CODES.map(|(code, meaning)| format!("{code:>5}  {meaning}\n"));
    format!("Exit codes:\n{}", codes.concat())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_connection_and_json_can_stand_anywhere() {
        let arguments =
            Arguments::try_parse_from(["godwit", "disk", "list", "--json", "--socket", "/s"])
                .unwrap();
        assert!(arguments.json);
        assert_eq!(arguments.connection.socket, Some(PathBuf::from("/s")));
    }

    #[test]
    fn an_interface_and_its_budget_go_together() {
        let parse = |rest: &[&str]| {
            let start = ["godwit", "migrate", "d", "--to", "b"];
            Arguments::try_parse_from(start.iter().chain(rest))
        };
        parse(&["--interface", "eth0", "--interface-budget", "1G"]).unwrap();
        for alone in [["--interface", "eth0"], ["--interface-budget", "1G"]] {
            let error = parse(&alone).unwrap_err().to_string();
            assert!(error.contains("--interface"), "{error}");
        }
    }

    #[test]
    fn a_disk_without_size_and_image_is_refused() {
        let parsed = Arguments::try_parse_from(["godwit", "disk", "create", "d"]);
        assert!(parsed.unwrap_err().to_string().contains("--size"));
    }
}
