//! Memory that all nodes of a cluster map.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_memory::pool::Pool;
use tempfile::TempDir;

use crate::process::run;

use super::{Cluster, ClusterOptions};

/// A memory pool in this host's memory, which goes with it.
#[derive(Debug)]
pub struct MemoryPool {
    /// What it is made of, unless that is the host's ordinary memory. Ends before its folder goes.
    _huge: Option<HugePages>,
    dir: TempDir,
    /// The pool, when that is a file in the folder.
    file: Option<PathBuf>,
}

impl MemoryPool {
    /// The pool's name at each node.
    pub const NAME: &'static str = "cxl";

    /// Makes an empty one.
    ///
    /// # Errors
    /// Without `/dev/shm`.
    pub fn new() -> io::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("godwit-pool")
            .tempdir_in("/dev/shm")?;
        Ok(Self {
            _huge: None,
            dir,
            file: None,
        })
    }

    /// Makes a file of so many MiB that stands for a DAX device. It is no pool yet: [`Self::file`] is.
    ///
    /// # Errors
    /// Without `/dev/shm`, or room there.
    pub fn blank_file(mib: u64) -> io::Result<Self> {
        let pool = Self::new()?;
        let path = pool.dir.path().join("device");
        let file = File::create(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, mib << 20)?;
        Ok(Self {
            file: Some(path),
            ..pool
        })
    }

    /// Makes an empty one of a file of so many MiB, of which its table takes two.
    ///
    /// # Errors
    /// Without `/dev/shm`, or room there.
    pub fn file(mib: u64) -> io::Result<Self> {
        let pool = Self::blank_file(mib)?;
        Pool::format(pool.path(), false).map_err(io::Error::other)?;
        Ok(pool)
    }

    /// Makes an empty one, of the kind that the environment names: with `GODWIT_MEMORY_POOL=file` a file that has room for
    /// one guest of 192 MiB, otherwise a folder.
    ///
    /// # Errors
    /// As [`Self::new`] and [`Self::file`].
    pub fn asked_for() -> io::Result<Self> {
        match std::env::var_os("GODWIT_MEMORY_POOL") {
            Some(kind) if kind == "file" => Self::file(2 + 192),
            _ => Self::new(),
        }
    }

    /// Makes an empty one of so many pages of 2 MiB, which the host reserves for it. Nothing where that cannot be done,
    /// and then says so.
    ///
    /// # Errors
    /// Without a folder for it.
    pub fn huge(pages: u64) -> io::Result<Option<Self>> {
        let dir = tempfile::Builder::new().prefix("godwit-pool").tempdir()?;
        match HugePages::mount(dir.path(), pages) {
            Ok(huge) => Ok(Some(Self {
                _huge: Some(huge),
                dir,
                file: None,
            })),
            Err(error) => {
                println!("not tried, for want of {pages} huge pages: {error}");
                Ok(None)
            }
        }
    }

    /// Its folder, or its file.
    pub fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or(self.dir.path())
    }

    /// Lets all nodes of a cluster that was only prepared have it.
    pub fn give_to(&self, cluster: &mut Cluster) {
        let option = format!("--memory-pool={}={}", Self::NAME, self.path().display());
        for node in &mut cluster.nodes {
            node.spec_mut().options.push(option.clone());
        }
    }

    /// Starts nodes that all have it.
    ///
    /// # Errors
    /// Those of the nodes.
    pub fn cluster(&self, names: &[&str], options: ClusterOptions) -> io::Result<Cluster> {
        let mut cluster = Cluster::prepare(names, options)?;
        self.give_to(&mut cluster);
        cluster.start_all()?;
        Ok(cluster)
    }

    /// Whether no machine has memory in it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn is_empty(&self) -> io::Result<bool> {
        if self.file.is_none() {
            return Ok(std::fs::read_dir(self.path())?.next().is_none());
        }
        // What is left of an allocation is in no segment.
        let pool = Pool::open(self.path()).map_err(io::Error::other)?;
        let room = pool.room().map_err(io::Error::other)?;
        Ok(room.free == room.total)
    }
}

/// How many huge pages of 2 MiB the host has; to write it reserves some.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Huge pages that were reserved, and a file system of them.
#[derive(Debug)]
struct HugePages {
    reserved: u64,
    mounted: Option<PathBuf>,
}

impl HugePages {
    fn mount(at: &Path, pages: u64) -> io::Result<Self> {
        let before = huge_pages()?;
        std::fs::write(HUGE_PAGES, (before + pages).to_string())?;
        let mut made = Self {
            reserved: huge_pages()?.saturating_sub(before),
            mounted: None,
        };
        if made.reserved < pages {
            let why = format!("the host has no more than {}", made.reserved);
            return Err(io::Error::other(why));
        }
        let mut mount = Command::new("mount");
        mount.args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"]);
        run(mount.arg(at))?;
        made.mounted = Some(at.to_owned());
        Ok(made)
    }
}

fn huge_pages() -> io::Result<u64> {
    let text = std::fs::read_to_string(HUGE_PAGES)?;
    text.trim().parse().map_err(io::Error::other)
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(at) = &self.mounted {
            let _ = run(Command::new("umount").arg("--lazy").arg(at));
        }
        if let Ok(now) = huge_pages() {
            let rest = now.saturating_sub(self.reserved);
            let _ = std::fs::write(HUGE_PAGES, rest.to_string());
        }
    }
}
