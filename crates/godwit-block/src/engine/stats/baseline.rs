//! How long clients waited before a migration, and whether that decides how much they ask for.

use std::time::Duration;

use godwit_core::{Arrivals, GuestLoad};
use hdrhistogram::Histogram;

/// Fewer seconds than this do not tell how much they differ: of three, two are alike by chance too
/// often.
const FEWEST_TO_COMPARE: usize = 4;

/// Fewer than this tell nothing.
const FEWEST_SECONDS: usize = 2;

/// A closed loop has this part of the most requests that it had under way at a time under way on
/// average, and more: the rest is with the guest. An open loop has as many only while its disk does
/// not keep up.
const FULL: f64 = 0.6;

/// As many tell a closed loop where they also vary less than the requests in a second.
const HALF_FULL: f64 = 0.4;

/// An open loop makes as many requests in each second, but for this part of them and for chance.
const STEADY: f64 = 0.005;

/// Where requests come by chance, half of the seconds have as many as the mean, give or take this many
/// times its square root.
const CHANCE: f64 = 0.674;

/// Latencies of clients' requests over the last ten seconds in which there were any, none of them
/// longer than a minute ago.
#[derive(Clone, Debug)]
pub struct LatencyBaseline {
    /// In microseconds.
    latencies: Histogram<u32>,
    load: Option<GuestLoad>,
}

/// What clients did in a second that is over.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Second {
    /// Requests that were answered.
    pub(in crate::engine) requests: f64,
    /// Seconds that they waited, all together: as many as there were requests under way at a time, on
    /// average.
    pub(in crate::engine) under_way: f64,
    /// The most requests that were under way at a time.
    pub(in crate::engine) most_under_way: f64,
}

/// What is typical of some values, and how far they are from it.
#[derive(Clone, Copy, Debug)]
struct Spread {
    median: f64,
    /// Median of their distances from it, as a part of it.
    deviation: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let median = middle(values.clone());
        let distance = middle(values.map(|value| (value - median).abs()));
        Self {
            median,
            deviation: distance / median,
        }
    }
}

/// The median; the lower one of an even number, so that at least as many are as great as smaller.
fn middle(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let lower = values.len().saturating_sub(1) / 2;
    values.get(lower).copied().unwrap_or_default()
}

/// What clients asked for in these seconds; `None` when there is none.
///
/// A closed loop always has as many requests under way, and how many it makes depends on how fast its
/// disk is at the time; an open loop makes as many in each second, and how many are under way depends
/// on it.
fn load(seconds: &[Second]) -> Option<GuestLoad> {
    if seconds.is_empty() {
        return None;
    }
    let rates = Spread::of(seconds.iter().map(|second| second.requests));
    let under_way = Spread::of(seconds.iter().map(|second| second.under_way));
    let full = |second: &Second| second.under_way / second.most_under_way.max(1.0);
    let full = middle(seconds.iter().map(full));
    let chance = CHANCE / rates.median.max(1.0).sqrt();
    let steady = rates.deviation <= STEADY + chance;
    let comparable = seconds.len() >= FEWEST_TO_COMPARE;
    let keeps_many = full >= HALF_FULL && under_way.deviation < rates.deviation;
    let is_closed = full >= FULL && seconds.len() >= FEWEST_SECONDS || comparable && keeps_many;
    let is_open = comparable && steady && rates.deviation < under_way.deviation / 2.0;
    let arrivals = match (is_closed, is_open) {
        (true, _) => Arrivals::ClosedLoop,
        (false, true) => Arrivals::OpenLoop,
        (false, false) => Arrivals::Unknown,
    };
    Some(GuestLoad {
        per_second: rates.median as u64,
        arrivals,
    })
}

impl LatencyBaseline {
    pub(in crate::engine) fn new(latencies: Histogram<u32>, seconds: &[Second]) -> Self {
        Self {
            latencies,
            load: load(seconds),
        }
    }

    /// What clients asked for in the median of the seconds that are over. `None` when there is none.
    pub const fn load(&self) -> Option<GuestLoad> {
        self.load
    }

    /// Requests it goes by.
    pub fn requests(&self) -> u64 {
        self.latencies.len()
    }

    /// The latency that this fraction of the requests did not exceed, within 1 %; zero without
    /// requests.
    pub fn at_quantile(&self, quantile: f64) -> Duration {
        Duration::from_micros(self.latencies.value_at_quantile(quantile))
    }

