//! Two nodes in separate networks, the link between them, and a repository with a base image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use godwit_testkit::cluster::{Cluster, ClusterOptions, Node};
use godwit_testkit::network::Link;

use super::load::content::{BLOCK, Content, Model, boxed};
use crate::common::awaited;

/// Longest time for any step that is not measured.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

const IMAGE: &str = "base";

/// The nodes and everything that they share.
pub(super) struct Site {
    cluster: Cluster,
    pub(super) link: Arc<Link>,
    repository: PathBuf,
    content: Content,
    made: AtomicU32,
}

/// A disk made for one measurement, and its expected content.
pub(super) struct Made {
    pub(super) name: String,
    pub(super) model: Model,
}

impl Site {
    /// Starts both nodes, with b's disks in memory of size `room`, and a's on request: on the machine's single physical
    /// disk, two nodes would slow each other.
    pub(super) fn open(link_mbit: u64, room: u64, source_in_memory: bool) -> io::Result<Self> {
        let link = Arc::new(Link::both_ways(link_mbit * 1_000_000)?);
        let hosts = [("a", Some(link.left())), ("b", Some(link.right()))];
        let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::release()?)?;
        let repository = cluster.dir().join("repository");
        std::fs::create_dir(&repository)?;
        for name in ["a", "b"] {
            let spec = cluster.node_mut(name).spec_mut();
            let words = ["--repository".to_owned(), repository.display().to_string()];
            spec.options.extend(words);
        }
        if source_in_memory {
            cluster.put_in_memory("a", room)?;
        }
        cluster.put_in_memory("b", room)?;
        cluster.start_all()?;
        Ok(Self {
            cluster,
            link,
            repository,
            content: Content::new(1),
            made: AtomicU32::new(1),
        })
    }

    pub(super) fn a(&self) -> &Node {
        self.cluster.node("a")
    }

    pub(super) fn b(&self) -> &Node {
        self.cluster.node("b")
    }

    /// Returns a path for a file of a measurement.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.cluster.dir().join(name)
    }

    /// Pushes a base image of `bytes` bytes to the repository, of which the first `full` are not zero.
    pub(super) fn push_image(&self, bytes: u64, full: u64) -> io::Result<()> {
        let path = self.path("image");
        let file = File::create(&path)?;
        file.set_len(bytes)?;
        let model = Model::new(self.content.clone(), 0, bytes, full);
        let mut block = boxed();
        for number in 0..(full / BLOCK as u64) as usize {
            model.expected(number, &mut block);
            file.write_all_at(&block[..], (number * BLOCK) as u64)?;
        }
        drop(file);
        let repository = self.repository.display().to_string();
        let words = [
            "image",
            "--repository",
            &repository,
            "push",
            "--replace",
            IMAGE,
        ];
        self.a()
            .godwit(&[&words[..], &[&path.to_string_lossy()]].concat())
            .text()?;
        std::fs::remove_file(path)
    }

    /// Creates a disk at the node. With `full` bytes the disk comes from the base image, which is fetched completely.
    pub(super) fn make(&self, node: &Node, bytes: u64, full: u64) -> io::Result<Made> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let name = format!("d{number}");
        let size = bytes.to_string();
        let mut words = vec!["disk", "create", &name, "--size", &size];
        if full > 0 {
            words.extend(["--image", IMAGE]);
        }
        node.godwit(&words).json()?;
        let whole = || {
            let shown = node.disk(&name).ok()?;
            (shown["image"]["fetching"] != true).then_some(())
        };
        awaited(&format!("the fetching of disk {name}"), PATIENCE, whole)?;
        Ok(Made {
            model: Model::new(self.content.clone(), number, bytes, full),
            name,
        })
    }

    /// Removes a disk from both nodes.
    pub(super) fn remove(&self, disk: &str) -> io::Result<()> {
        for node in [self.b(), self.a()] {
            if node.disk(disk).is_ok() {
                node.godwit(&["disk", "rm", disk, "--force"]).text()?;
            }
        }
        Ok(())
    }
}

/// Returns the allocated bytes of a file.
pub(super) fn allocated(path: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(path.metadata()?.blocks() * 512)
}
