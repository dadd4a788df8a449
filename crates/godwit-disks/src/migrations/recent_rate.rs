//! The recent speed of a migration.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use godwit_api::MigrationPhase;

/// Length of the window: long enough for several pauses, which count.
const PERIOD: Duration = Duration::from_secs(10);

/// Shortest span with a meaningful rate.
const SHORTEST: Duration = Duration::from_millis(400);

/// A measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) phase: MigrationPhase,
    /// Bytes finished by the pass.
    pub(super) done: u64,
    /// Bytes still to be finished by the pass, plus delayed writes still to be sent.
    pub(super) left: u64,
}

/// The samples of the last ten seconds of a pass.
#[derive(Debug, Default)]
pub(super) struct RecentRate {
    samples: VecDeque<Sample>,
}

impl RecentRate {
    pub(super) fn add(&mut self, sample: Sample) {
        let same_pass = |last: &Sample| last.phase == sample.phase && last.done <= sample.done;
        if !self.samples.back().is_some_and(same_pass) {
            self.samples.clear();
        }
        self.samples.push_back(sample);
        // A sample older than the period stays: the period must be covered.
        while self
            .samples
            .get(1)
            .is_some_and(|second| sample.at.duration_since(second.at) >= PERIOD)
        {
            self.samples.pop_front();
        }
    }

    /// Returns the first and the last sample, and the seconds in between.
    fn span(&self) -> Option<(&Sample, &Sample, f64)> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        let elapsed = last.at.duration_since(first.at);
        (elapsed >= SHORTEST).then_some((first, last, elapsed.as_secs_f64()))
    }

    /// Returns the bytes per second finished by the pass.
    pub(super) fn rate(&self) -> Option<f64> {
        let (first, last, seconds) = self.span()?;
        Some((last.done - first.done) as f64 / seconds)
    }

    /// Returns the seconds until nothing is left at the current rate, or `None` if the rest does not shrink.
    pub(super) fn seconds_left(&self) -> Option<f64> {
        let (first, last, seconds) = self.span()?;
        let shrunk = first.left.saturating_sub(last.left) as f64 / seconds;
        (shrunk >= 1.0).then(|| last.left as f64 / shrunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a sample a second, each with its bytes done and bytes left.
    fn rate_of(samples: &[(u64, u64)]) -> RecentRate {
        let start = Instant::now();
        let mut recent_rate = RecentRate::default();
        for (second, &(done, left)) in (0..).zip(samples) {
            recent_rate.add(Sample {
                at: start + Duration::from_secs(second),
                phase: MigrationPhase::Copying,
                done,
                left,
            });
        }
        recent_rate
    }

    #[test]
    fn pauses_count() {
        let recent_rate = rate_of(&[(0, 900), (100, 800), (100, 800), (100, 800), (200, 700)]);
        assert_eq!(recent_rate.rate(), Some(50.0));
        assert_eq!(recent_rate.seconds_left(), Some(14.0));
    }

    #[test]
    fn only_the_last_ten_seconds_count() {
        let mut samples = vec![(0, 10_000), (5_000, 5_000)];
        samples.extend((1..=11).map(|n| (5_000 + n * 10, 5_000 - n * 10)));
        let recent_rate = rate_of(&samples);
        assert_eq!(recent_rate.rate(), Some(10.0));
        assert_eq!(recent_rate.seconds_left(), Some(489.0));
    }

    #[test]
    fn delayed_writes_that_grow_as_fast_as_copies_go_leave_no_end_in_sight() {
        let recent_rate = rate_of(&[(0, 1000), (100, 1000), (200, 1001)]);
        assert_eq!(recent_rate.rate(), Some(100.0));
        assert_eq!(recent_rate.seconds_left(), None);
    }

    #[test]
    fn one_sample_is_no_rate_and_a_new_pass_starts_afresh() {
        assert_eq!(rate_of(&[(0, 1000)]).rate(), None);
        let mut recent_rate = rate_of(&[(0, 1000), (500, 500)]);
        let sample = Sample {
            at: Instant::now() + Duration::from_secs(9),
            phase: MigrationPhase::Verifying,
            done: 500,
            left: 500,
        };
        recent_rate.add(sample);
        assert_eq!(recent_rate.rate(), None);
        assert_eq!(recent_rate.seconds_left(), None);
    }
}
