//! Two Godwit nodes, with mutual TLS between them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::nbd::NbdTarget;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{migration, start_migration};
use serde_json::Value;

use super::mover::{Mover, Moving};
use super::site::Site;
use crate::interrupt;

const PATIENCE: Duration = Duration::from_secs(60);
const DISK: &str = "disk";

/// `godwit migrate` with these options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Godwit {
    /// How the report calls it.
    pub(crate) name: &'static str,
    /// What the command is given.
    pub(crate) options: &'static [&'static str],
}

impl Mover for Godwit {
    fn name(&self) -> &str {
        self.name
    }

    fn open(&self, site: &Site) -> io::Result<Box<dyn Moving>> {
        let options = ClusterOptions {
            godwit: release_binary()?,
            tls: true,
        };
        let (left, right) = (site.link.left(), site.link.right());
        let mut cluster = Cluster::prepare_on(&[("a", Some(left)), ("b", Some(right))], options)?;
        cluster.start_all()?;
        let image = site.image();
        let path = image.to_string_lossy();
        cluster
            .node("a")
            .godwit(&["disk", "create", DISK, "--path", &path])
            .json()?;
        Ok(Box::new(Nodes {
            cluster,
            options: self.options,
            id: String::new(),
        }))
    }
}

/// A disk between two nodes.
#[derive(Debug)]
struct Nodes {
    cluster: Cluster,
    options: &'static [&'static str],
    /// The migration's, once it began.
    id: String,
}

impl Nodes {
    fn shown(&self) -> Value {
        migration(self.cluster.node("a"), &self.id)
    }
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
        self.id = start_migration(self.cluster.node("a"), DISK, "b", self.options)?;
        Ok(())
    }

    fn advance(&mut self, time: Duration) -> io::Result<bool> {
        interrupt::sleep(time)?;
        let shown = self.shown();
        match shown["phase"].as_str() {
            Some("completed") => Ok(true),
            Some("aborted") | None => {
                Err(io::Error::other(format!("the migration failed: {shown}")))
            }
            Some(_) => Ok(false),
        }
    }

    fn cancel(&mut self) -> io::Result<()> {
        let node = self.cluster.node("a");
        node.godwit(&["migration", "cancel", &self.id]).text()?;
        wait_for(PATIENCE, || {
            (self.shown()["phase"] == "aborted").then_some(())
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
