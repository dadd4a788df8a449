//! The result of many runs.

use std::time::Duration;

use crate::run::coverage::{Coverage, Reached};
use crate::run::soak::Failure;

/// Number of runs from which every state must be reached.
const RUNS_FOR_COVERAGE: u64 = 3_000;

/// The result of many runs.
#[derive(Debug)]
pub struct Report {
    /// Number of runs.
    pub runs: u64,
    /// Duration of all runs.
    pub elapsed: Duration,
    pub(crate) coverage: Coverage,
    /// The first failed seed, if any.
    pub failure: Option<Failure>,
}

impl Report {
    /// Returns the states that were never reached, once there were enough runs.
    pub fn missed(&self) -> Vec<&'static str> {
        if self.runs < RUNS_FOR_COVERAGE || self.failure.is_some() {
            return Vec::new();
        }
        let missed = self.coverage.iter().filter(|(_, times)| *times == 0);
        missed.map(|(state, _)| state.name()).collect()
    }

    /// Returns every counted state with its count.
    pub fn coverage(&self) -> Vec<(&'static str, u64)> {
        self.coverage
            .iter()
            .map(|(state, times)| (state.name(), times))
            .collect()
    }

    /// Returns the number of migrations that moved the disk.
    pub fn moves(&self) -> u64 {
        self.coverage.get(Reached::Moved) + self.coverage.get(Reached::MovedBack)
    }
}
