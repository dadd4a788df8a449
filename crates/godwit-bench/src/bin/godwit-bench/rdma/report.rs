//! The output of the benchmark: `target/bench-rdma/report.json` and its figures.

use std::io;
use std::path::PathBuf;

use godwit_testkit::process::target_dir;
use godwit_testkit::report::write_report;
use serde::Serialize;

use crate::rdma::breakdown::{self, Summary};
use crate::rdma::targets::{self, Target};
use crate::rdma::{figures, library, throughput, waiting};

pub(crate) const NAME: &str = "bench-rdma";

/// All runs and their results.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// True for fewer and smaller programs than the documents' figures have.
    quick: bool,
    rounds: u32,
    /// True on emulated processors: figures show the steps and their growth, but not the times on hardware.
    emulated: bool,
    targets: Vec<Target>,
    /// Figure 3.
    pub(crate) breakdown: Vec<breakdown::Run>,
    breakdown_summary: Vec<Summary>,
    /// Figure 4.
    pub(crate) waiting: Vec<waiting::Run>,
    /// Table 4 from `make bench SCENE=verbs`; `None` if that did not run.
    overhead: Option<serde_json::Value>,
    /// Figure 5.
    pub(crate) throughput: Vec<throughput::Run>,
    /// Runs in which nothing moves.
    pub(crate) library: Vec<library::Run>,
    library_summary: Vec<library::Summary>,
    figures: Vec<String>,
}

impl Report {
    pub(crate) fn new(quick: bool, rounds: u32) -> io::Result<Self> {
        let overhead = target_dir().join("bench-verbs/overhead.json");
        let overhead = match std::fs::read_to_string(&overhead) {
            Ok(text) => Some(serde_json::from_str(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                println!("make bench SCENE=verbs did not run: the report will have no table 4");
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            quick,
            rounds,
            emulated: true,
            targets: Vec::new(),
            breakdown: Vec::new(),
            breakdown_summary: Vec::new(),
            waiting: Vec::new(),
            overhead,
            throughput: Vec::new(),
            library: Vec::new(),
            library_summary: Vec::new(),
            figures: Vec::new(),
        })
    }

    /// Draws the figures beside the report.
    pub(crate) fn draw(&mut self) -> io::Result<()> {
        self.breakdown_summary = Summary::all(&self.breakdown);
        self.library_summary = library::Summary::all(&self.library);
        let dir = target_dir().join(NAME);
        self.figures = figures::draw(
            &self.breakdown_summary,
            &self.waiting,
            &self.throughput,
            &dir,
        )?;
        Ok(())
    }

    /// Judges the results and prints the targets.
    pub(crate) fn judge(&mut self) {
        self.targets = targets::of(
            &self.breakdown_summary,
            &self.throughput,
            &self.library_summary,
        );
        for target in &self.targets {
            let word = if target.holds {
                "holds"
            } else {
                "does NOT hold"
            };
            match target.measured {
                Some(measured) => {
                    println!("{}: {measured:.3}, {}: {word}", target.name, target.goal);
                }
                None => println!("{}: not measured", target.name),
            }
        }
    }

    pub(crate) fn save(&self) -> io::Result<PathBuf> {
        write_report(NAME, self)
    }

    /// Returns true if no program failed.
    pub(crate) fn is_good(&self) -> bool {
        let errors = self.breakdown.iter().map(|run| &run.error);
        errors
            .chain(self.waiting.iter().map(|run| &run.error))
            .chain(self.throughput.iter().map(|run| &run.error))
            .chain(self.library.iter().map(|run| &run.error))
            .all(Option::is_none)
    }
}
