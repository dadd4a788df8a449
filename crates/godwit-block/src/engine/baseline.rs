//! How long clients waited before a migration.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Latencies of clients' requests over the last ten seconds in which there were any, none of them
/// longer than a minute ago.
#[derive(Clone, Debug)]
pub struct LatencyBaseline {
    /// In microseconds.
    latencies: Histogram<u32>,
}

impl LatencyBaseline {
    pub(super) const fn new(latencies: Histogram<u32>) -> Self {
        Self { latencies }
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
