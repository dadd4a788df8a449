//! Godwit nodes as real processes on loopback.

mod binary;
mod command;
mod expect;
mod memory_disk;
mod memory_pool;
mod node;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

pub use binary::{godwit_binary, release_binary};
pub use command::{Failure, GodwitCommand};
pub use node::{Node, NodeSpec, StandsStill};

pub use self::memory_disk::MemoryDisk;
pub use self::memory_pool::MemoryPool;
use crate::network::Namespace;
use crate::process::{end_machines_of, run, scratch_dir};
use crate::proxy::Proxy;

/// Ports to try in [`free_port`].
const PORTS: Range<u16> = 20_000..32_000;

/// The setup of a cluster's nodes.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    pub godwit: PathBuf,
    /// True if the nodes talk over mutual TLS; otherwise plain TCP on loopback.
    pub tls: bool,
}

impl ClusterOptions {
    /// Returns the options with the tests' binary, and TLS.
    pub fn secure() -> io::Result<Self> {
        let (godwit, tls) = (godwit_binary()?, true);
        Ok(Self { godwit, tls })
    }

    /// Returns the options with the tests' binary, and plain TCP.
    pub fn plain() -> io::Result<Self> {
        let (godwit, tls) = (godwit_binary()?, false);
        Ok(Self { godwit, tls })
    }

    /// Returns the options with the demos' and the benchmarks' binary, and TLS.
    ///
    /// # Errors
    /// If there is no such binary.
    pub fn release() -> io::Result<Self> {
        Ok(Self {
            godwit: release_binary()?,
            tls: true,
        })
    }
}

/// A node's name, and its network namespace; `None` for loopback.
pub type Host<'a> = (&'a str, Option<&'a Namespace>);

/// Nodes that know each other, in a directory removed with the cluster.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    certificates: PathBuf,
    dir: TempDir,
    memory: Vec<MemoryDisk>,
    options: ClusterOptions,
}

impl Cluster {
    /// Starts nodes with these names, with TLS, from the tests' binary.
    pub fn start(names: &[&str]) -> io::Result<Self> {
        Self::start_with(names, ClusterOptions::secure()?)
    }

    /// Prepares nodes of the tests' binary, with TLS, and starts nothing.
    #[track_caller]
    pub fn secure(names: &[&str]) -> Self {
        let options = ClusterOptions::secure().expect("a binary");
        Self::prepare(names, options).expect("certificates")
    }

    /// Does the same with plain TCP.
    #[track_caller]
    pub fn plain(names: &[&str]) -> Self {
        let options = ClusterOptions::plain().expect("a binary");
        Self::prepare(names, options).expect("certificates")
    }

    /// Starts nodes with these names.
    pub fn start_with(names: &[&str], options: ClusterOptions) -> io::Result<Self> {
        let mut cluster = Self::prepare(names, options)?;
        cluster.start_all()?;
        Ok(cluster)
    }

    /// Starts nodes `a` and `b`, with TLS, from the tests' binary. The nodes reach each other only through links with
    /// adjustable conditions: the first link leads from `a` to `b`.
    pub fn start_linked(seed: u64) -> io::Result<(Self, Vec<Proxy>)> {
        let (mut cluster, links) = Self::prepare_linked(seed)?;
        cluster.start_all()?;
        Ok((cluster, links))
    }

    /// Does the same as [`Cluster::start_linked`], but starts nothing.
    pub fn prepare_linked(seed: u64) -> io::Result<(Self, Vec<Proxy>)> {
        let mut cluster = Self::prepare(&["a", "b"], ClusterOptions::secure()?)?;
        let mut links = Vec::new();
        for (from, to) in [("a", "b"), ("b", "a")] {
            let link = Proxy::start(cluster.node(to).spec().listen, seed)?;
            cluster.node_mut(from).spec_mut().peers = vec![(to.to_owned(), link.address())];
            links.push(link);
        }
        Ok((cluster, links))
    }

    /// Prepares directories, ports and certificates, and starts nothing.
    pub fn prepare(names: &[&str], options: ClusterOptions) -> io::Result<Self> {
        let hosts: Vec<Host> = names.iter().map(|name| (*name, None)).collect();
        Self::prepare_on(&hosts, options)
    }

