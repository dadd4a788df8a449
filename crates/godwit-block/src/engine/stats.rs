//! What the engine counts.

use godwit_core::request::Operation;
use godwit_core::units::Time;
use hdrhistogram::Histogram;

use super::snapshot::{Counters, LATENCY_BOUNDS_US, Latencies, LatencySummary};

/// Latencies above this, in microseconds, are counted as this.
const LONGEST_US: u64 = 120_000_000;

const SECOND: u64 = 1_000_000_000;

/// Counts of one engine. Recording takes no memory.
pub(super) struct Stats {
    pub(super) counters: Counters,
    pub(super) latencies: Latencies,
    summary: LatencySummary,
    /// Latencies of the second under way.
    current: Histogram<u64>,
    second_started: Time,
}

impl Stats {
    pub(super) fn new(now: Time) -> Result<Self, hdrhistogram::CreationError> {
        Ok(Self {
            counters: Counters::default(),
            latencies: Latencies::default(),
            summary: LatencySummary::default(),
            current: Histogram::new_with_bounds(1, LONGEST_US, 2)?,
            second_started: now,
        })
    }

    /// A client's request was answered.
    pub(super) fn answered(&mut self, operation: &Operation, ok: bool, arrived: Time, now: Time) {
        let counters = &mut self.counters;
        let bytes = operation.extent().map_or(0, |extent| extent.bytes());
        match operation {
            Operation::Read(_) => {
                counters.reads += 1;
                counters.read_bytes += if ok { bytes } else { 0 };
            }
            Operation::Write { .. } => {
                counters.writes += 1;
                counters.written_bytes += if ok { bytes } else { 0 };
            }
            Operation::WriteZeroes { .. } => counters.discards += 1,
            Operation::Flush => counters.flushes += 1,
        }
        counters.errors += u64::from(!ok);
        let latency = now.since(arrived).as_micros() as u64;
        self.current.saturating_record(latency);
        let bucket = LATENCY_BOUNDS_US.partition_point(|&bound| bound < latency);
        self.latencies.counts[bucket] += 1;
        self.latencies.sum_us += latency;
    }

    /// The summary of the last full second.
    pub(super) fn summary(&mut self, now: Time) -> LatencySummary {
        let elapsed = now.0.saturating_sub(self.second_started.0);
        if elapsed >= SECOND {
            self.summary = LatencySummary {
                p50_us: self.current.value_at_quantile(0.5),
                p99_us: self.current.value_at_quantile(0.99),
                p9999_us: self.current.value_at_quantile(0.9999),
                max_us: self.current.max(),
                iops: self.current.len() as f64 * SECOND as f64 / elapsed as f64,
            };
            self.current.reset();
            self.second_started = now;
        }
        self.summary
    }

    /// Whether the summary will change as time passes.
    pub(super) fn is_moving(&self) -> bool {
        !self.current.is_empty() || self.summary.iops > 0.0
    }
}

/// Processor time of the calling thread in seconds.
pub(super) fn thread_cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use godwit_core::units::{Extent, Lba};

    use super::*;

    #[test]
    fn a_second_of_requests_is_summed_up() {
        let mut stats = Stats::new(Time(0)).expect("bounds");
        let extent = Extent::new(Lba(0), 8).expect("an extent");
        for n in 1..=100_u64 {
            let arrived = Time(n * 1000);
            let done = Time(arrived.0 + n * 1_000_000);
            stats.answered(
                &Operation::Write { extent, fua: false },
                n != 7,
                arrived,
                done,
            );
        }
        assert_eq!(stats.summary(Time(SECOND / 2)), LatencySummary::default());
        let summary = stats.summary(Time(SECOND * 2));
        assert!((49_000..=51_500).contains(&summary.p50_us), "{summary:?}");
        assert!((98_000..=102_000).contains(&summary.max_us), "{summary:?}");
        assert!((summary.iops - 50.0).abs() < 0.01);
        assert_eq!(stats.counters.writes, 100);
        assert_eq!(stats.counters.errors, 1);
        assert_eq!(stats.counters.written_bytes, 99 * 4096);
        assert_eq!(stats.latencies.counts.iter().sum::<u64>(), 100);
        assert_eq!(stats.latencies.counts[4], 1);
        assert!(stats.is_moving());
        assert_eq!(stats.summary(Time(SECOND * 3)).iops, 0.0);
        assert!(!stats.is_moving());
    }
}
