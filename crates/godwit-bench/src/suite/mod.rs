//! The scenes of `quick` and `full`: disks and machines that move or do not, beside Godwit's peers, in one report.

pub(crate) mod disk_limit;
pub(crate) mod document;
pub(crate) mod idle_copy;
pub(crate) mod idle_disk;
pub(crate) mod limits;
pub(crate) mod noise;
pub(crate) mod rest;
pub(crate) mod site;
pub(crate) mod steady;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use godwit_testkit::report::Report;
use serde_json::json;

use self::noise::{Noise, Times};
use self::rest::settle_seconds;
use crate::{migrate, vm};

/// Programs that take part beside `godwit`.
const PROGRAMS: [&str; 6] = [
    "qemu-system-x86_64",
    "qemu-storage-daemon",
    "qemu-nbd",
    "fio",
    "nbdkit",
    "nbdcopy",
];

/// The extent of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// A selection.
    Quick,
    /// Everything.
    Full,
}

/// A part of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scene {
    /// A disk moves while its guest works
    Migrate,
    /// A disk is served and does not move
    Steady,
    /// A disk that nobody uses moves
    IdleCopy,
    /// A disk is copied beside a guest, without a mover; not part of a quick run unless it is asked for
    DiskLimit,
    /// A virtual machine moves with its disk; not part of a quick run unless it is asked for
    Vm,
}

impl Scene {
    /// Returns the name on the command line, and of the report's table.
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl Extent {
    /// Returns the first for a quick run, and the second for a full one.
    pub(crate) fn of<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Full => "full",
        }
    }
}

/// The options of a run.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Scenes to run; all when left out, in a quick run all but disk-limit and vm
    #[arg(long = "scene", value_name = "SCENE")]
    scenes: Vec<Scene>,
    /// Repetitions of everything; medians are reported
    #[arg(long)]
    pub(crate) rounds: Option<usize>,
    /// Longest wait before a move for a disk at rest: 0, or 9 and more; 0 in a quick run, 60 in a full one when left
    /// out
    #[arg(long, value_name = "SECONDS", value_parser = settle_seconds)]
    settle: Option<u64>,
    #[command(flatten)]
    pub(crate) migrate: migrate::Selection,
    /// Directory of report.json
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

impl Options {
    /// Returns the longest wait of a move for a disk at rest.
    pub(crate) fn settle(&self, extent: Extent) -> Duration {
        Duration::from_secs(self.settle.unwrap_or(extent.of(0, 60)))
    }

    /// Returns true if the scene is part of the run: if selected, or without a selection all scenes, except for the
    /// longest ones in a quick run.
    fn wants(&self, scene: Scene, extent: Extent) -> bool {
        if self.scenes.is_empty() {
            extent == Extent::Full || !matches!(scene, Scene::DiskLimit | Scene::Vm)
        } else {
            self.scenes.contains(&scene)
        }
    }
}

/// Runs the scenes and judges the run. A refused run is reported with its reason.
pub(crate) fn bench(extent: Extent, options: &Options) -> io::Result<()> {
    let mut report = Report::at(&options.out.join("report.json"), &PROGRAMS)?;
    report.fact("extent", extent.name());
    report.fact("settle_seconds", options.settle(extent).as_secs());
    let beginning = Times::now()?;
    let outcome = scenes(options, extent, &mut report);
    report.save()?;
    let noise = Noise::since(beginning, &report)?;
    report.fact("noise", json!(noise));
    if let Err(why) = outcome.and_then(|()| noise.judge()) {
        return report.refuse(&why);
    }
    report.targets = migrate::targets::of(&report.runs("migrate"));
    report
        .targets
        .extend(steady::targets(&report.runs("steady")));
    report.targets.extend(vm::targets(&report.runs("vm")));
    report
        .targets
        .extend(idle_copy::target(&report.runs("idle-copy")));
    let held = report.targets.iter().filter(|target| target.holds).count();
    report
        .notes
        .push(format!("{held} of {} targets hold", report.targets.len()));
    report.conclude()
}

fn scenes(options: &Options, extent: Extent, report: &mut Report) -> io::Result<()> {
    let all = Scene::value_variants().iter();
    let (wanted, left_out): (Vec<Scene>, Vec<Scene>) =
        all.partition(|scene| options.wants(**scene, extent));
    let names: Vec<String> = left_out.into_iter().map(Scene::name).collect();
    println!("not part of this run: {}", names.join(", "));
    report.fact("left_out", names);
    for scene in wanted {
        match scene {
            Scene::Migrate => migrate::run(options, extent, report)?,
            Scene::Steady => steady::run(options, extent, report)?,
            Scene::IdleCopy => idle_copy::run(options, extent, report)?,
            Scene::DiskLimit => disk_limit::run(options, extent, report)?,
            Scene::Vm => vm::run(options, extent, report)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn a_machine_moves_in_full_and_when_asked_for() {
        let options = |words: &[&str]| Line::parse_from(["suite"].iter().chain(words)).options;
        let all = options(&[]);
        assert!(all.wants(Scene::Vm, Extent::Full) && !all.wants(Scene::Vm, Extent::Quick));
        assert!(all.wants(Scene::Steady, Extent::Quick));
        assert!(!all.wants(Scene::DiskLimit, Extent::Quick));
        let one = options(&["--scene", "vm"]);
        assert!(one.wants(Scene::Vm, Extent::Quick) && !one.wants(Scene::Steady, Extent::Full));
        assert_eq!(Scene::IdleCopy.name(), "idle-copy");
    }
}
