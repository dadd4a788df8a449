//! Memory that all nodes of a cluster map.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_memory::pool::Pool;
use tempfile::TempDir;

use crate::process::run;

use super::{Cluster, ClusterOptions};

/// A memory pool in this host's memory, removed with this handle.
#[derive(Debug)]
pub struct MemoryPool {
    /// The huge pages of the pool; `None` for the host's ordinary memory. Dropped before the folder.
    _huge: Option<HugePages>,
    dir: TempDir,
    /// The pool file in the folder, if the pool is a file.
    file: Option<PathBuf>,
}

impl MemoryPool {
    /// The pool's name at each node.
    pub const NAME: &'static str = "cxl";

    /// Creates an empty pool.
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

    /// Creates a file of `mib` MiB that stands for a DAX device. The file is not yet formatted as a pool, unlike that
    /// of [`Self::file`].
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

    /// Creates an empty pool in a file of `mib` MiB, of which the table takes two.
    pub fn file(mib: u64) -> io::Result<Self> {
        let pool = Self::blank_file(mib)?;
        Pool::format(pool.path(), false).map_err(io::Error::other)?;
        Ok(pool)
    }

    /// Creates an empty pool of the kind named by the environment. `GODWIT_MEMORY_POOL=file` stands for a file with
    /// room for one guest of 192 MiB; otherwise the pool is a folder.
    pub fn asked_for() -> io::Result<Self> {
        match std::env::var_os("GODWIT_MEMORY_POOL") {
            Some(kind) if kind == "file" => Self::file(2 + 192),
            _ => Self::new(),
        }
    }

    /// Creates an empty pool of `pages` huge pages of 2 MiB, which the host reserves. Prints a note and returns `None`
    /// if the host cannot.
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

    /// Returns the pool's folder or file.
    pub fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or(self.dir.path())
    }

    /// Gives the pool to all nodes of a prepared cluster.
    pub fn give_to(&self, cluster: &mut Cluster) {
        for node in &mut cluster.nodes {
            node.spec_mut().add_memory_pool(Self::NAME, self.path());
        }
    }

    /// Starts nodes that all have the pool.
    pub fn cluster(&self, names: &[&str], options: ClusterOptions) -> io::Result<Cluster> {
        let mut cluster = Cluster::prepare(names, options)?;
        self.give_to(&mut cluster);
        cluster.start_all()?;
        Ok(cluster)
    }

    /// Returns true if no machine has memory in the pool.
    pub fn is_empty(&self) -> io::Result<bool> {
        if self.file.is_none() {
            return Ok(std::fs::read_dir(self.path())?.next().is_none());
        }
        // The remains of an allocation are in no segment.
        let pool = Pool::open(self.path()).map_err(io::Error::other)?;
        let room = pool.room().map_err(io::Error::other)?;
        Ok(room.free == room.total)
    }
}

/// Number of the host's huge pages of 2 MiB; a write reserves pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Reserved huge pages, and a file system of them.
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
