//! The result of many runs.

use std::time::Duration;

use crate::run::coverage::{Coverage, Reached};
use crate::world::{Outcome, Violation};

/// Number of runs from which every state must be reached.
const RUNS_FOR_COVERAGE: u64 = 3_000;

/// The result of many runs.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of runs.
    pub runs: u64,
    /// Duration of all runs.
    pub elapsed: Duration,
    coverage: Coverage,
    /// The first failed seed, if any, and what failed.
    pub failure: Option<(u64, Violation)>,
}

impl Report {
    /// Adds the run of a seed.
    pub(crate) fn add(&mut self, seed: u64, outcome: Outcome) {
        self.merge(Self {
            runs: 1,
            elapsed: Duration::ZERO,
            coverage: outcome.coverage,
            failure: outcome.violation.map(|violation| (seed, violation)),
        });
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.runs += other.runs;
        self.coverage.merge(&other.coverage);
        let failures = self.failure.take().into_iter().chain(other.failure);
        self.failure = failures.min_by_key(|(seed, _)| *seed);
    }

    /// Returns the states that were never reached, once there were enough runs.
    pub fn missed(&self) -> Vec<&'static str> {
        if self.runs < RUNS_FOR_COVERAGE || self.failure.is_some() {
            return Vec::new();
        }
        let missed = self.coverage().filter(|(_, times)| *times == 0);
        missed.map(|(state, _)| state).collect()
    }

    /// Returns every counted state with its count.
    pub fn coverage(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let states = Reached::ALL.iter();
        states.map(|&state| (state.name(), self.coverage.get(state)))
    }

    /// Returns the number of migrations that moved the disk.
    pub fn moves(&self) -> u64 {
        self.coverage.get(Reached::Moved) + self.coverage.get(Reached::MovedBack)
    }
}
