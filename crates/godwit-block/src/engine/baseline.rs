//! How long clients waited before a migration.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Latencies of clients' requests over the last ten seconds in which there were any, none of them
/// longer than a minute ago.
#[derive(Clone, Debug)]
pub struct LatencyBaseline {
    /// In microseconds.
    latencies: Histogram<u32>,
    per_second: Option<f64>,
}

impl LatencyBaseline {
    /// `rates` are the requests per second of the seconds that are over.
    pub(super) fn new(latencies: Histogram<u32>, mut rates: Vec<f64>) -> Self {
        rates.sort_by(f64::total_cmp);
        Self {
            latencies,
            per_second: rates.get(rates.len() / 2).copied(),
        }
    }

    /// Requests per second: the median of the seconds that are over. `None` when there is none.
    pub const fn requests_per_second(&self) -> Option<f64> {
        self.per_second
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
