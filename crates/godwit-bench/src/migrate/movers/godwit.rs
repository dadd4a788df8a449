//! Two Godwit nodes, with mutual TLS between them.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::nbd::NbdTarget;
use godwit_testkit::scenario::{migration, start_migration};

use super::{Mover, Moving};
use crate::common::awaited;
use crate::common::watched::Watched;
use crate::suite::site::Site;

const PATIENCE: Duration = Duration::from_secs(60);
const DISK: &str = "disk";

/// `godwit migrate` with these options.
#[derive(Clone, Debug)]
pub(crate) struct Godwit {
    pub(crate) name: Cow<'static, str>,
    pub(crate) options: &'static [&'static str],
    /// True if the nodes send data unencrypted, like QEMU by default.
    pub(crate) unencrypted_data: bool,
    pub(crate) in_quick: bool,
    /// The program, if from another build.
    pub(crate) program: Option<PathBuf>,
    pub(crate) node_options: Vec<String>,
}

impl Mover for Godwit {
    fn name(&self) -> &str {
        &self.name
    }

    fn in_quick(&self) -> bool {
        self.in_quick
    }

    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>> {
        let cluster = site.nodes(["a", "b"], |spec| {
            spec.unencrypted_data = self.unencrypted_data;
            spec.options.clone_from(&self.node_options);
            if let Some(program) = &self.program {
                spec.godwit.clone_from(program);
            }
        })?;
        let image = site.image();
        let create = ["disk", "create", DISK, "--path", &image.to_string_lossy()];
        cluster.node("a").godwit(&create).json()?;
        Ok(Box::new(Nodes {
            cluster,
            options: self.options,
            watched: None,
            id: String::new(),
        }))
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
        match &mut self.watched {
            Some(watched) => watched.completed_within(time),
            None => Err(io::Error::other("the move has not begun")),
        }
    }

    fn cancel(&mut self) -> io::Result<()> {
        let node = self.cluster.node("a");
        node.godwit(&["migration", "cancel", &self.id]).text()?;
        awaited("the end of the move", PATIENCE, || {
            (migration(node, &self.id)["phase"] == "aborted").then_some(())
        })
    }

    fn images(&self) -> io::Result<[PathBuf; 2]> {
        Ok([
            self.cluster.node("a").image(DISK)?,
            self.cluster.node("b").image(DISK)?,
        ])
    }

    fn close(&mut self) -> io::Result<()> {
        let mut ends = ["a", "b"].into_iter();
        ends.try_for_each(|name| self.cluster.node_mut(name).terminate(PATIENCE))
    }
}
