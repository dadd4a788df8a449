//! The arguments of `godwit node`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use godwit_node::GovernorParts;
use godwit_node::{IncomingLimits, QemuUser};

use super::{DEFAULT_DATA_DIR, RepositoryArguments};
use godwit_api::text::{parse_duration, parse_size};

#[derive(Debug, Args)]
pub(crate) struct NodeArguments {
    /// The node's name, as in its certificate
    #[arg(long, env = "GODWIT_NAME")]
    pub name: String,
    /// Where images, the store and the sockets are
    #[arg(long, env = "GODWIT_DATA_DIR", default_value = DEFAULT_DATA_DIR, value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Where other nodes connect; 0.0.0.0:7001 when left out, and 127.0.0.1:7001 with --insecure-loopback
    #[arg(long, env = "GODWIT_LISTEN", value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// Another node (repeat, or separate by commas)
    #[arg(
        long = "peer",
        env = "GODWIT_PEERS",
        value_name = "NAME=HOST:PORT",
        value_delimiter = ',',
        action = ArgAction::Append,
        value_parser = parse_peer
    )]
    pub peers: Vec<(String, String)>,
    /// A folder for images, or of block devices, that disks from other nodes may be put in; may be
    /// repeated
    #[arg(
        long = "pool",
        env = "GODWIT_POOLS",
        value_name = "NAME=FOLDER",
        value_delimiter = ',',
        action = ArgAction::Append,
        value_parser = parse_pool
    )]
    pub pools: Vec<(String, PathBuf)>,
    /// Memory that other nodes map, too, under the same name: a DAX device, a folder of a mounted CXL or DAX file system, or
    /// a folder or file below /dev/shm that two nodes of one host share; may be repeated
    #[arg(
        long = "memory-pool",
        env = "GODWIT_MEMORY_POOLS",
        value_name = "NAME=PATH",
        value_delimiter = ',',
        action = ArgAction::Append,
        value_parser = parse_memory_pool
    )]
    pub memory_pools: Vec<(String, PathBuf)>,
    /// Serve the API over mutual TLS here, besides its unix socket
    #[arg(long, env = "GODWIT_API_LISTEN", value_name = "ADDR:PORT")]
    pub api_listen: Option<SocketAddr>,
    /// Serve NBD here, besides its unix socket; over TLS with client certificates
    #[arg(long, env = "GODWIT_NBD_LISTEN", value_name = "ADDR:PORT")]
    pub nbd_listen: Option<SocketAddr>,
    /// Serve NBD without TLS; on a loopback address only
    #[arg(long, requires = "nbd_listen")]
    pub nbd_plain: bool,
    /// NBD connections to one disk at once, at most 256. Each may take 1 MiB of memory beside what
    /// all of the disk's share
    #[arg(
        long,
        env = "GODWIT_NBD_CONNECTIONS",
        value_name = "NUMBER",
        default_value_t = 64
    )]
    pub nbd_connections: u32,
    /// Talk to other nodes without TLS; on loopback addresses only
    #[arg(long)]
    pub insecure_loopback: bool,
    /// Lists of revoked certificates (CRLs): PEM. Read again when the node is told to reload
    #[arg(
        long,
        env = "GODWIT_CRL",
        value_name = "FILE",
        conflicts_with = "insecure_loopback"
    )]
    pub crl: Option<PathBuf>,
    /// Send disks and memory unencrypted to nodes that are told the same. Only where nobody else can
    /// read or change what passes: over WireGuard, IPsec, MACsec or a cable of one's own
    #[arg(long, env = "GODWIT_UNENCRYPTED_DATA")]
    pub unencrypted_data: bool,
    /// Leave parts of the governor of promises out, for experiments
    #[arg(long, value_name = "PART,…", default_value = "", hide = true)]
    pub governor_without: GovernorParts,
    /// Never compress disks on the way to other nodes, nor let these do it. Otherwise data that becomes
    /// shorter is compressed where the link is slower than compressing it
    #[arg(long, env = "GODWIT_NO_COMPRESSION")]
    pub no_compression: bool,
    /// Do not start virtual machines in QEMU's sandbox
    #[arg(long, env = "GODWIT_NO_QEMU_SANDBOX")]
    pub no_qemu_sandbox: bool,
    /// Run QEMU as this user, who then has neither the node's keys nor its images. The node must run as root
    #[arg(long, env = "GODWIT_QEMU_USER", value_name = "USER", value_parser = QemuUser::named)]
    pub qemu_user: Option<QemuUser>,
    /// How many disks one peer may bring at a time, and how many virtual machines
    #[arg(long, env = "GODWIT_MAX_INCOMING", value_name = "NUMBER", default_value_t = IncomingLimits::default().count,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub max_incoming: u32,
    /// How large the disks may be together that one peer brings at a time; without it, what fits
    #[arg(long, env = "GODWIT_MAX_INCOMING_SIZE", value_name = "SIZE", value_parser = parse_size)]
    pub max_incoming_size: Option<u64>,
    #[command(flatten)]
    pub moving_processes: ProcessArguments,
    #[command(flatten)]
    pub witnesses: WitnessArguments,
    #[command(flatten)]
    pub repository: RepositoryArguments,
    /// How long reads wait for a part of a disk that is not here, because it is still in an image or at the node that
    /// gave the disk away, before they fail, like 60s; for ever when left out
    #[arg(long, alias = "image-wait", env = "GODWIT_READ_WAIT", value_name = "TIME", value_parser = parse_duration)]
    pub read_wait: Option<u64>,
    /// What becomes of them then: they fail, or the virtual machine that this node runs on the disk stands still until it
    /// can go on. Where no machine of this node does, 'pause' lets them wait for ever
    #[arg(
        long,
        env = "GODWIT_READ_WAIT_THEN",
        value_name = "WHAT",
        value_enum,
        default_value_t,
        requires = "read_wait"
    )]
    pub read_wait_then: ReadWaitThen,
    /// How log lines look
    #[arg(long, env = "GODWIT_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormatArgument,
}

