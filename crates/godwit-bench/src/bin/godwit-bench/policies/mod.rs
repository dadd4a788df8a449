//! Measures cost and benefit of each policy: duration of a move, time for which the source is needed, bytes over the
//! link, and the guest's throughput meanwhile.
//!
//! See bench/README.md for the meaning of each scene and its figures.

mod load;
mod measure;
mod policy;
mod relay;
mod report;
mod scenes;
mod site;
mod sizes;
mod targets;

use std::io;

use clap::{Args, ValueEnum};

use self::report::Report;
use self::scenes::{choice, many, table, thin};
use self::site::Site;
use self::sizes::Sizes;

/// Moves disks under load by every policy, in turns, and verifies each of them.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    sizes: Sizes,
    /// Only these scenes; all when left out
    #[arg(long, value_delimiter = ',')]
    scene: Vec<Scene>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scene {
    /// Every policy under two loads, on a thin disk with a base image
    Table,
    /// Many machines that leave at once
    Many,
    /// A disk of 100 GiB with little in it
    Thin,
    /// The node's own choice beside every policy
    Choice,
}

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let sizes = &arguments.sizes;
    let site = Site::open(sizes.link_mbit(), sizes.room(), sizes.source_in_memory)?;
    let mut report = Report::new(sizes);
    let all = [Scene::Thin, Scene::Table, Scene::Many, Scene::Choice];
    let asked = |scene: &Scene| arguments.scene.is_empty() || arguments.scene.contains(scene);
    let mut targets = Vec::new();
    for scene in all.into_iter().filter(asked) {
        match scene {
            Scene::Table => table::run(&site, sizes, &mut report)?,
            Scene::Many => many::run(&site, sizes, &mut report)?,
            Scene::Thin => thin::run(&site, sizes, &mut report)?,
            Scene::Choice => choice::run(&site, sizes, &mut report)?,
        }
        targets.extend(targets::of(scene, &report, sizes));
    }
    let hold = targets.iter().all(targets::Target::holds);
    report.conclude(targets)?;
    // A quick run only proves that everything works; the figures are no claim.
    match hold || sizes.quick {
        true => Ok(()),
        false => Err(io::Error::other(
            "not all of it is as it should be; see the report",
        )),
    }
}
