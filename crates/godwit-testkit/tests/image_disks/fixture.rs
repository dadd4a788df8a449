//! Nodes with a repository of images in a directory, and disks on an image.

use std::fs;
use std::path::PathBuf;

use godwit_testkit::client::{Initial, Model};
use godwit_testkit::cluster::{ClusterOptions, Failure};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario};
use godwit_testkit::{Cluster, Node};
use serde_json::Value;

pub(crate) const DISK: &str = "d";
pub(crate) const SIZE: u64 = 64 << 20;
pub(crate) const MIB: u64 = 1 << 20;

/// Waits for a test's turn: two run at once, since they mostly wait.
pub(crate) fn turn(test: &str) -> Scenario {
    Scenario::among(2, "image_disks", test)
}

/// Nodes with a common repository in a directory.
pub(crate) struct Fixture {
    pub(crate) cluster: Cluster,
    pub(crate) repository: PathBuf,
}

impl Fixture {
    pub(crate) fn start(names: &[&str], options: &[&str]) -> Self {
        Self::start_in(names, options, None)
    }

    /// Does the same with node a's files in `folder`.
    pub(crate) fn start_in(names: &[&str], options: &[&str], folder: Option<PathBuf>) -> Self {
        let secure = ClusterOptions::secure().unwrap();
        let mut fixture = Self::prepare(names, options, secure);
        if let Some(folder) = folder {
            fixture.cluster.node_mut("a").spec_mut().dir = folder;
        }
        fixture.cluster.start_all().unwrap();
        fixture
    }

    /// Prepares the same, and starts nothing.
    pub(crate) fn prepare(names: &[&str], options: &[&str], cluster: ClusterOptions) -> Self {
        let mut cluster = Cluster::prepare(names, cluster).unwrap();
        let repository = cluster.dir().join("repository");
        fs::create_dir(&repository).unwrap();
        for name in names {
            let words = &mut cluster.node_mut(name).spec_mut().options;
            words.extend(["--repository".to_owned(), repository.display().to_string()]);
            words.extend(options.iter().map(|word| (*word).to_owned()));
        }
        Self {
            cluster,
            repository,
        }
    }

    pub(crate) fn a(&self) -> &Node {
        self.cluster.node("a")
    }

    /// Runs `godwit image …` with the repository.
    pub(crate) fn image(&self, words: &[&str]) -> Result<String, Failure> {
        let repository = self.repository.display().to_string();
        let words = [&["image", "--repository", &repository], words].concat();
        self.a().godwit(&words).text()
    }

    /// Removes unused chunks from the repository.
    pub(crate) fn gc(&self) -> Result<String, Failure> {
        self.image(&["gc", "--cache-time", "0s"])
    }

    /// Pushes an image with the pattern of this seed in every sector.
    pub(crate) fn push_pattern(&self, seed: u64) -> Model {
        let model = Model::new(seed, SIZE, Initial::Pattern);
        let path = self.cluster.dir().join("pattern");
        model.write_image(&path).unwrap();
        self.image(&["push", "base", path.to_str().unwrap()])
            .unwrap();
        model
    }

    /// Returns the files of the repository's chunks.
    pub(crate) fn chunks(&self) -> Vec<PathBuf> {
        fs::read_dir(self.repository.join("chunks"))
            .unwrap()
            .flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap())
            .map(|entry| entry.unwrap().path())
            .collect()
    }

    pub(crate) fn create(&self, words: &[&str]) -> Value {
        self.create_at("a", DISK, words)
    }

    /// Creates a disk of this name on the image, at a node.
    pub(crate) fn create_at(&self, node: &str, disk: &str, words: &[&str]) -> Value {
        let words = [&["disk", "create", disk, "--image", "base"], words].concat();
        self.cluster.node(node).godwit(&words).json().unwrap()
    }

    /// Takes the repository away, or brings it back.
    pub(crate) fn is_there(&self, there: bool) {
        let away = self.repository.with_extension("away");
        let (from, to) = match there {
            true => (&away, &self.repository),
            false => (&self.repository, &away),
        };
        fs::rename(from, to).unwrap();
    }

    pub(crate) fn disk(&self) -> Value {
        self.a().disk(DISK).unwrap()
    }

    pub(crate) fn missing(&self) -> u64 {
        self.disk()["missing_bytes"].as_u64().unwrap_or(0)
    }

    pub(crate) fn becomes_whole(&self) {
        self.becomes_whole_at("a", DISK);
    }

    /// Waits until a disk at a node has fetched the whole image.
    pub(crate) fn becomes_whole_at(&self, node: &str, disk: &str) {
        let shown = || self.cluster.node(node).disk(disk);
        let whole = || (shown().ok()?["image"]["fetching"] == false).then_some(());
        assert!(wait_for(PATIENCE, whole).is_some(), "{:?}", shown());
    }

    /// Returns the bytes of images fetched by node a: from other nodes, and from the repository.
    pub(crate) fn fetched(&self) -> (u64, u64) {
        self.fetched_at("a")
    }

    /// Returns the same of any node.
    pub(crate) fn fetched_at(&self, node: &str) -> (u64, u64) {
        let metrics = self.cluster.node(node).metrics().unwrap();
        let from = |place: &str| {
            let sample = format!("godwit_image_fetched_bytes_total{{from=\"{place}\"}} ");
            let line = metrics.lines().find_map(|line| line.strip_prefix(&sample));
            line.unwrap_or_else(|| panic!("no {sample} in {metrics}"))
                .parse()
                .unwrap()
        };
        (from("peers"), from("repository"))
    }

    pub(crate) fn connect(&self) -> NbdConnection {
        NbdConnection::connect(&self.a().nbd(DISK)).unwrap()
    }
}
