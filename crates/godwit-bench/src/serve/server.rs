//! Servers of the image.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use super::device::Device;
use super::nbd::NbdDevice;
use super::vhost::VhostDevice;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::nbd::{NbdConnection, NbdTarget};
use godwit_testkit::process::Process;
use godwit_testkit::vm::block_nodes;

use crate::common::awaited;

const PATIENCE: Duration = Duration::from_secs(30);
const DISK: &str = "disk";

/// The access of a client to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FrontEnd {
    /// NBD over a Unix socket.
    Nbd,
    VhostUserBlk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Godwit,
    QemuNbd,
    /// `nbdkit` with its file plugin.
    Nbdkit,
    /// QEMU's storage daemon, which serves in its main loop.
    StorageDaemon,
    /// QEMU's storage daemon with a thread for the disk.
    StorageDaemonThread,
}

/// A running server of the image.
#[derive(Debug)]
pub(crate) struct Server {
    place: Place,
    running: Running,
}

#[derive(Debug)]
enum Place {
    Nbd(NbdTarget),
    VhostUserBlk(PathBuf),
}

#[derive(Debug)]
enum Running {
    Godwit(Cluster),
    Other(Process),
}

impl FrontEnd {
    pub(crate) const ALL: [Self; 2] = [Self::Nbd, Self::VhostUserBlk];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::VhostUserBlk => "vhost-user-blk",
        }
    }

    /// Returns the servers with this front end.
    pub(crate) const fn servers(self) -> &'static [Kind] {
        match self {
            Self::Nbd => &[
                Kind::Godwit,
                Kind::QemuNbd,
                Kind::Nbdkit,
                Kind::StorageDaemon,
                Kind::StorageDaemonThread,
            ],
            Self::VhostUserBlk => &[Kind::Godwit, Kind::StorageDaemon, Kind::StorageDaemonThread],
        }
    }
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit",
            Self::QemuNbd => "qemu-nbd",
            Self::Nbdkit => "nbdkit file",
            Self::StorageDaemon => "qemu-storage-daemon",
            Self::StorageDaemonThread => "qemu-storage-daemon iothread",
        }
    }

    /// Returns true if the server uses direct I/O on the image.
    pub(crate) const fn is_direct(self) -> bool {
        !matches!(self, Self::Nbdkit)
    }

    /// Returns the server's options for the image.
    pub(crate) const fn disk_options(self) -> &'static str {
        match self {
            Self::Godwit => "O_DIRECT, io_uring",
            Self::QemuNbd => "--cache=none --aio=io_uring",
            // nbdkit has no direct I/O and evicts the pages from the page cache afterwards.
            Self::Nbdkit => "cache=none",
            Self::StorageDaemon => "cache.direct=on,aio=io_uring",
            Self::StorageDaemonThread => "cache.direct=on,aio=io_uring, iothread",
        }
    }
}

impl Server {
    /// Serves the image, with sockets in `dir`.
    pub(crate) fn start(
        kind: Kind,
        front_end: FrontEnd,
        image: &Path,
        dir: &Path,
    ) -> io::Result<Self> {
        let socket = dir.join("server.sock");
        // A leftover of the last turn would be taken for this turn's socket.
        let _ = std::fs::remove_file(&socket);
        let mut command = match kind {
            Kind::Godwit => return Self::start_godwit(front_end, image),
            Kind::QemuNbd => qemu_nbd(image, &socket),
            Kind::Nbdkit => nbdkit(image, &socket),
            Kind::StorageDaemon => storage_daemon(image, &socket, front_end, false),
            Kind::StorageDaemonThread => storage_daemon(image, &socket, front_end, true),
        };
        let process = Process::spawn(&mut command)?;
        let place = match front_end {
            FrontEnd::Nbd => {
                let target = NbdTarget::unix(&socket, if takes_any_name(kind) { "" } else { DISK });
                awaited("an answer of the server", PATIENCE, || {
                    NbdConnection::connect(&target).ok()
                })?;
                Place::Nbd(target)
            }
            FrontEnd::VhostUserBlk => Place::VhostUserBlk(appeared(socket)?),
        };
        Ok(Self {
            place,
            running: Running::Other(process),
        })
    }

