//! The command `godwit node`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use godwit_node::{
    AfterReadWait, ImagesConfig, IncomingLimits, LogFormat, MemoryPoolConfig, NodeConfig,
    PeerConfig, PoolConfig, ProcessesConfig, TlsFiles, init_logging,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::{Connection, LogFormatArgument, NodeArguments, ReadWaitThen};
use crate::failure::Failure;

/// Default port for connections of other nodes.
const DEFAULT_PORT: u16 = 7001;

pub(crate) fn run(arguments: NodeArguments, connection: Connection) -> Result<(), Failure> {
    let format = match arguments.log_format {
        LogFormatArgument::Text => LogFormat::Text,
        LogFormatArgument::Json => LogFormat::Json,
    };
    let config = config(arguments, connection)?;
    init_logging(format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::caused("cannot start the node", &error))?;
    runtime.block_on(async {
        let unavailable = |error| Failure::caused("cannot listen for signals", &error);
        let mut terminate = signal(SignalKind::terminate()).map_err(unavailable)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(unavailable)?;
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        godwit_node::run(config, shutdown)
            .await
            .map_err(|error| Failure::caused("the node cannot run", &error))
    })
}

/// Builds a node's configuration from the arguments.
///
/// # Errors
/// If the arguments do not fit together.
pub(crate) fn config(
    arguments: NodeArguments,
    connection: Connection,
) -> Result<NodeConfig, Failure> {
    let tls = tls_files(connection, arguments.crl, arguments.insecure_loopback)?;
    let peers = arguments.peers.into_iter();
    let pools = arguments.pools.into_iter();
    let images = ImagesConfig {
        repository: arguments.repository.location()?,
    };
    let memory_pools = arguments.memory_pools.into_iter();
    Ok(NodeConfig {
        images,
        read_wait: arguments.read_wait.map(Duration::from_secs),
        read_wait_then: match arguments.read_wait_then {
            ReadWaitThen::Error => AfterReadWait::Error,
            ReadWaitThen::Pause => AfterReadWait::Pause,
        },
        name: arguments.name,
        data_dir: arguments.data_dir,
        listen: arguments
            .listen
            .unwrap_or_else(|| default_address(arguments.insecure_loopback)),
        tls,
        insecure_loopback: arguments.insecure_loopback,
        unencrypted_data: arguments.unencrypted_data,
        governor: arguments.governor_without,
        compression: !arguments.no_compression,
        api_listen: arguments.api_listen,
        nbd_listen: arguments.nbd_listen,
        nbd_plain: arguments.nbd_plain,
        nbd_connections: arguments.nbd_connections,
        qemu_sandbox: !arguments.no_qemu_sandbox,
        qemu_user: arguments.qemu_user,
        incoming: IncomingLimits {
            count: arguments.max_incoming,
            bytes: arguments.max_incoming_size,
        },
        peers: peers
            .map(|(name, address)| PeerConfig { name, address })
            .collect(),
        pools: pools
            .map(|(name, folder)| PoolConfig { name, folder })
            .collect(),
        memory_pools: memory_pools
            .map(|(name, folder)| MemoryPoolConfig { name, folder })
            .collect(),
        processes: arguments
            .moving_processes
            .processes
            .then_some(ProcessesConfig {
                files: arguments.moving_processes.process_files,
            }),
        etcd_options: arguments.witnesses.etcd_options,
        fence_with: arguments.witnesses.fence_with,
    })
}

/// Returns the files of the node's identity; none for a node of one host.
fn tls_files(
    connection: Connection,
    revoked: Option<PathBuf>,
    insecure_loopback: bool,
) -> Result<Option<TlsFiles>, Failure> {
    match (connection.cert, connection.key, connection.ca) {
        (Some(certificate), Some(key), Some(authority)) => Ok(Some(TlsFiles {
            certificate,
            key,
            authority,
            revoked,
        })),
        (None, None, None) if insecure_loopback => Ok(None),
        (None, None, None) => Err(Failure::usage(
            "a node needs a certificate: --cert, --key and --ca",
        )
        .hint(
            "make them with godwit certs init and godwit certs issue NAME; on one host, \
             --insecure-loopback does without",
        )),
        _ => Err(Failure::usage("--cert, --key and --ca belong together")),
    }
}

fn default_address(insecure_loopback: bool) -> SocketAddr {
    let address = match insecure_loopback {
        true => Ipv4Addr::LOCALHOST,
        false => Ipv4Addr::UNSPECIFIED,
    };
    SocketAddr::from((address, DEFAULT_PORT))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::arguments::{Arguments, Command};

    fn parse(more: &[&str]) -> Result<NodeConfig, Failure> {
        let line = ["godwit", "node", "--name", "a", "--data-dir", "/d"];
        let parsed = Arguments::try_parse_from(line.iter().chain(more)).unwrap();
        let Command::Node(arguments) = parsed.command else {
            panic!("not a node")
        };
        config(*arguments, parsed.connection)
    }

    #[test]
    fn certificates_come_whole_or_not_at_all() {
        let config = parse(&["--cert", "c", "--key", "k", "--ca", "a"]).unwrap();
        assert!(config.tls.is_some());
        assert!(
            parse(&["--cert", "c"])
                .unwrap_err()
                .message
                .contains("belong together")
        );
        assert!(
            parse(&[])
                .unwrap_err()
                .hint
                .unwrap()
                .contains("godwit certs init")
        );
        let loopback = parse(&["--insecure-loopback"]).unwrap();
        assert!(loopback.tls.is_none() && loopback.listen.ip().is_loopback());
    }

    #[test]
    fn data_is_encrypted_unless_asked_otherwise() {
        let certificates = ["--cert", "c", "--key", "k", "--ca", "a"];
        assert!(!parse(&certificates).unwrap().unencrypted_data);
        let asked = [&certificates[..], &["--unencrypted-data"]].concat();
        assert!(parse(&asked).unwrap().unencrypted_data);
    }

    #[test]
    fn disks_are_compressed_unless_asked_otherwise() {
        let plain = ["--insecure-loopback"];
        assert!(parse(&plain).unwrap().compression);
        let asked = [&plain[..], &["--no-compression"]].concat();
        assert!(!parse(&asked).unwrap().compression);
    }

    #[test]
    fn peers_are_listed_or_repeated() {
        let more = [
            "--insecure-loopback",
            "--peer",
            "b=h:1,c=h:2",
            "--peer",
            "d=h:3",
        ];
        let names: Vec<_> = parse(&more)
            .unwrap()
            .peers
            .into_iter()
            .map(|p| p.name)
            .collect();
        assert_eq!(names, ["b", "c", "d"]);
    }
}
