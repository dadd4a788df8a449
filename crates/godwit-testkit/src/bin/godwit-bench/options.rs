//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

/// Godwit beside its peers, on one machine, in one run
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// A selection that takes less than ten minutes
    Quick(Options),
    /// Everything, for days unless part of it is selected
    Full(Options),
    /// Writes docs/benchmarks.md and its plots from a report
    Document {
        /// The report
        #[arg(long, default_value = "target/bench/report.json")]
        report: PathBuf,
        /// Where benchmarks.md goes, and its plots into benchmarks/ beside it
        #[arg(long, default_value = "docs")]
        out: PathBuf,
    },
}

/// How much is measured.
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
    /// A disk moves that nobody uses
    IdleCopy,
}

/// What is measured.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Scenes to run; all when left out
    #[arg(long = "scene", value_name = "SCENE")]
    pub(crate) scenes: Vec<Scene>,
    /// How often everything is repeated; medians are reported
    #[arg(long)]
    pub(crate) rounds: Option<usize>,
    #[command(flatten)]
    pub(crate) migrate: crate::migrate::Selection,
    /// Where report.json goes
    #[arg(long, default_value = "target/bench")]
    pub(crate) out: PathBuf,
}

impl Options {
    /// Whether the scene was asked for.
    pub(crate) fn wants(&self, scene: Scene) -> bool {
        self.scenes.is_empty() || self.scenes.contains(&scene)
    }
}
