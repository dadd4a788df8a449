//! Cost and benefit of a promise to the guest: measures the congestion control of the migration.
//!
//! See bench/README.md for the meaning of each scene and its figures.

mod auto;
mod crowded;
mod scene;
mod stage;
mod steady;

use std::io;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use godwit_testkit::process::target_dir;
use godwit_testkit::report::Report;

use self::scene::SceneOptions;

/// Measures how a migration keeps its promise to the guest.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    scene: Scene,
}

#[derive(Debug, Subcommand)]
enum Scene {
    /// Window only, backpressure, and delayed writes, on a link that other traffic fills meanwhile.
    Compare {
        #[command(flatten)]
        scene: SceneOptions,
        /// Runs of each variant; medians are reported.
        #[arg(long, default_value_t = 1)]
        rounds: usize,
    },
    /// The same scene for several rates of delayed writes.
    Rate {
        #[command(flatten)]
        scene: SceneOptions,
        /// Rates in MB/s.
        #[arg(long, value_delimiter = ',', default_values_t = [5, 10, 20, 40, 80])]
        rates: Vec<u64>,
    },
    /// The promise that the node chooses itself, under 40 MB/s of checked writes.
    Auto {
        /// Number of runs.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Size of the disk in MiB.
        #[arg(long, default_value_t = 2048)]
        image_mib: u64,
        /// The source's images are in memory, too: for a machine whose disk stalls by itself.
        #[arg(long)]
        in_memory: bool,
        /// After each run another one in which the guest's disk stays, and a neighbour's moves as fast: shows the
        /// effect of any transfer beside the guest.
        #[arg(long)]
        control: bool,
    },
    /// This build beside another one, with no migration running.
    Steady {
        /// The `godwit` program to compare with.
        #[arg(long)]
        baseline: PathBuf,
        /// Runs of each load by each build.
        #[arg(long, default_value_t = 10)]
        rounds: usize,
        /// Seconds of every run.
        #[arg(long, default_value_t = 4)]
        seconds: u64,
    },
}

pub(crate) fn bench(arguments: Arguments) -> io::Result<()> {
    match arguments.scene {
        Scene::Compare { scene, rounds } => crowded::compare(&scene, rounds),
        Scene::Rate { scene, rates } => crowded::rate(&scene, &rates),
        Scene::Auto {
            rounds,
            image_mib,
            in_memory,
            control,
        } => auto::run(rounds.max(1), image_mib << 20, in_memory, control),
        Scene::Steady {
            baseline,
            rounds,
            seconds,
        } => steady::run(&baseline, rounds, seconds.max(2)),
    }
}

/// Returns the report of one of the scenes, `target/bench-sla/FILE`.
fn report(file: &str) -> io::Result<Report> {
    Report::at(&target_dir().join("bench-sla").join(file), &["fio"])
}
