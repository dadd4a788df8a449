//! Nodes with a repository of images in a directory, and disks on an image.

use std::fs;
use std::path::{Path, PathBuf};

use godwit_testkit::client::{Initial, Model};
use godwit_testkit::cluster::{ClusterOptions, Failure};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, until};
use godwit_testkit::{Cluster, Node};
use serde_json::Value;

pub(crate) const DISK: &str = "d";
pub(crate) const SIZE: u64 = 64 << 20;
pub(crate) const MIB: u64 = 1 << 20;

/// Sectors of a write: a server takes at most 32 MiB at once.
const PIECE: u64 = 2048;

/// Nodes with a common repository in a directory.
pub(crate) struct Fixture {
    pub(crate) cluster: Cluster,
    pub(crate) repository: PathBuf,
    /// Dropped last: the next test begins after this cluster has ended.
    pub(crate) turn: Scenario,
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
        let turn = Scenario::shared();
        let mut cluster = Cluster::prepare(names, cluster).unwrap();
        let repository = cluster.dir().join("repository");
        fs::create_dir(&repository).unwrap();
        for name in names {
            let words = &mut cluster.node_mut(name).spec_mut().options;
            words.extend(["--repository".to_owned(), repository.display().to_string()]);
            words.extend(options.iter().map(|word| (*word).to_owned()));
        }
        Self {
            turn,
            cluster,
            repository,
        }
    }

    pub(crate) fn a(&self) -> &Node {
        self.cluster.node("a")
    }

    pub(crate) fn b(&self) -> &Node {
        self.cluster.node("b")
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

    /// Pushes an image with the pattern of the test's seed in every sector.
    pub(crate) fn push_pattern(&self) -> Model {
        let model = Model::new(self.turn.seed, SIZE, Initial::Pattern);
        let path = self.cluster.dir().join("pattern");
        model.write_image(&path).unwrap();
        self.push(&path, &[]);
        model
    }

    /// Pushes a file as the image.
    pub(crate) fn push(&self, path: &Path, options: &[&str]) {
        let words = [&["push", "base", path.to_str().unwrap()], options].concat();
        self.image(&words).unwrap();
    }

    /// Pushes another pattern in place of the image.
    pub(crate) fn push_another(&self) -> Model {
        let model = Model::new(self.turn.seed + 1, SIZE, Initial::Pattern);
        let path = self.cluster.dir().join("new");
        model.write_image(&path).unwrap();
        self.push(&path, &["--replace"]);
        model
    }

    /// Waits until the image can be removed, and removes it.
    pub(crate) fn is_needed_no_more(&self) {
        until("no disk needs the image", || {
            self.image(&["rm", "base"]).is_ok()
        });
    }

    /// Waits until the disk is in trouble; returns what the node says.
    pub(crate) fn trouble(&self) -> String {
        let told = || Some(self.disk()["image"]["trouble"].as_str()?.to_owned());
        wait_for(PATIENCE, told).expect("the disk is in trouble")
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
        self.cluster.node(node).json(&words)
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

    /// Kills node a, and starts it.
    pub(crate) fn a_dies(&mut self) {
        self.cluster.die_and_start("a");
    }

    pub(crate) fn connect(&self) -> NbdConnection {
        self.a().connect(DISK)
    }
}

/// Writes zeroes to sectors of a disk, and notes so in the model. Returns the number of bytes.
pub(crate) fn write(
    client: &mut NbdConnection,
    model: &mut Model,
    start: u64,
    sectors: u64,
) -> u64 {
    for from in (start..start + sectors).step_by(PIECE as usize) {
        let piece = from..(from + PIECE).min(start + sectors);
        let zeroes = vec![0; (piece.end - piece.start) as usize * 512];
        let ticket = model.begin_write(piece, true);
        client.write_at(from * 512, &zeroes).unwrap();
        model.end_write(&ticket);
    }
    sectors * 512
}
