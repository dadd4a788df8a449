//! Who serves the image.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::process::{Process, wait_for};
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(20);
const DISK: &str = "disk";

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A godwit node.
    Godwit,
    /// QEMU's storage daemon.
    Daemon,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Godwit, Self::Daemon];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit",
            Self::Daemon => "qemu-storage-daemon",
        }
    }
}

/// A server of the image that runs.
#[derive(Debug)]
pub(crate) struct Server {
    socket: PathBuf,
    running: Running,
}

#[derive(Debug)]
enum Running {
    Godwit(Cluster),
    Daemon(Process),
}

impl Server {
    /// Serves the image.
    ///
    /// # Errors
    /// When the server does not come up.
    pub(crate) fn start(kind: Kind, image: &Path, dir: &Path) -> io::Result<Self> {
        match kind {
            Kind::Godwit => Self::start_godwit(image),
            Kind::Daemon => Self::start_daemon(image, dir),
        }
    }

    fn start_godwit(image: &Path) -> io::Result<Self> {
        let options = ClusterOptions {
            godwit: release_binary()?,
            tls: false,
        };
        let cluster = Cluster::start_with(&["a"], options)?;
        let node = cluster.node("a");
        let image = image.to_string_lossy();
        node.godwit(&["disk", "create", DISK, "--path", &image])
            .json()?;
        let socket = node.vhost_socket(DISK);
        Ok(Self {
            socket: appeared(socket)?,
            running: Running::Godwit(cluster),
        })
    }

    fn start_daemon(image: &Path, dir: &Path) -> io::Result<Self> {
        let socket = dir.join("daemon.sock");
        // What is left of the last turn would look like the socket of this one.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-storage-daemon");
        command
            .arg("--blockdev")
            .arg(format!(
                "driver=file,node-name=file,filename={},cache.direct=on,aio=io_uring,discard=unmap",
                image.display()
            ))
            .args(["--blockdev", "driver=raw,node-name=disk,file=file,cache.direct=on"])
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={}",
                socket.display()
            ));
        let process = Process::spawn(&mut command)?;
        Ok(Self {
            socket: appeared(socket)?,
            running: Running::Daemon(process),
        })
    }

    /// Where its clients connect.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        match &self.running {
            Running::Godwit(cluster) => cluster.node("a").pid().unwrap_or(0),
            Running::Daemon(process) => process.id(),
        }
    }

    /// Ends it, so that another may use the image.
    ///
    /// # Errors
    /// When it does not end.
    pub(crate) fn stop(self) -> io::Result<()> {
        match self.running {
            Running::Godwit(mut cluster) => cluster.node_mut("a").terminate(PATIENCE),
            Running::Daemon(mut process) => {
                process.signal(Signal::TERM);
                process.wait(PATIENCE).map(drop)
            }
        }
    }
}

fn appeared(socket: PathBuf) -> io::Result<PathBuf> {
    wait_for(PATIENCE, || socket.exists().then_some(()))
        .ok_or_else(|| io::Error::other(format!("{} does not appear", socket.display())))?;
    Ok(socket)
}
