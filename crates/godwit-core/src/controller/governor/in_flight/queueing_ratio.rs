//! Detects chunks in flight that wait for each other, by comparing a chunk's time with its time among few others.
//! Chunks beyond the number that the path works on at a time do not speed up copies, and the guest's requests queue
//! behind them.

use core::time::Duration;

use crate::controller::governor::tuning::queueing_ratio::{LEAST, LONGER_FACTOR, WEIGHT_PART};

/// Time of a chunk, in seconds.
#[derive(Debug)]
pub(in crate::controller) struct QueueingRatio {
    /// Recent average; `None` before the first chunk.
    usual: Option<f64>,
    /// Least average.
    least: f64,
    /// True if a chunk was acknowledged in this sampling period.
    arrives: bool,
}

impl QueueingRatio {
    /// Starts without measurements.
    pub(in crate::controller) const fn new() -> Self {
        Self {
            usual: None,
            least: f64::INFINITY,
            arrives: false,
        }
    }

    /// Notes a chunk of data acknowledged this long after its lock.
    pub(in crate::controller) fn chunk_done(&mut self, took: Duration) {
        let took = took.max(LEAST).as_secs_f64();
        let usual = self.usual.get_or_insert(took);
        *usual += (took - *usual) * WEIGHT_PART;
        self.arrives = true;
    }

    /// Ends a sampling period with or without few chunks in flight. Returns a chunk's recent time as a multiple of its
    /// time alone: at least 1, or `None` if no chunk of data was measured.
    pub(in crate::controller) fn period_ends(&mut self, few: bool) -> Option<f64> {
        let usual = self.usual.filter(|_| self.arrives)?;
        self.arrives = false;
        if few {
            self.least *= LONGER_FACTOR;
        }
        self.least = self.least.min(usual);
        Some(usual / self.least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the ratio after `periods` in each of which one chunk took `micros`.
    fn after(queueing_ratio: &mut QueueingRatio, periods: u32, micros: u64, few: bool) -> f64 {
        let mut crowd = None;
        for _ in 0..periods {
            queueing_ratio.chunk_done(Duration::from_micros(micros));
            crowd = queueing_ratio.period_ends(few);
        }
        crowd.expect("chunks told of it")
    }

    #[test]
    fn what_a_chunk_takes_is_compared_with_when_it_was_least() {
        let mut queueing_ratio = QueueingRatio::new();
        assert_eq!(queueing_ratio.period_ends(false), None);
        assert!(after(&mut queueing_ratio, 100, 1000, false) < 1.01);
        let crowd = after(&mut queueing_ratio, 1000, 3000, false);
        assert!((2.9..3.1).contains(&crowd), "{crowd}");
        assert_eq!(queueing_ratio.period_ends(false), None, "nothing arrived");
        assert!(after(&mut queueing_ratio, 100, 1000, false) < 1.01);
    }

    #[test]
    fn what_takes_long_with_few_in_flight_is_no_crowd() {
        let mut queueing_ratio = QueueingRatio::new();
        after(&mut queueing_ratio, 100, 1000, true);
        assert!(after(&mut queueing_ratio, 50, 5000, true) > 2.5);
        assert!(after(&mut queueing_ratio, 200, 5000, true) < 1.01);
    }

    #[test]
    fn a_chunk_that_takes_no_time_tells_of_no_crowd_for_ever() {
        let mut queueing_ratio = QueueingRatio::new();
        after(&mut queueing_ratio, 1, 0, true);
        assert!(after(&mut queueing_ratio, 1000, 1000, true) < 1.1);
    }
}
