//! The number of guest requests answered without the destination although the migration is not paused: such moments are
//! few, and a failing link is not worth waiting for.

use crate::controller::governor::tuning::local_answer_budget::{MOST_PART, MOST_REQUESTS};

/// Requests answered without the destination.
#[derive(Debug, Default)]
pub(in crate::controller) struct LocalAnswerBudget {
    /// Requests in this period.
    now: u32,
    /// Recent requests, decaying.
    recent: f64,
}

impl LocalAnswerBudget {
    /// Counts a request, out of `requests` recent requests. Returns true while the count is still few.
    pub(in crate::controller) fn allow(&mut self, requests: f64) -> bool {
        self.now += 1;
        self.recent += 1.0;
        self.now <= MOST_REQUESTS && self.recent <= f64::from(MOST_REQUESTS) + requests * MOST_PART
    }

    /// Ends a sampling period. The part `memory` of the count is remembered.
    pub(in crate::controller) fn period_ends(&mut self, memory: f64) {
        self.recent *= memory;
        self.now = 0;
    }
}
