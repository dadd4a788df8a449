//! The configuration of a node.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use godwit_core::wire::Features;
use godwit_core::{GovernorParts, POLICIES};
use godwit_image::Location;
use godwit_peers::config::{PeerConfig, TlsFiles};

use crate::node_error::NodeError;
use godwit_peers::names;
use godwit_qemu::QemuUser;

/// Longest path of a unix socket in bytes, limited by the kernel's address.
pub const MAX_SOCKET_PATH: usize = 107;

/// Limits on the disks and VMs that a peer may bring at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncomingLimits {
    /// Disks received from the peer at once. Also the limit for VMs, counted separately.
    pub count: u32,
    /// The sizes of these disks together, in bytes; `None` for as much as fits.
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

/// The configuration of a node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node's name, as in its certificate. Takes the same characters as a disk's name.
    pub name: String,
    /// The directory of images, store and sockets; created if missing.
    pub data_dir: PathBuf,
    /// The address for connections of other nodes.
    pub listen: SocketAddr,
    /// The certificates of this node; `None` only with [`Self::insecure_loopback`].
    pub tls: Option<TlsFiles>,
    /// True for plain TCP between nodes; refused unless every address is on loopback.
    pub insecure_loopback: bool,
    /// True to send the contents of disks and of VM memory unencrypted to nodes with the same setting. Nodes still
    /// authenticate, and control migrations, over mutual TLS.
    pub unencrypted_data: bool,
    /// The active parts of the governor of a promise, for experiments.
    pub governor: GovernorParts,
    /// True to compress the disks' data if the link is slower than compression and the other node wants compression
    /// too.
    pub compression: bool,
    /// The address of the API over mutual TLS, besides its unix socket.
    pub api_listen: Option<SocketAddr>,
    /// The address for NBD clients over TCP, besides the unix socket. TLS with client certificates is required unless
    /// [`Self::nbd_plain`].
    pub nbd_listen: Option<SocketAddr>,
    /// True for NBD over plain TCP; refused unless the address is on loopback.
    pub nbd_plain: bool,
    /// NBD connections to one disk at once, 1 to [`Self::MOST_NBD_CONNECTIONS`].
    pub nbd_connections: u32,
    /// True to start VMs in QEMU's sandbox.
    pub qemu_sandbox: bool,
    /// The user for QEMU instead of the node's user. Only for a node that runs as root.
    pub qemu_user: Option<QemuUser>,
    /// Limits on the disks and VMs that each peer may bring at once.
    pub incoming: IncomingLimits,
    /// The other nodes.
    pub peers: Vec<PeerConfig>,
    /// The pools for arriving disks, besides the data directory.
    pub pools: Vec<PoolConfig>,
    /// The source of the images that disks are created from.
    pub images: ImagesConfig,
    /// Longest wait of a read for a missing part of its disk, from an image or from the disk's previous owner; `None`
    /// for no limit.
    pub read_wait: Option<Duration>,
    /// The fate of reads after this wait.
    pub read_wait_then: AfterReadWait,
    /// The pools of VM memory that other nodes map, too.
    pub memory_pools: Vec<MemoryPoolConfig>,
    /// The settings for moves of processes; `None` to refuse moves of processes.
    pub processes: Option<ProcessesConfig>,
    /// The file with the options for every etcd that is a witness.
    pub etcd_options: Option<PathBuf>,
    /// The command that fences the host of another node, if this node has one.
    pub fence_with: Option<String>,
}

/// The settings for moves of processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessesConfig {
    /// Absolute folders that may receive the files that processes bring along.
    pub files: Vec<PathBuf>,
}

/// The source of images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagesConfig {
    /// The repository, if configured.
    pub repository: Option<Location>,
}

/// A folder for images or of block devices, open to disks from other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// The pool's name. Takes the same characters as a disk's name.
    pub name: String,
    /// The absolute path of the folder.
    pub folder: PathBuf,
}

/// Memory that other nodes map, too, under the same name: a folder of files, or a DAX device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPoolConfig {
    /// The pool's name, equal at every node. Takes the same characters as a disk's name.
    pub name: String,
    /// The absolute path of the folder, device or file.
    pub folder: PathBuf,
}

/// The fate of reads that have waited for the longest allowed time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AfterReadWait {
    /// The reads fail.
    #[default]
    Error,
    /// The VM is paused until the missing part arrives, if this node runs the VM. Other clients wait on.
    Pause,
}

