//! What a node is told when it starts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use godwit_core::GovernorParts;
use godwit_core::wire::Features;
use godwit_image::Location;

use crate::names;
use crate::node_error::NodeError;
use godwit_qemu::QemuUser;

/// Longest path of a unix socket in bytes: what the kernel's address holds.
pub(crate) const MAX_SOCKET_PATH: usize = 107;

/// What a peer may bring at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncomingLimits {
    /// Disks that are received from it, and, counted for themselves, virtual machines.
    pub count: u32,
    /// The sizes of these disks together, in bytes; `None`: as much as fits.
    pub bytes: Option<u64>,
}

impl Default for IncomingLimits {
    fn default() -> Self {
        Self {
            count: 64,
            bytes: None,
        }
    }
}

/// Everything that a node needs to know to run.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node's name, as in its certificate. The same characters as a disk's name.
    pub name: String,
    /// Where its images, store and sockets live; created when missing.
    pub data_dir: PathBuf,
    /// Where other nodes connect.
    pub listen: SocketAddr,
    /// The certificates of this node; `None` only with [`Self::insecure_loopback`].
    pub tls: Option<TlsFiles>,
    /// Plain TCP between nodes; refused unless every address is on loopback.
    pub insecure_loopback: bool,
    /// Do not encrypt what is in disks and machines' memory on the way to nodes that are told the
    /// same. Who they are is proven, and migrations are controlled, over mutual TLS nevertheless.
    pub unencrypted_data: bool,
    /// Which parts of the governor of a promise take part, for experiments.
    pub governor: GovernorParts,
    /// Compress the disks' data where the link is slower than compressing, to nodes that want it, too.
    pub compression: bool,
    /// Where the API is served over mutual TLS, besides its unix socket.
    pub api_listen: Option<SocketAddr>,
    /// Where NBD clients connect over TCP, besides the unix socket. TLS with client certificates
    /// is required unless [`Self::nbd_plain`].
    pub nbd_listen: Option<SocketAddr>,
    /// NBD over plain TCP; refused unless the address is on loopback.
    pub nbd_plain: bool,
    /// NBD connections to one disk at once, 1 to [`Self::MOST_NBD_CONNECTIONS`].
    pub nbd_connections: u32,
    /// Start virtual machines in QEMU's sandbox.
    pub qemu_sandbox: bool,
    /// Run QEMU as this user instead of the node's. Only for a node that runs as root.
    pub qemu_user: Option<QemuUser>,
    /// How much each of them may bring at a time.
    pub incoming: IncomingLimits,
    /// The other nodes.
    pub peers: Vec<PeerConfig>,
    /// Where disks that arrive may be put, besides the data directory.
    pub pools: Vec<PoolConfig>,
    /// Where images are that disks are created from.
    pub images: ImagesConfig,
    /// How long a read waits for a part of its disk that is not here, but in an image or at the node that gave the
    /// disk away, before it fails; for ever when `None`.
    pub read_wait: Option<Duration>,
    /// What becomes of them then.
    pub read_wait_then: AfterReadWait,
    /// Where the memory of virtual machines may be that other nodes map, too.
    pub memory_pools: Vec<MemoryPoolConfig>,
    /// How it takes part in moves of processes; `None`: not at all.
    pub processes: Option<ProcessesConfig>,
}

/// How a node takes part in moves of processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessesConfig {
    /// Folders, from the root, below which files may be put that processes bring along.
    pub files: Vec<PathBuf>,
}

/// Where images come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagesConfig {
    /// The repository, if there is one.
    pub repository: Option<Location>,
}

/// PEM files that prove who a node is.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The node's certificate chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that every node's and client's certificate is checked against; several while one follows another.
    pub authority: PathBuf,
    /// Lists of certificates that are revoked.
    pub revoked: Option<PathBuf>,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Its name, as in its certificate.
    pub name: String,
    /// Where it takes connections of nodes: `HOST:PORT`.
    pub address: String,
}

