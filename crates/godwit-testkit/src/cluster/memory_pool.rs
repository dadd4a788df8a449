//! Memory that all nodes of a cluster map.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::process::run;

use super::{Cluster, ClusterOptions};

/// A memory pool in this host's memory, which goes with it.
#[derive(Debug)]
pub struct MemoryPool {
    /// What it is made of, unless that is the host's ordinary memory. Ends before its folder goes.
    _huge: Option<HugePages>,
    dir: TempDir,
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
        Ok(Self { _huge: None, dir })
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
            })),
            Err(error) => {
                println!("not tried, for want of {pages} huge pages: {error}");
                Ok(None)
            }
        }
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
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
        Ok(std::fs::read_dir(self.path())?.next().is_none())
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