    /// Prepares directories, ports and certificates for nodes in network namespaces, or on loopback without one, and
    /// starts nothing.
    pub fn prepare_on(hosts: &[Host<'_>], options: ClusterOptions) -> io::Result<Self> {
        let dir = scratch_dir()?;
        let certificates = dir.path().join("certs");
        let godwit = &options.godwit;
        authority(godwit, &certificates)?;
        let address = |namespace: Option<&Namespace>| -> io::Result<SocketAddr> {
            let mut address = free_port()?;
            if let Some(namespace) = namespace {
                address.set_ip(namespace.address().into());
            }
            Ok(address)
        };
        let addresses = hosts
            .iter()
            .map(|(_, namespace)| address(*namespace))
            .collect::<io::Result<Vec<_>>>()?;
        let mut nodes = Vec::with_capacity(hosts.len());
        for (index, (name, namespace)) in hosts.iter().enumerate() {
            let ip = addresses[index].ip().to_string();
            issue(godwit, &certificates, name, &["--ip", &ip])?;
            let peers = hosts.iter().zip(&addresses).enumerate();
            let spec = NodeSpec {
                godwit: godwit.clone(),
                name: (*name).to_owned(),
                dir: dir.path().join(name),
                listen: addresses[index],
                nbd_listen: address(*namespace)?,
                nbd_plain: !options.tls,
                certificates: certificates.clone(),
                certificate_of: (*name).to_owned(),
                tls: options.tls,
                unencrypted_data: false,
                environment: Vec::new(),
                options: Vec::new(),
                peers: peers
                    .filter(|(other, _)| *other != index)
                    .map(|(_, ((peer, _), address))| ((*peer).to_owned(), *address))
                    .collect(),
                pools: Vec::new(),
                qemu_user: None,
                namespace: namespace.map(|namespace| namespace.name().to_owned()),
            };
            nodes.push(Node::new(spec)?);
        }
        Ok(Self {
            nodes,
            certificates,
            dir,
            memory: Vec::new(),
            options,
        })
    }

    pub fn node(&self, name: &str) -> &Node {
        let found = self.nodes.iter().find(|node| node.name() == name);
        found.unwrap_or_else(|| panic!("no node '{name}' in this cluster"))
    }

    /// Returns the node of this name, mutable for a stop and a start.
    pub fn node_mut(&mut self, name: &str) -> &mut Node {
        let found = self.nodes.iter_mut().find(|node| node.name() == name);
        found.unwrap_or_else(|| panic!("no node '{name}' in this cluster"))
    }

    /// Puts the disks of a prepared node into memory, in place of a second disk of the machine. There is room for this
    /// many bytes.
    pub fn put_in_memory(&mut self, name: &str, room: u64) -> io::Result<()> {
        let disk = MemoryDisk::new(room)?;
        std::os::unix::fs::symlink(disk.path(), self.node(name).spec().dir.join("disks"))?;
        self.memory.push(disk);
        Ok(())
    }

    /// Starts all prepared nodes.
    pub fn start_all(&mut self) -> io::Result<()> {
        self.nodes.iter_mut().try_for_each(|node| node.start(&[]))
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the directory of the cluster.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the folder of the nodes' certificates: `ca.pem`, `NAME.pem`, `NAME.key`.
    pub fn certificates(&self) -> &Path {
        &self.certificates
    }

    pub fn options(&self) -> &ClusterOptions {
        &self.options
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in &self.nodes {
                eprintln!(
                    "--- log of node '{}' ---\n{}",
                    node.name(),
                    node.log_tail(60)
                );
            }
        }
        // Machines outlive their node; the machines of a failed test would run for ever.
        end_machines_of(self.dir.path());
    }
}

pub fn authority(godwit: &Path, directory: &Path) -> io::Result<()> {
    let mut command = Command::new(godwit);
    command.args(["certs", "init", "--dir"]).arg(directory);
    run(&mut command).map(drop)
}

/// Issues a certificate from the authority in `directory`.
pub fn issue(godwit: &Path, directory: &Path, name: &str, more: &[&str]) -> io::Result<()> {
    let mut command = Command::new(godwit);
    command
        .args(["certs", "issue", name, "--dir"])
        .arg(directory)
        .args(more);
    run(&mut command).map(drop)
}

/// Returns a free port of loopback. The port lies below the kernel's range for outgoing connections, so that no
/// connection takes the port before the node listens.
pub fn free_port() -> io::Result<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Concurrent test processes start at different places.
    let base = std::process::id().wrapping_mul(61);
    let mut last = io::Error::other("no port was tried");
    for _ in 0..PORTS.len() {
        let number = base.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + (number % PORTS.len() as u32) as u16;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(listener) => return listener.local_addr(),
            Err(error) => last = error,
        }
    }
    Err(last)
}
