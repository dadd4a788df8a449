//! Memory that all nodes of a cluster map.

use std::io;
use std::path::Path;

use tempfile::TempDir;

use super::{Cluster, ClusterOptions};

/// A memory pool in this host's memory, which goes with it.
#[derive(Debug)]
pub struct MemoryPool {
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
        Ok(Self { dir })
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
