//! Two hosts with a link between them, and the image to move.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryDisk, NodeSpec};
use godwit_testkit::image::{write_files, write_random};
use godwit_testkit::network::Link;
use godwit_testkit::process::scratch_dir;
use rustix::fs::{Advice, fadvise};
use tempfile::TempDir;

use super::rest::Rest;

/// The destination of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Destination {
    /// The source's disk, which the guest then shares with both
    SameDisk,
    /// A disk in memory, in place of a second disk of the machine
    Memory,
}

/// The content of the image, and of the guest's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Data {
    /// Incompressible random data
    Random,
    /// The files of this system, and writes that compress to half
    Files,
}

/// Two network namespaces, a directory on the real file system, and a full image in it.
#[derive(Debug)]
pub(crate) struct Site {
    /// Link from the source to the destination.
    pub(crate) link: Link,
    pub(crate) bytes: u64,
    destination: Destination,
    rest: Rest,
    dir: TempDir,
}

impl Site {
    /// Creates a site with a link of `gigabits`, and with `settle` as the longest wait for the disk to be at rest
    /// before a move.
    pub(crate) fn new(
        gigabits: Option<f64>,
        bytes: u64,
        destination: Destination,
        data: Data,
        settle: Duration,
    ) -> io::Result<Self> {
        let dir = scratch_dir()?;
        let site = Self {
            link: Link::new(gigabits.map(|gigabits| (gigabits * 1e9) as u64))?,
            bytes,
            destination,
            rest: Rest::new(dir.path(), settle),
            dir,
        };
        match data {
            Data::Random => write_random(&site.image(), bytes, 42)?,
            Data::Files => write_files(&site.image(), bytes, Path::new("/usr"))?,
        }
        Ok(site)
    }

    /// Starts two nodes of the release build, one at each end of the link, with mutual TLS and the options of `adapt`.
    pub(crate) fn nodes(
        &self,
        [from, to]: [&str; 2],
        adapt: impl Fn(&mut NodeSpec),
    ) -> io::Result<Cluster> {
        let hosts = [
            (from, Some(self.link.left())),
            (to, Some(self.link.right())),
        ];
        let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::release()?)?;
        for name in [from, to] {
            adapt(cluster.node_mut(name).spec_mut());
        }
        if self.destination == Destination::Memory {
            cluster.put_in_memory(to, self.bytes)?;
        }
        cluster.start_all()?;
        Ok(cluster)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of the image at the source. Every run starts from the last run's result, which is data of the
    /// same kind.
    pub(crate) fn image(&self) -> PathBuf {
        self.dir().join("source.img")
    }

    /// Returns the destination's disk in memory, if it has one.
    pub(crate) fn memory_disk(&self) -> io::Result<Option<MemoryDisk>> {
        match self.destination {
            Destination::SameDisk => Ok(None),
            Destination::Memory => MemoryDisk::new(self.bytes).map(Some),
        }
    }

    /// Flushes dirty data and drops the image from the page cache. Returns true if the disk is at rest, `None` if that
    /// was not checked.
    pub(crate) fn settle(&self) -> io::Result<Option<bool>> {
        rustix::fs::sync();
        let at_rest = self.rest.wait()?;
        fadvise(File::open(self.image())?, 0, None, Advice::DontNeed)?;
        Ok(at_rest)
    }
}
