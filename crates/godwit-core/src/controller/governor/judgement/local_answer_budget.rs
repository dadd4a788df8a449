//! How many requests of the guest may be answered without the destination although nothing pauses:
//! such moments are few, and a link that fails is not worth waiting for.

use crate::controller::governor::tuning::local_answer_budget::{MOST_PART, MOST_REQUESTS};

/// Requests that were answered without the destination.
#[derive(Debug, Default)]
pub(in crate::controller) struct LocalAnswerBudget {
    /// In this period.
    now: u32,
    /// Lately, decaying.
    recent: f64,
}

impl LocalAnswerBudget {
    /// One more of `requests` lately: whether that is still few.
    pub(in crate::controller) fn allow(&mut self, requests: f64) -> bool {
        self.now += 1;
        self.recent += 1.0;
        self.now <= MOST_REQUESTS && self.recent <= f64::from(MOST_REQUESTS) + requests * MOST_PART
    }

    /// A sampling period is over, of which this part is remembered.
    pub(in crate::controller) fn period_ends(&mut self, memory: f64) {
        self.recent *= memory;
        self.now = 0;
    }
}
