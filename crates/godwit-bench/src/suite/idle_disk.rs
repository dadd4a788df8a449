//! A disk that no guest uses: the duration of its migration and of other ways to copy the disk, and their common
//! limits. Before each, all dirty data is written back and the source leaves the page cache. After each, the copy is
//! compared with the source, because a wrong copy does not count, however fast.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use godwit_testkit::Cluster;
use godwit_testkit::client::RawImage;
use godwit_testkit::cluster::{ClusterOptions, free_port, release_binary};
use godwit_testkit::image::{first_difference, write_random};
use godwit_testkit::nbd::{NbdConnection, NbdTarget};
use godwit_testkit::process::{Process, run};

use crate::common::awaited;

/// A way to copy the bytes to another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// A migration between two nodes, plain TCP: from the command until the destination serves.
    Godwit,
    /// As [`Self::Godwit`], with mutual TLS.
    GodwitTls,
    /// `nbdcopy --flush` between two `nbdkit file` servers, plain TCP.
    Nbdcopy,
    /// `cp --sparse=never`, and `sync` of the copy.
    Cp,
    /// Not a copy: the disk reads the source and at the same time writes as many bytes, in sequence and with direct
    /// I/O. Source and destination share the disk.
    Disk,
    /// Not a copy: as many bytes through a TCP connection over loopback.
    Loopback,
}

impl Way {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit",
            Self::GodwitTls => "godwit, TLS",
            Self::Nbdcopy => "nbdcopy",
            Self::Cp => "cp",
            Self::Disk => "limit of the disk",
            Self::Loopback => "limit of loopback",
        }
    }
}

/// A full disk, and nodes to move it between.
#[derive(Debug)]
pub(crate) struct IdleDisk {
    source: PathBuf,
    dir: PathBuf,
    bytes: u64,
    plain: Cluster,
    tls: Cluster,
    moves: usize,
}

impl IdleDisk {
    /// Fills a disk with random data and starts the nodes.
    pub(crate) fn create(dir: &Path, bytes: u64) -> io::Result<Self> {
        let source = dir.join("source.img");
        write_random(&source, bytes, 42)?;
        let godwit = release_binary()?;
        let cluster = |tls| {
            let godwit = godwit.clone();
            Cluster::start_with(&["a", "b"], ClusterOptions { godwit, tls })
        };
        Ok(Self {
            source,
            dir: dir.to_owned(),
            bytes,
            plain: cluster(false)?,
            tls: cluster(true)?,
            moves: 0,
        })
    }

    /// Copies the disk this way and returns the seconds.
    pub(crate) fn seconds(&mut self, way: Way) -> io::Result<f64> {
        rustix::fs::sync();
        fadvise(File::open(&self.source)?, 0, None, Advice::DontNeed)?;
        std::thread::sleep(Duration::from_secs(1));
        self.moves += 1;
        match way {
            Way::Godwit => self.migrate(&self.plain),
            Way::GodwitTls => self.migrate(&self.tls),
            Way::Nbdcopy => self.copy(|source, copy| {
                let (_from, from) = nbdkit(source)?;
                let (_to, to) = nbdkit(copy)?;
                timed(|| run(Command::new("nbdcopy").args(["--flush", &from.uri(), &to.uri()])))
            }),
            Way::Cp => self.copy(|source, copy| {
                timed(|| {
                    run(Command::new("cp")
                        .arg("--sparse=never")
                        .args([source, copy]))?;
                    File::open(copy)?.sync_all()
                })
            }),
            Way::Disk => {
                let copy = self.dir.join("limit.img");
                let seconds = super::limits::disk(&self.source, &copy, self.bytes);
                std::fs::remove_file(copy)?;
                seconds
            }
            Way::Loopback => super::limits::loopback(self.bytes),
        }
    }

    fn copy(&self, how: impl Fn(&Path, &Path) -> io::Result<f64>) -> io::Result<f64> {
        let copy = self.dir.join("copy.img");
        File::create(&copy)?.set_len(self.bytes)?;
        let seconds = how(&self.source, &copy)?;
        self.compare(&copy)?;
        std::fs::remove_file(copy)?;
        Ok(seconds)
    }

    fn migrate(&self, cluster: &Cluster) -> io::Result<f64> {
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        let disk = format!("idle-{}", self.moves);
        let path = self.source.to_string_lossy();
        a.godwit(&["disk", "create", &disk, "--path", &path])
            .json()?;
        let started = Instant::now();
        let answer = a.godwit(&["migrate", &disk, "--to", "b"]).json()?;
        let seconds = started.elapsed().as_secs_f64();
        if answer["phase"] != "completed" || b.disk_state(&disk) != "serving" {
            return Err(io::Error::other(format!("the disk did not move: {answer}")));
        }
        self.compare(&b.image(&disk)?)?;
        for node in [b, a] {
            node.godwit(&["disk", "rm", &disk]).text()?;
        }
        Ok(seconds)
    }

    fn compare(&self, copy: &Path) -> io::Result<()> {
        let (mut left, mut right) = (RawImage::open(&self.source)?, RawImage::open(copy)?);
        match first_difference(&mut left, &mut right, 0..self.bytes)? {
            None => Ok(()),
            Some(at) => Err(io::Error::other(format!(
                "{} differs at byte {at}",
                copy.display()
            ))),
        }
    }
}

fn timed<T>(what: impl FnOnce() -> io::Result<T>) -> io::Result<f64> {
    let started = Instant::now();
    what()?;
    Ok(started.elapsed().as_secs_f64())
}

fn nbdkit(file: &Path) -> io::Result<(Process, NbdTarget)> {
    let address: SocketAddr = free_port()?;
    let mut command = Command::new("nbdkit");
    command
        .args([
            "-f",
            "-i",
            "127.0.0.1",
            "-p",
            &address.port().to_string(),
            "file",
        ])
        .arg(file);
    let process = Process::spawn(&mut command)?;
    let target = NbdTarget::tcp(address, "");
    let serves = || NbdConnection::connect(&target).ok();
    awaited("nbdkit's service", Duration::from_secs(10), serves)?;
    Ok((process, target))
}