#[derive(Debug, Args)]
pub(crate) struct WitnessArguments {
    /// Options for every etcd that is a witness of a protected machine: a file with the lines 'user = …', 'password = …',
    /// 'ca = FILE', 'cert = FILE' and 'key = FILE', each of which may be missing
    #[arg(long, env = "GODWIT_ETCD_OPTIONS", value_name = "FILE")]
    pub etcd_options: Option<PathBuf>,
    /// A command that switches off the host of another node, for protections with the witness 'fence'; ends with 0 only
    /// if that host is off for certain
    #[arg(long, env = "GODWIT_FENCE_WITH", value_name = "COMMAND", value_parser = parse_command)]
    pub fence_with: Option<String>,
}

fn parse_command(text: &str) -> Result<String, String> {
    godwit_node::fence_words(text)?;
    Ok(text.to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct ProcessArguments {
    /// Take part in moves of processes with RDMA connections: nodes that are peers may then start processes here, as
    /// any user. The node must run as root
    #[arg(long, env = "GODWIT_PROCESSES")]
    pub processes: bool,
    /// A folder below which files may be put that processes bring along; may be repeated
    #[arg(
        long = "process-files",
        env = "GODWIT_PROCESS_FILES",
        value_name = "FOLDER",
        value_delimiter = ',',
        action = ArgAction::Append,
        requires = "processes",
        value_parser = parse_folder
    )]
    pub process_files: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReadWaitThen {
    /// They fail
    #[default]
    Error,
    /// The machine stands still
    Pause,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormatArgument {
    /// For people
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

fn parse_folder(text: &str) -> Result<PathBuf, String> {
    if text.starts_with('/') {
        Ok(PathBuf::from(text))
    } else {
        Err("a folder is given by its whole path, like /srv/jobs".to_owned())
    }
}

fn parse_pool(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && folder.starts_with('/') => {
            Ok((name.to_owned(), PathBuf::from(folder)))
        }
        _ => Err("a pool is NAME=FOLDER, like fast=/mnt/nvme".to_owned()),
    }
}

fn parse_memory_pool(text: &str) -> Result<(String, PathBuf), String> {
    parse_pool(text)
        .map_err(|_| "a memory pool is NAME=PATH, like cxl=/mnt/cxl or cxl=/dev/dax0.0".to_owned())
}

fn parse_peer(text: &str) -> Result<(String, String), String> {
    let (name, address) = text
        .split_once('=')
        .ok_or("a peer is NAME=HOST:PORT, like b=192.0.2.7:7001")?;
    let port = address
        .rsplit_once(':')
        .map(|(host, port)| (host, port.parse::<u16>()));
    match port {
        _ if name.is_empty() => Err("the peer's name is missing".to_owned()),
        Some((host, Ok(1..))) if !host.is_empty() => Ok((name.to_owned(), address.to_owned())),
        _ => Err(format!("{address:?} is not HOST:PORT, like 192.0.2.7:7001")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_need_a_name_a_host_and_a_port() {
        assert_eq!(
            parse_peer("b=host:7001"),
            Ok(("b".to_owned(), "host:7001".to_owned()))
        );
        assert_eq!(
            parse_peer("b=[::1]:7001"),
            Ok(("b".to_owned(), "[::1]:7001".to_owned()))
        );
        for text in [
            "",
            "b",
            "=h:1",
            "b=",
            "b=h",
            "b=:1",
            "b=h:0",
            "b=h:70000",
            "b=h:x",
        ] {
            assert!(parse_peer(text).is_err(), "{text}");
        }
    }
}
