//! Two Godwit nodes, with mutual TLS between them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use godwit_bench::watched::Watched;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::NodeSpec;
use godwit_testkit::nbd::NbdTarget;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{migration, start_migration};

use crate::scenes::migrate::movers::{Mover, Moving};
use crate::site::Site;

const PATIENCE: Duration = Duration::from_secs(60);
const DISK: &str = "disk";

/// `godwit migrate` with these options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Godwit {
    /// Name in the report.
    pub(crate) name: &'static str,
    /// Options of the command.
    pub(crate) options: &'static [&'static str],
    /// True if the nodes send data unencrypted, like QEMU by default.
    pub(crate) unencrypted_data: bool,
    /// True if a quick run includes this mover.
    pub(crate) in_quick: bool,
}

impl Mover for Godwit {
    fn name(&self) -> &str {
        self.name
    }

    fn in_quick(&self) -> bool {
        self.in_quick
    }

    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>> {
        self.open_with(site, |_| {})
    }
}

impl Godwit {
    fn open_with(&self, site: &Site, adapt: impl Fn(&mut NodeSpec)) -> io::Result<Box<dyn Moving>> {
        let cluster = site.nodes(["a", "b"], |spec| {
            spec.unencrypted_data = self.unencrypted_data;
            adapt(spec);
        })?;
        let image = site.image();
        let path = image.to_string_lossy();
        cluster
            .node("a")
            .godwit(&["disk", "create", DISK, "--path", &path])
            .json()?;
        Ok(Box::new(Nodes {
            cluster,
            options: self.options,
            watched: None,
            id: String::new(),
        }))
    }
}

/// A modified Godwit.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    /// Name in the report.
    pub(crate) name: String,
    /// Options of the move.
    pub(crate) godwit: Godwit,
    /// The program, if from another build.
    pub(crate) program: Option<PathBuf>,
    /// Additional options of the nodes.
    pub(crate) node_options: Vec<String>,
}

impl Mover for Variant {
    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>> {
        self.godwit.open_with(site, |spec| {
            spec.options.clone_from(&self.node_options);
            if let Some(program) = &self.program {
                spec.godwit.clone_from(program);
            }
        })
    }
}

/// A disk between two nodes.
#[derive(Debug)]
struct Nodes {
    cluster: Cluster,
    options: &'static [&'static str],
    /// Id of the migration, once begun.
    id: String,
    watched: Option<Watched>,
}

impl Moving for Nodes {
    fn guest(&self) -> NbdTarget {
        self.cluster.node("a").nbd(DISK)
    }

    fn cpu_seconds(&self) -> io::Result<f64> {
        Ok(self
            .cluster
            .nodes()
            .iter()
            .map(|node| node.cpu_seconds())
            .sum())
    }

    fn begin(&mut self) -> io::Result<()> {
        let node = self.cluster.node("a");
        self.id = start_migration(node, DISK, "b", self.options)?;
        self.watched = Some(Watched::start(node, &self.id)?);
        Ok(())
    }

    fn advance(&mut self, time: Duration) -> io::Result<bool> {
        let watched = self.watched.as_mut();
        watched
            .ok_or_else(|| io::Error::other("the move has not begun"))?
            .completed_within(time)
    }

    fn cancel(&mut self) -> io::Result<()> {
        let node = self.cluster.node("a");
        node.godwit(&["migration", "cancel", &self.id]).text()?;
        wait_for(PATIENCE, || {
            (migration(node, &self.id)["phase"] == "aborted").then_some(())
        })
        .ok_or_else(|| io::Error::other("the migration cannot be cancelled"))
    }

    fn images(&self) -> io::Result<[PathBuf; 2]> {
        Ok([
            self.cluster.node("a").image(DISK)?,
            self.cluster.node("b").image(DISK)?,
        ])
    }

    fn close(&mut self) -> io::Result<()> {
        for name in ["a", "b"] {
            self.cluster.node_mut(name).terminate(PATIENCE)?;
        }
        Ok(())
    }
}