    /// The longest latency, within 1 %; zero without requests.
    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.latencies.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of seconds with so many requests of which each waited so many microseconds on average, and at
    /// most 16 at a time.
    fn arrivals_of(seconds: &[(f64, f64)]) -> Option<Arrivals> {
        let seconds: Vec<Second> = seconds
            .iter()
            .map(|&(requests, wait_us)| Second {
                requests,
                under_way: requests * wait_us / 1e6,
                most_under_way: 16.0,
            })
            .collect();
        load(&seconds).map(|load| load.arrivals)
    }

    #[test]
    fn as_many_requests_however_long_they_wait_are_an_open_loop() {
        let paced = [
            (10_000.0, 100.0),
            (10_002.0, 130.0),
            (7_000.0, 9_000.0),
            (13_000.0, 600.0),
            (10_001.0, 140.0),
            (9_999.0, 105.0),
        ];
        assert_eq!(arrivals_of(&paced), Some(Arrivals::OpenLoop));
        // As many as come by chance: 100 a second, give or take 10.
        let chance = [
            (100.0, 200.0),
            (106.0, 150.0),
            (93.0, 250.0),
            (88.0, 260.0),
            (101.0, 420.0),
        ];
        assert_eq!(arrivals_of(&chance), Some(Arrivals::OpenLoop));
        assert_eq!(
            arrivals_of(&chance.map(|(n, us)| (n * 100.0, us))),
            Some(Arrivals::Unknown)
        );
    }

    /// Seconds with so many requests that `depth` were under way at a time on average.
    fn under_way<const N: usize>(depth: f64, rates: [f64; N]) -> [(f64, f64); N] {
        rates.map(|rate| (rate, depth * 1e6 / rate))
    }

    #[test]
    fn as_many_under_way_however_many_are_answered_are_a_closed_loop() {
        for depth in [7.0, 12.0, 16.0] {
            let busy = under_way(depth, [50_000.0, 56_000.0, 44_000.0, 61_000.0, 12_000.0]);
            assert_eq!(arrivals_of(&busy), Some(Arrivals::ClosedLoop));
            // A disk that is as steady as a clock.
            let steady = under_way(depth, [50_000.0, 50_010.0, 49_990.0, 50_002.0, 50_004.0]);
            assert_eq!(arrivals_of(&steady), Some(Arrivals::ClosedLoop));
        }
    }

    #[test]
    fn nearly_all_that_can_be_under_way_are_a_closed_loop_however_steady_it_is() {
        let steady = [
            (10_000.0, 1_100.0),
            (10_002.0, 1_200.0),
            (9_998.0, 1_000.0),
            (10_001.0, 1_300.0),
        ];
        assert_eq!(arrivals_of(&steady), Some(Arrivals::ClosedLoop));
    }

    #[test]
    fn fewer_under_way_or_in_a_varying_number_tell_nothing() {
        let few = under_way(5.0, [50_000.0, 56_000.0, 44_000.0, 61_000.0, 12_000.0]);
        assert_eq!(arrivals_of(&few), Some(Arrivals::Unknown));
        let varying = [
            (20_000.0, 400.0),
            (20_600.0, 340.0),
            (19_300.0, 420.0),
            (18_900.0, 500.0),
            (20_100.0, 330.0),
        ];
        assert_eq!(arrivals_of(&varying), Some(Arrivals::Unknown));
    }

    /// A paced guest's first second may meet a disk that is still busy with something else.
    #[test]
    fn one_full_second_of_two_is_no_closed_loop() {
        let stall_then_calm = [(900.0, 15_000.0), (10_000.0, 300.0)];
        assert_eq!(arrivals_of(&stall_then_calm), Some(Arrivals::Unknown));
    }

    #[test]
    fn few_seconds_tell_nothing() {
        let wait = |us| (10_000.0, us);
        let paced = [100.0, 130.0, 900.0, 200.0].map(wait);
        assert_eq!(arrivals_of(&paced), Some(Arrivals::OpenLoop));
        assert_eq!(arrivals_of(&paced[..3]), Some(Arrivals::Unknown));
        let half_full = under_way(8.0, [50_000.0, 56_000.0, 44_000.0, 61_000.0]);
        assert_eq!(arrivals_of(&half_full), Some(Arrivals::ClosedLoop));
        assert_eq!(arrivals_of(&half_full[..3]), Some(Arrivals::Unknown));
        let full = under_way(16.0, [50_000.0, 56_000.0]);
        assert_eq!(arrivals_of(&full), Some(Arrivals::ClosedLoop));
        assert_eq!(arrivals_of(&full[..1]), Some(Arrivals::Unknown));
        assert_eq!(arrivals_of(&[]), None);
    }
}