/// A folder for images, or of block devices, that other nodes may put disks in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Its name: the same characters as a disk's name.
    pub name: String,
    /// The folder, from the root.
    pub folder: PathBuf,
}

/// Memory that other nodes map, too, under the same name: a folder of files, or a DAX device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPoolConfig {
    /// Its name: the same characters as a disk's name, and the same at every node.
    pub name: String,
    /// The folder, or the device or file, from the root.
    pub folder: PathBuf,
}

/// What becomes of reads that have waited for as long as they may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AfterReadWait {
    /// They fail.
    #[default]
    Error,
    /// A virtual machine that this node runs stands still until what it waits for is here. Others wait on.
    Pause,
}

impl NodeConfig {
    /// The most [`Self::nbd_connections`] that there may be: each has memory and a request of its own.
    pub const MOST_NBD_CONNECTIONS: u32 = 256;

    /// The optional parts of the protocol that it wants.
    pub(crate) fn features(&self) -> Features {
        let wanted = |part, wanted| if wanted { part } else { Features::default() };
        // Without TLS nothing is encrypted that could be left as it is.
        let clear = self.unencrypted_data && self.tls.is_some();
        wanted(Features::CLEAR_DATA, clear)
            .with(wanted(Features::COMPRESSION, self.compression))
            .with(Features::PLACES)
            .with(Features::HOLES)
            .with(Features::POLICIES)
            .with(Features::PULLS)
            .with(Features::DELTAS)
            .with(Features::IMAGE_CHUNKS)
            .with(Features::TWO_PLACES)
            .with(Features::IMAGE_NAMES)
            .with(Features::OWNERS)
            .with(Features::OWNER_BEATS)
            .with(Features::ZEROES)
            .with(Features::ANNOUNCING_GUESTS)
            .with(wanted(Features::IMAGES, self.images.repository.is_some()))
    }

    /// The unix socket of the API.
    pub fn api_socket(&self) -> PathBuf {
        self.data_dir.join("godwit.sock")
    }

    /// The unix socket where NBD clients attach.
    pub fn nbd_socket(&self) -> PathBuf {
        self.data_dir.join("nbd.sock")
    }

    /// The path of the store.
    pub fn store_path(&self) -> PathBuf {
        self.data_dir.join("godwit.redb")
    }

    /// The folder of the images that the node made itself.
    pub fn disks_dir(&self) -> PathBuf {
        self.data_dir.join("disks")
    }

    /// The unix socket where a VM's QEMU uses a disk over vhost-user.
    pub fn vhost_socket(&self, disk: &str) -> PathBuf {
        self.disks_dir().join(format!("{disk}.vhost"))
    }

    /// The folder of the sockets of NICs with names of their own.
    pub(crate) fn nics_dir(&self) -> PathBuf {
        self.data_dir.join("nics")
    }

    /// The unix socket where a QEMU that somebody else starts uses a NIC.
    pub(crate) fn nic_socket(&self, nic: &str) -> PathBuf {
        self.nics_dir().join(format!("{nic}.vhost"))
    }

    /// The folder of what the node knows of images.
    pub(crate) fn images_dir(&self) -> PathBuf {
        self.data_dir.join("images")
    }

    /// The folder of processes' images on their way.
    pub(crate) fn processes_dir(&self) -> PathBuf {
        self.data_dir.join("processes")
    }

    /// The folders below which files may be put that processes bring along.
    pub(crate) fn process_files(&self) -> &[PathBuf] {
        self.processes
            .as_ref()
            .map_or(&[], |processes| &processes.files)
    }

    /// The folder of the VMs' sockets and logs.
    pub fn vms_dir(&self) -> PathBuf {
        self.data_dir.join("vms")
    }
}

