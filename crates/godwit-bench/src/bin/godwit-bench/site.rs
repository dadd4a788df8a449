//! Two hosts with a link between them, and the image that moves.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryDisk, NodeSpec, release_binary};
use godwit_testkit::image::{write_files, write_random};
use godwit_testkit::network::Link;
use godwit_testkit::process::scratch_dir;
use rustix::fs::{Advice, fadvise};
use tempfile::TempDir;

use crate::rest::Rest;

/// Where the image goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Destination {
    /// The disk that it comes from, which the guest then shares with both
    SameDisk,
    /// A disk in memory: what one machine has in place of a second disk
    Memory,
}

/// What is in the image, and what the guest writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Data {
    /// Random data: nothing makes it shorter
    Random,
    /// The files of this system, and writes that compress to half
    Files,
}

/// Two network namespaces, a directory on the real file system, and a full image in it.
#[derive(Debug)]
pub(crate) struct Site {
    /// From the source to the destination.
    pub(crate) link: Link,
    /// Bytes of the image.
    pub(crate) bytes: u64,
    destination: Destination,
    rest: Rest,
    dir: TempDir,
}

impl Site {
    /// A site whose link is capped and whose disk gets as long as `settle` to come to rest before a move.
    ///
    /// # Errors
    /// When the link or the image cannot be made.
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

    /// Two nodes of the program that users get, one at each end of the link, with mutual TLS and whatever
    /// else `adapt` gives them.
    ///
    /// # Errors
    /// When one does not come up.
    pub(crate) fn nodes(
        &self,
        [from, to]: [&str; 2],
        adapt: impl Fn(&mut NodeSpec),
    ) -> io::Result<Cluster> {
        let options = ClusterOptions {
            godwit: release_binary()?,
            tls: true,
        };
        let hosts = [
            (from, Some(self.link.left())),
            (to, Some(self.link.right())),
        ];
        let mut cluster = Cluster::prepare_on(&hosts, options)?;
        for name in [from, to] {
            adapt(cluster.node_mut(name).spec_mut());
        }
        if self.destination == Destination::Memory {
            cluster.put_in_memory(to, self.bytes)?;
        }
        cluster.start_all()?;
        Ok(cluster)
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The image at the source. Every run begins with what the last one left of it, which is
    /// data of the same sort.
    pub(crate) fn image(&self) -> PathBuf {
        self.dir().join("source.img")
    }

    /// The disk in memory of a destination that has one.
    ///
    /// # Errors
    /// Without root, loop devices, or the memory.
    pub(crate) fn memory_disk(&self) -> io::Result<Option<MemoryDisk>> {
        match self.destination {
            Destination::SameDisk => Ok(None),
            Destination::Memory => MemoryDisk::new(self.bytes).map(Some),
        }
    }

    /// Nothing is dirty, and the image is not in memory. Whether the disk is at rest, if that was to
    /// be seen.
    ///
    /// # Errors
    /// Those of the file, or when the run was interrupted.
    pub(crate) fn settle(&self) -> io::Result<Option<bool>> {
        rustix::fs::sync();
        let at_rest = self.rest.wait()?;
        fadvise(File::open(self.image())?, 0, None, Advice::DontNeed)?;
        Ok(at_rest)
    }
}
