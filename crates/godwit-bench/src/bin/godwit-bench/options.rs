//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::rest::settle_seconds;

/// Godwit beside its peers, on one machine, in one run
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// A selection that takes about ten minutes
    Quick(Options),
    /// Everything, for days unless part of it is selected
    Full(Options),
    /// Writes docs/benchmarks.md and its plots from the reports of a machine
    Document {
        /// A report; more of them when the machine was measured in parts
        #[arg(long = "report", default_value = "target/bench/report.json")]
        reports: Vec<PathBuf>,
        /// Directory of benchmarks.md; its plots go into benchmarks/ beside it
        #[arg(long, default_value = "docs")]
        out: PathBuf,
    },
    Sla(crate::sla::Arguments),
    Policies(crate::policies::Arguments),
    Vhost(crate::vhost::Arguments),
    Memory(crate::memory::Arguments),
    Net(crate::net::options::Options),
    Rdma(crate::rdma::Arguments),
    /// An idle disk that moves, beside nbdcopy between two nbdkit servers
    Idle,
}

/// The extent of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The options of a run.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Scenes to run; all when left out, in a quick run all but disk-limit and vm
    #[arg(long = "scene", value_name = "SCENE")]
    pub(crate) scenes: Vec<Scene>,
    /// Repetitions of everything; medians are reported
    #[arg(long)]
    pub(crate) rounds: Option<usize>,
    /// Longest wait before a move for a disk at rest: 0, or 9 and more; 0 in a quick run, 60 in a full one when left
    /// out
    #[arg(long, value_name = "SECONDS", value_parser = settle_seconds)]
    pub(crate) settle: Option<u64>,
    #[command(flatten)]
    pub(crate) migrate: crate::scenes::migrate::Selection,
    /// Directory of report.json
    #[arg(long, default_value = "target/bench")]
    pub(crate) out: PathBuf,
}

impl Options {
    /// Returns the longest wait of a move for a disk at rest.
    pub(crate) fn settle(&self, extent: Extent) -> Duration {
        Duration::from_secs(self.settle.unwrap_or(match extent {
            Extent::Quick => 0,
            Extent::Full => 60,
        }))
    }

    /// Returns true if the scene is part of the run: if selected, or without a selection all scenes, except for the
    /// longest ones in a quick run.
    pub(crate) fn wants(&self, scene: Scene, extent: Extent) -> bool {
        if self.scenes.is_empty() {
            extent == Extent::Full || !matches!(scene, Scene::DiskLimit | Scene::Vm)
        } else {
            self.scenes.contains(&scene)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arguments: &[&str]) -> Options {
        let words = ["godwit-bench", "quick"].iter().chain(arguments);
        match Arguments::parse_from(words).command {
            Command::Quick(options) => options,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_machine_moves_in_full_and_when_asked_for() {
        let all = options(&[]);
        assert!(all.wants(Scene::Vm, Extent::Full) && !all.wants(Scene::Vm, Extent::Quick));
        assert!(all.wants(Scene::Steady, Extent::Quick));
        assert!(!all.wants(Scene::DiskLimit, Extent::Quick));
        let one = options(&["--scene", "vm"]);
        assert!(one.wants(Scene::Vm, Extent::Quick) && !one.wants(Scene::Steady, Extent::Full));
        assert_eq!(Scene::IdleCopy.name(), "idle-copy");
    }
}
