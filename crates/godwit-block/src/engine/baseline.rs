//! How long clients waited before a migration, and whether that decides how much they ask for.

use std::time::Duration;

use godwit_core::Arrivals;
use hdrhistogram::Histogram;

/// Fewer seconds than this do not tell what decides how much clients ask for: of three, two are alike by
/// chance too often.
const FEWEST_SECONDS: usize = 4;

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
    per_second: Option<f64>,
    arrivals: Arrivals,
}

/// What clients did in a second that is over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Second {
    /// Requests that were answered.
    pub(super) requests: f64,
    /// Seconds that they waited, all together: as many as there were requests under way at a time, on
    /// average.
    pub(super) under_way: f64,
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

fn middle(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// What decided how many requests there were in these seconds.
fn arrivals(seconds: usize, rates: Spread, under_way: Spread) -> Arrivals {
    let chance = CHANCE / rates.median.max(1.0).sqrt();
    let steady = rates.deviation <= STEADY + chance;
    // Where the disk is as steady as that, a closed loop has hardly more or fewer under way.
    if seconds >= FEWEST_SECONDS && steady && rates.deviation < under_way.deviation / 2.0 {
        Arrivals::OpenLoop
    } else {
        Arrivals::ClosedLoop
    }
}

impl LatencyBaseline {
    pub(super) fn new(latencies: Histogram<u32>, seconds: &[Second]) -> Self {
        let rates = Spread::of(seconds.iter().map(|second| second.requests));
        let under_way = Spread::of(seconds.iter().map(|second| second.under_way));
        Self {
            latencies,
            per_second: (!seconds.is_empty()).then_some(rates.median),
            arrivals: arrivals(seconds.len(), rates, under_way),
        }
    }

    /// Requests per second: the median of the seconds that are over. `None` when there is none.
    pub const fn requests_per_second(&self) -> Option<f64> {
        self.per_second
    }

    /// What decided how many requests there were. A closed loop always has as many under way, and how
    /// many it makes depends on how fast its disk is at the time; an open loop makes as many in each
    /// second, and how many are under way depends on it.
    pub const fn arrivals(&self) -> Arrivals {
        self.arrivals
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

    /// Of seconds with so many requests of which each waited so many microseconds on average.
    fn arrivals_of(seconds: &[(f64, f64)]) -> Arrivals {
        let seconds: Vec<Second> = seconds
            .iter()
            .map(|&(requests, wait_us)| Second {
                requests,
                under_way: requests * wait_us / 1e6,
            })
            .collect();
        let latencies = Histogram::new(2).expect("two digits");
        LatencyBaseline::new(latencies, &seconds).arrivals()
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
        assert_eq!(arrivals_of(&paced), Arrivals::OpenLoop);
        // As many as come by chance: 100 a second, give or take 10.
        let chance = [
            (100.0, 200.0),
            (106.0, 150.0),
            (93.0, 250.0),
            (88.0, 260.0),
            (101.0, 420.0),
        ];
        assert_eq!(arrivals_of(&chance), Arrivals::OpenLoop);
        assert_eq!(
            arrivals_of(&chance.map(|(n, us)| (n * 100.0, us))),
            Arrivals::ClosedLoop
        );
    }

    #[test]
    fn as_many_under_way_however_many_are_answered_are_a_closed_loop() {
        for depth in [1.0, 16.0] {
            let second = |rate: f64| (rate, depth * 1e6 / rate);
            let busy = [50_000.0, 56_000.0, 44_000.0, 61_000.0, 12_000.0].map(second);
            assert_eq!(arrivals_of(&busy), Arrivals::ClosedLoop);
            // A disk that is as steady as a clock.
            let steady = [50_000.0, 50_010.0, 49_990.0, 50_002.0, 50_004.0].map(second);
            assert_eq!(arrivals_of(&steady), Arrivals::ClosedLoop);
        }
    }

    #[test]
    fn few_seconds_tell_nothing() {
        let wait = |us| (10_000.0, us);
        let paced = [100.0, 130.0, 900.0, 200.0].map(wait);
        assert_eq!(arrivals_of(&paced), Arrivals::OpenLoop);
        assert_eq!(arrivals_of(&paced[..3]), Arrivals::ClosedLoop);
        assert_eq!(arrivals_of(&[]), Arrivals::ClosedLoop);
    }
}
