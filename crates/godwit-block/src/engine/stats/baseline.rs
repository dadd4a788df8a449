//! The latency of clients before a migration, and the kind of their load.

use std::time::Duration;

use godwit_core::{Arrivals, GuestLoad};
use hdrhistogram::Histogram;

/// Fewest seconds to compare with each other: of three, two are alike by chance too often.
const FEWEST_TO_COMPARE: usize = 4;

/// Fewest seconds that tell anything.
const FEWEST_SECONDS: usize = 2;

/// A closed loop has on average at least this part of its most requests under way: the rest is with the guest. An open
/// loop has as many only while its disk does not keep up.
const FULL: f64 = 0.6;

/// Part that tells a closed loop if the requests under way also vary less than the requests in a second.
const HALF_FULL: f64 = 0.4;

/// An open loop makes the same number of requests in each second, but for this part and for chance.
const STEADY: f64 = 0.005;

/// If requests come by chance, half of the seconds have the mean number, give or take this many times the square root
/// of the mean.
const CHANCE: f64 = 0.674;

/// Latencies of clients' requests over the last ten seconds with requests, none of them more than a minute ago.
#[derive(Clone, Debug)]
pub struct LatencyBaseline {
    /// In microseconds.
    latencies: Histogram<u32>,
    load: Option<GuestLoad>,
}

/// The clients' activity in a second that is over.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Second {
    /// Answered requests.
    pub(in crate::engine) requests: f64,
    /// Total wait of all requests in seconds: the average number of requests under way.
    pub(in crate::engine) under_way: f64,
    /// Most requests under way at a time.
    pub(in crate::engine) most_under_way: f64,
}

/// The median of some values, and the deviation from the median.
#[derive(Clone, Copy, Debug)]
struct Spread {
    median: f64,
    /// Median distance from the median, as a part of the median.
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

/// Returns the median; the lower one of an even number, so that at least as many values are as great as smaller.
fn middle(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let lower = values.len().saturating_sub(1) / 2;
    values.get(lower).copied().unwrap_or_default()
}

/// Returns the load of clients in these seconds; `None` without seconds.
///
/// A closed loop always has the same number of requests under way, and its rate depends on the speed of the disk. An
/// open loop makes the same number in each second, and the number under way depends on the disk.
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

    /// Returns the load of clients in the median of the past seconds; `None` without past seconds.
    pub const fn load(&self) -> Option<GuestLoad> {
        self.load
    }

    /// Returns the number of requests in the baseline.
    pub fn requests(&self) -> u64 {
        self.latencies.len()
    }

    /// Returns the latency that this fraction of the requests did not exceed, within 1 %; zero without requests.
    pub fn at_quantile(&self, quantile: f64) -> Duration {
        Duration::from_micros(self.latencies.value_at_quantile(quantile))
    }

    /// Returns the longest latency, within 1 %; zero without requests.
    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.latencies.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the arrivals for seconds given as (requests, average wait in microseconds), with at most 16 under way at
    /// a time.
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
        // A number given by chance: 100 a second, give or take 10.
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

    /// Returns seconds with these numbers of requests and `depth` requests under way on average.
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
