//! What many runs came to.

use std::time::Duration;

use crate::run::coverage::{Coverage, Reached};
use crate::run::soak::Failure;

/// Fewer runs than this need not reach everything.
const RUNS_FOR_COVERAGE: u64 = 3_000;

/// What many runs came to.
#[derive(Debug)]
pub struct Report {
    /// How many seeds were run.
    pub runs: u64,
    /// How long it took.
    pub elapsed: Duration,
    pub(crate) coverage: Coverage,
    /// The first seed that failed, if one did.
    pub failure: Option<Failure>,
}

impl Report {
    /// What was never reached although there were runs enough.
    pub fn missed(&self) -> Vec<&'static str> {
        if self.runs < RUNS_FOR_COVERAGE || self.failure.is_some() {
            return Vec::new();
        }
        let missed = self.coverage.iter().filter(|(_, times)| *times == 0);
        missed.map(|(state, _)| state.name()).collect()
    }

    /// Everything that is counted, with its count.
    pub fn coverage(&self) -> Vec<(&'static str, u64)> {
        self.coverage
            .iter()
            .map(|(state, times)| (state.name(), times))
            .collect()
    }

    /// How many migrations moved the disk.
    pub fn moves(&self) -> u64 {
        self.coverage.get(Reached::Moved) + self.coverage.get(Reached::MovedBack)
    }
}