    fn start_godwit(front_end: FrontEnd, image: &Path) -> io::Result<Self> {
        let options = ClusterOptions {
            godwit: release_binary()?,
            tls: false,
        };
        let cluster = Cluster::start_with(&["a"], options)?;
        let node = cluster.node("a");
        let image = image.to_string_lossy();
        node.godwit(&["disk", "create", DISK, "--path", &image])
            .json()?;
        let place = match front_end {
            FrontEnd::Nbd => Place::Nbd(node.nbd(DISK)),
            FrontEnd::VhostUserBlk => Place::VhostUserBlk(appeared(node.vhost_socket(DISK))?),
        };
        Ok(Self {
            place,
            running: Running::Godwit(cluster),
        })
    }

    /// Connects a client with `depth` places of `bytes` each.
    pub(crate) fn connect(&self, depth: usize, bytes: usize) -> io::Result<Box<dyn Device>> {
        Ok(match &self.place {
            Place::Nbd(target) => Box::new(NbdDevice::connect(target, depth, bytes, PATIENCE)?),
            Place::VhostUserBlk(socket) => {
                Box::new(VhostDevice::connect(socket, depth, bytes, PATIENCE)?)
            }
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        match &self.running {
            Running::Godwit(cluster) => cluster.node("a").pid().unwrap_or(0),
            Running::Other(process) => process.id(),
        }
    }

    /// Ends the server, so that another may use the image.
    pub(crate) fn stop(self) -> io::Result<()> {
        match self.running {
            Running::Godwit(mut cluster) => cluster.node_mut("a").terminate(PATIENCE),
            Running::Other(mut process) => {
                process.signal(Signal::TERM);
                process.wait(PATIENCE).map(drop)
            }
        }
    }
}

fn qemu_nbd(image: &Path, socket: &Path) -> Command {
    let mut command = Command::new("qemu-nbd");
    command
        .args([
            "--format=raw",
            "--cache=none",
            "--aio=io_uring",
            "--discard=unmap",
        ])
        .arg("--persistent")
        .arg("--socket")
        .arg(socket)
        .arg(image);
    command
}

fn nbdkit(image: &Path, socket: &Path) -> Command {
    let mut command = Command::new("nbdkit");
    command
        .args(["--foreground", "--unix"])
        .arg(socket)
        .arg("file")
        .arg(image)
        .arg("cache=none");
    command
}

fn storage_daemon(image: &Path, socket: &Path, front_end: FrontEnd, thread: bool) -> Command {
    let mut command = Command::new("qemu-storage-daemon");
    let in_thread = if thread {
        command.args(["--object", "iothread,id=thread"]);
        ",iothread=thread"
    } else {
        ""
    };
    command.args(block_nodes(DISK, image));
    let socket = socket.display();
    match front_end {
        FrontEnd::Nbd => command
            .arg("--nbd-server")
            .arg(format!("addr.type=unix,addr.path={socket}"))
            .arg("--export")
            .arg(format!(
                "type=nbd,id=export,node-name={DISK},name={DISK},writable=on{in_thread}"
            )),
        FrontEnd::VhostUserBlk => command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name={DISK},writable=on,addr.type=unix,\
             addr.path={socket}{in_thread}"
        )),
    };
    command
}

/// Returns true if the server has a single export without a name.
const fn takes_any_name(kind: Kind) -> bool {
    matches!(kind, Kind::QemuNbd | Kind::Nbdkit)
}

fn appeared(socket: PathBuf) -> io::Result<PathBuf> {
    awaited("the server's socket", PATIENCE, || {
        socket.exists().then_some(())
    })?;
    Ok(socket)
}
