//! Measures cost and benefit of each policy: duration of a move, time for which the source is needed, bytes over the
//! link, and the guest's throughput meanwhile.
//!
//! See bench/README.md for the meaning of each scene and its figures.

mod load;
mod measure;
mod policy;
mod relay;
mod scenes;
mod site;
mod sizes;
mod targets;
mod thin;

use std::io;

use clap::{Args, ValueEnum};
use godwit_testkit::report::Report;
use serde_json::json;

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

const FIGURES: &str = "seconds s, handed_over_seconds s, source_needed_seconds s, wire_bytes B, write B/s, read B/s, \
    lost_seconds s, cost s";

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let sizes = &arguments.sizes;
    let mut report = Report::new("bench-policies", &[])?;
    report.fact("sizes", json!(sizes));
    report.table("moves", "scene, load, machines, policy", FIGURES, "");
    let thin = "seconds s, wire_bytes B, allocated_at_source B, allocated_at_destination B";
    report.table("thin", "disk", thin, "");
    let site = Site::open(sizes.link_mbit(), sizes.room(), sizes.source_in_memory)?;
    let asked = |scene: &Scene| arguments.scene.is_empty() || arguments.scene.contains(scene);
    for scene in [Scene::Thin, Scene::Table, Scene::Many, Scene::Choice]
        .into_iter()
        .filter(asked)
    {
        match scene {
            Scene::Table => scenes::table(&site, sizes, &mut report)?,
            Scene::Many => scenes::many(&site, sizes, &mut report)?,
            Scene::Thin => thin::run(&site, sizes, &mut report)?,
            Scene::Choice => scenes::choice(&site, sizes, &mut report)?,
        }
        let targets = targets::of(scene, &report, sizes);
        report.targets.extend(targets);
    }
    // A quick run only proves that everything works; the figures are no claim.
    let hold = report.targets.iter().all(|target| target.holds);
    report.check(hold || sizes.quick, "not every target holds");
    report.conclude()
}