impl NodeConfig {
    /// What a node should be told of when it starts: pools in which no disk can arrive now. A file system may be mounted
    /// there later.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let missing = self.pools.iter().filter(|pool| !pool.folder.is_dir());
        let warnings = missing.map(|pool| {
            format!(
                "pool {}: there is no folder {}, so no disk can be put there: make it, or mount what belongs there",
                pool.name,
                pool.folder.display()
            )
        });
        warnings.collect()
    }

    /// Checks that the parts do not contradict each other.
    ///
    /// # Errors
    /// [`NodeError::Config`] saying which do, and what to change.
    pub fn check(&self) -> Result<(), NodeError> {
        let wrong = |text: String| Err(NodeError::Config(text));
        let named = |name: &str| {
            names::check("node", name).map_err(|error| {
                let hint = error.hint.unwrap_or_default();
                NodeError::Config(format!("{}: {hint}", error.message))
            })
        };
        named(&self.name)?;
        let most = Self::MOST_NBD_CONNECTIONS;
        if !(1..=most).contains(&self.nbd_connections) {
            return wrong(format!(
                "--nbd-connections is {}, and 1 to {most} are possible",
                self.nbd_connections
            ));
        }
        if let Some(user) = &self.qemu_user
            && !QemuUser::may_be_used()
        {
            return wrong(format!(
                "--qemu-user {}: only a node that runs as root can start programs as other users",
                user.name()
            ));
        }
        let mut seen = BTreeSet::from([self.name.as_str()]);
        for peer in &self.peers {
            named(&peer.name)?;
            if !seen.insert(&peer.name) {
                return wrong(format!(
                    "two nodes are named {}: each needs its own name",
                    peer.name
                ));
            }
            if !peer.address.contains(':') {
                return wrong(format!(
                    "peer {}: {:?} is not HOST:PORT",
                    peer.name, peer.address
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for pool in &self.pools {
            if let Err(error) = names::check("pool", &pool.name) {
                return wrong(error.message);
            }
            if !seen.insert(&pool.name) {
                return wrong(format!(
                    "two pools are named {}: each needs its own name",
                    pool.name
                ));
            }
            if !pool.folder.is_absolute() {
                return wrong(format!(
                    "pool {}: {} is no path from /",
                    pool.name,
                    pool.folder.display()
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for pool in &self.memory_pools {
            if let Err(error) = names::check("memory pool", &pool.name) {
                return wrong(error.message);
            }
            if !seen.insert(&pool.name) {
                return wrong(format!(
                    "two memory pools are named {}: each needs its own name",
                    pool.name
                ));
            }
            if !pool.folder.is_absolute() {
                return wrong(format!(
                    "memory pool {}: {} is no path from /",
                    pool.name,
                    pool.folder.display()
                ));
            }
        }
        match (&self.tls, self.insecure_loopback) {
            (None, false) => {
                return wrong(String::from(
                    "a node needs certificates: give --cert, --key and --ca ('godwit certs' makes \
                     them), or --insecure-loopback to try it on one machine",
                ));
            }
            (Some(_), true) => {
                return wrong(String::from(
                    "--insecure-loopback turns certificates off: leave out one of them",
                ));
            }
            (None, true) if !self.listen.ip().is_loopback() => {
                return wrong(format!(
                    "--insecure-loopback allows loopback addresses only, and --listen is {}",
                    self.listen
                ));
            }
            _ => {}
        }
        if self.tls.is_none() && self.api_listen.is_some() {
            return wrong(String::from(
                "--api-listen needs certificates: give --cert, --key, --ca",
            ));
        }
        match self.nbd_listen {
            Some(address) if self.nbd_plain && !address.ip().is_loopback() => wrong(format!(
                "--nbd-plain allows loopback addresses only, and --nbd-listen is {address}"
            )),
            Some(_) if !self.nbd_plain && self.tls.is_none() => wrong(String::from(
                "--nbd-listen needs certificates, or --nbd-plain on a loopback address",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn loopback() -> NodeConfig {
        NodeConfig {
            name: String::from("a"),
            data_dir: PathBuf::from("/nowhere"),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tls: None,
            insecure_loopback: true,
            unencrypted_data: false,
            governor: GovernorParts::ALL,
            compression: true,
            api_listen: None,
            nbd_listen: None,
            nbd_plain: false,
            nbd_connections: 64,
            incoming: IncomingLimits::default(),
            qemu_sandbox: true,
            qemu_user: None,
            peers: vec![PeerConfig {
                name: String::from("b"),
                address: String::from("b:1"),
            }],
            pools: Vec::new(),
            images: ImagesConfig::default(),
            read_wait: None,
            read_wait_then: AfterReadWait::default(),
            memory_pools: Vec::new(),
            processes: None,
        }
    }

    #[test]
    fn a_pool_without_its_folder_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let pool = |name: &str, folder: PathBuf| PoolConfig {
            name: String::from(name),
            folder,
        };
        let there = pool("there", folder.path().to_owned());
        let gone = pool("gone", folder.path().join("gone"));
        let config = NodeConfig {
            pools: vec![there, gone],
            ..loopback()
        };
        let [warning] = &config.warnings()[..] else {
            panic!("{:?}", config.warnings())
        };
        assert!(
            warning.starts_with("pool gone: there is no folder "),
            "{warning}"
        );
    }

    #[test]
    fn plain_connections_never_leave_the_machine() {
        loopback().check().expect("loopback is fine");
        let anywhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let near = loopback().listen;
        for wrong in [
            NodeConfig {
                insecure_loopback: false,
                ..loopback()
            },
            NodeConfig {
                listen: anywhere,
                ..loopback()
            },
            NodeConfig {
                nbd_listen: Some(anywhere),
                nbd_plain: true,
                ..loopback()
            },
            NodeConfig {
                nbd_connections: 0,
                ..loopback()
            },
            NodeConfig {
                nbd_connections: NodeConfig::MOST_NBD_CONNECTIONS + 1,
                ..loopback()
            },
            NodeConfig {
                nbd_listen: Some(near),
                ..loopback()
            },
            NodeConfig {
                api_listen: Some(near),
                ..loopback()
            },
        ] {
            assert!(
                matches!(wrong.check(), Err(NodeError::Config(_))),
                "{wrong:?}"
            );
        }
    }

    fn pool(name: &str, folder: &str) -> PoolConfig {
        PoolConfig {
            name: name.to_owned(),
            folder: PathBuf::from(folder),
        }
    }

    fn memory_pool(name: &str, folder: &str) -> MemoryPoolConfig {
        MemoryPoolConfig {
            name: name.to_owned(),
            folder: PathBuf::from(folder),
        }
    }

    #[test]
    fn names_are_checked_and_differ() {
        let own_name = PeerConfig {
            name: String::from("a"),
            address: String::from("h:1"),
        };
        let no_port = PeerConfig {
            name: String::from("c"),
            address: String::from("h"),
        };
        for wrong in [
            NodeConfig {
                name: String::from("a/b"),
                ..loopback()
            },
            NodeConfig {
                peers: vec![own_name],
                ..loopback()
            },
            NodeConfig {
                peers: vec![no_port],
                ..loopback()
            },
            NodeConfig {
                pools: vec![pool("p/q", "/srv")],
                ..loopback()
            },
            NodeConfig {
                pools: vec![pool("p", "/srv"), pool("p", "/mnt")],
                ..loopback()
            },
            NodeConfig {
                pools: vec![pool("p", "srv")],
                ..loopback()
            },
            NodeConfig {
                memory_pools: vec![memory_pool("p/q", "/srv")],
                ..loopback()
            },
            NodeConfig {
                memory_pools: vec![memory_pool("p", "/srv"), memory_pool("p", "/mnt")],
                ..loopback()
            },
            NodeConfig {
                memory_pools: vec![memory_pool("p", "srv")],
                ..loopback()
            },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