impl NodeConfig {
    /// Returns the configuration of a node that trusts all of loopback, without peers, and otherwise with the defaults.
    pub fn on_loopback(name: &str, data_dir: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            data_dir,
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
            qemu_sandbox: true,
            qemu_user: None,
            incoming: IncomingLimits::default(),
            peers: Vec::new(),
            pools: Vec::new(),
            images: ImagesConfig::default(),
            read_wait: None,
            read_wait_then: AfterReadWait::default(),
            memory_pools: Vec::new(),
            processes: None,
            etcd_options: None,
            fence_with: None,
        }
    }

    /// The upper limit of [`Self::nbd_connections`]: each connection holds memory and a request of its own.
    pub const MOST_NBD_CONNECTIONS: u32 = 256;

    /// Returns the optional parts of the protocol that this node wants.
    pub fn features(&self) -> Features {
        let wanted = |part, wanted| if wanted { part } else { Features::default() };
        // Without TLS nothing is encrypted, so clear data needs no feature.
        let clear = self.unencrypted_data && self.tls.is_some();
        let policies = POLICIES.map(|policy| policy.needs);
        wanted(Features::CLEAR_DATA, clear)
            .with(wanted(Features::COMPRESSION, self.compression))
            .with(Features::PLACES)
            .with(Features::HOLES)
            .with(policies.into_iter().fold(Features(0), Features::with))
            .with(Features::DELTAS)
            .with(Features::IMAGE_CHUNKS)
            .with(Features::TWO_PLACES)
            .with(Features::IMAGE_NAMES)
            .with(Features::OWNERS)
            .with(Features::OWNER_BEATS)
            .with(Features::ZEROES)
            .with(Features::FOLLOWS)
            .with(Features::CHECKPOINTS)
            .with(Features::ACTIVITY)
            .with(Features::ANNOUNCING_GUESTS)
            .with(Features::WITNESS)
            .with(wanted(Features::IMAGES, self.images.repository.is_some()))
    }

    /// Returns the path of the API's unix socket.
    pub fn api_socket(&self) -> PathBuf {
        self.data_dir.join("godwit.sock")
    }

    /// Returns the path of the unix socket for NBD clients.
    pub fn nbd_socket(&self) -> PathBuf {
        self.data_dir.join("nbd.sock")
    }

    /// Returns the path of the store.
    pub fn store_path(&self) -> PathBuf {
        self.data_dir.join("godwit.redb")
    }

    /// Returns the folder of the images that the node made.
    pub fn disks_dir(&self) -> PathBuf {
        self.data_dir.join("disks")
    }

    /// Returns the path of a disk's vhost-user socket, for a VM's QEMU.
    pub fn vhost_socket(&self, disk: &str) -> PathBuf {
        self.disks_dir().join(format!("{disk}.vhost"))
    }

    /// Returns the folder of the sockets of named NICs.
    pub fn nics_dir(&self) -> PathBuf {
        self.data_dir.join("nics")
    }

    /// Returns the path of a named NIC's socket, for a QEMU that Godwit did not start.
    pub fn nic_socket(&self, nic: &str) -> PathBuf {
        self.nics_dir().join(format!("{nic}.vhost"))
    }

    /// Returns the folder of the node's knowledge of images.
    pub fn images_dir(&self) -> PathBuf {
        self.data_dir.join("images")
    }

    /// Returns the folder of the images of moving processes.
    pub fn processes_dir(&self) -> PathBuf {
        self.data_dir.join("processes")
    }

    /// Returns the folders that may receive the files that processes bring along.
    pub fn process_files(&self) -> &[PathBuf] {
        self.processes
            .as_ref()
            .map_or(&[], |processes| &processes.files)
    }

    /// Returns the folder of the VMs' sockets and logs.
    pub fn vms_dir(&self) -> PathBuf {
        self.data_dir.join("vms")
    }
}

impl NodeConfig {
    /// Returns warnings for the node's start: pools that cannot take a disk now. A file system may be mounted there
    /// later.
    pub fn warnings(&self) -> Vec<String> {
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

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// [`NodeError::Config`] naming the contradiction and a remedy.
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
mod tests {
    use super::*;

    fn loopback() -> NodeConfig {
        let mut config = NodeConfig::on_loopback("a", PathBuf::from("/nowhere"));
        config.peers.push(PeerConfig {
            name: String::from("b"),
            address: String::from("b:1"),
        });
        config
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
