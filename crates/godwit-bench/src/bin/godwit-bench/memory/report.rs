//! The output of the benchmark: `target/bench-memory/report.json` and its figures.

use std::io;
use std::path::PathBuf;

use godwit_testkit::process::target_dir;
use godwit_testkit::report::write_report;
use serde::Serialize;

use crate::memory::figures;
use crate::memory::run::Run;
use crate::memory::summary::Summary;
use crate::memory::targets::{self, Target};

const NAME: &str = "bench-memory";

/// All runs and their results.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// True for a smaller guest and fewer turns than the documents' figures have.
    quick: bool,
    guest_mib: u64,
    rounds: usize,
    /// MiB of pages for the writer to write each second; only the first rate is judged.
    dirty_mib: Vec<u64>,
    /// True if every guest read back all of its writes.
    verified: bool,
    targets: Vec<Target>,
    methods: Vec<Summary>,
    figures: Vec<&'static str>,
    runs: Vec<Run>,
}

impl Report {
    pub(crate) fn new(quick: bool, guest_mib: u64, rounds: usize, dirty_mib: &[u64]) -> Self {
        Self {
            quick,
            guest_mib,
            rounds,
            dirty_mib: dirty_mib.to_vec(),
            verified: false,
            targets: Vec::new(),
            methods: Vec::new(),
            figures: Vec::new(),
            runs: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, run: Run) {
        self.runs.push(run);
        self.verified = self.runs.iter().all(|run| run.verified);
        self.methods = Summary::all(&self.runs);
    }

    /// Returns the judged write rate.
    fn judged_mib(&self) -> u64 {
        self.dirty_mib.first().copied().unwrap_or(0)
    }

    /// Draws the figures beside the report.
    pub(crate) fn draw(&mut self) -> io::Result<()> {
        self.figures = figures::draw(&self.runs, self.judged_mib(), &target_dir().join(NAME))?;
        Ok(())
    }

    /// Judges the runs at the judged rate and prints the targets.
    pub(crate) fn judge(&mut self) {
        let judged_mib = self.judged_mib();
        let judged = self.runs.iter().filter(|run| run.dirty_mib == judged_mib);
        self.targets = targets::of(&judged.collect::<Vec<_>>());
        for target in &self.targets {
            let word = if target.holds {
                "holds"
            } else {
                "does NOT hold"
            };
            match target.measured {
                Some(measured) => {
                    println!("{} {}: {measured:.3}, {word}", target.name, target.goal)
                }
                None => println!("{} {}: not measured", target.name, target.goal),
            }
        }
    }

    pub(crate) fn save(&self) -> io::Result<PathBuf> {
        write_report(NAME, self)
    }

    /// Returns true if no guest lost data.
    pub(crate) fn is_good(&self) -> bool {
        self.verified
    }
}
