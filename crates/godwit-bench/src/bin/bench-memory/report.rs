//! What the benchmark leaves behind: `target/bench-memory/report.json` and its figures.

use std::io;
use std::path::PathBuf;

use godwit_testkit::process::target_dir;
use godwit_testkit::report::write_report;
use serde::Serialize;

use crate::figures;
use crate::run::Run;
use crate::summary::Summary;
use crate::targets::{self, Target};

const NAME: &str = "bench-memory";

/// All runs and what they say.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// With another guest and fewer turns than the figures in documents have.
    quick: bool,
    guest_mib: u64,
    rounds: usize,
    /// MiB of pages that the writer is to write each second; the first is the one that is judged.
    dirty_mib: Vec<u64>,
    /// Whether every guest found all that it ever wrote.
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

    /// The rate of writing that is judged.
    fn judged_mib(&self) -> u64 {
        self.dirty_mib.first().copied().unwrap_or(0)
    }

    /// Draws the figures beside the report.
    pub(crate) fn draw(&mut self) -> io::Result<()> {
        self.figures = figures::draw(&self.runs, self.judged_mib(), &target_dir().join(NAME))?;
        Ok(())
    }

    /// Holds it against what it must show, and says so on the screen.
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

    /// Whether no guest lost anything.
    pub(crate) fn is_good(&self) -> bool {
        self.verified
    }
}
