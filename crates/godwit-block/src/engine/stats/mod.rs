//! The counters of an engine.

pub(super) mod baseline;
pub(super) mod snapshot;

use std::time::Duration;

use godwit_core::request::Operation;
use godwit_core::units::Time;
use hdrhistogram::Histogram;

use crate::engine::stats::baseline::{LatencyBaseline, Second};
use crate::engine::stats::snapshot::{Counters, LATENCY_BOUNDS_US, Latencies, LatencySummary};

/// Longest latency in microseconds; longer ones are counted as this.
const LONGEST_US: u64 = 120_000_000;

const SECOND: u64 = 1_000_000_000;

/// Seconds with requests in a baseline.
const BASELINE_SECONDS: usize = 10;

/// Age of a second beyond which it says nothing about the guest now.
const BASELINE_AGE: Duration = Duration::from_secs(60);

/// The counts of one engine. Recording takes no memory.
pub(super) struct Stats {
    pub(super) counters: Counters,
    pub(super) latencies: Latencies,
    summary: LatencySummary,
    /// Latencies of the current second; `most_under_way` is the peak of requests under way in the same second.
    current: Histogram<u32>,
    most_under_way: u32,
    second_started: Time,
    /// Last seconds with requests.
    past: [Past; BASELINE_SECONDS],
    /// Index of the oldest in `past`.
    oldest: usize,
}

/// A second that is over.
struct Past {
    latencies: Histogram<u32>,
    requests_per_second: f64,
    most_under_way: u32,
    ended: Time,
}

impl Past {
    fn summed_up(&self) -> Second {
        Second {
            requests: self.requests_per_second,
            under_way: self.requests_per_second * self.latencies.mean() / 1e6,
            most_under_way: f64::from(self.most_under_way),
        }
    }
}

impl Stats {
    pub(super) fn new(now: Time) -> Result<Self, hdrhistogram::CreationError> {
        let current = Histogram::new_with_bounds(1, LONGEST_US, 2)?;
        let past = || Past {
            latencies: current.clone(),
            requests_per_second: 0.0,
            most_under_way: 0,
            ended: now,
        };
        Ok(Self {
            past: std::array::from_fn(|_| past()),
            oldest: 0,
            counters: Counters::default(),
            latencies: Latencies::default(),
            summary: LatencySummary::default(),
            current,
            most_under_way: 0,
            second_started: now,
        })
    }

    /// Records the number of requests under way now.
    pub(super) fn under_way(&mut self, requests: u32) {
        self.most_under_way = self.most_under_way.max(requests);
    }

    /// Counts a client's answered request.
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

    /// Counts an answered request of another node's client: that node counts the request, too, but the wait here is a
    /// part that a migration from here must not worsen.
    pub(super) fn answered_peer(&mut self, arrived: Time, now: Time) {
        self.current
            .saturating_record(now.since(arrived).as_micros() as u64);
    }

    /// Returns the summary of the last full second.
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
            if !self.current.is_empty() {
                let oldest = &mut self.past[self.oldest];
                std::mem::swap(&mut self.current, &mut oldest.latencies);
                oldest.requests_per_second = self.summary.iops;
                oldest.most_under_way = self.most_under_way;
                oldest.ended = now;
                self.oldest = (self.oldest + 1) % BASELINE_SECONDS;
            }
            self.current.reset();
            self.most_under_way = 0;
            self.second_started = now;
        }
        self.summary
    }

    /// Returns the latencies of the last seconds with requests, the current second included.
    pub(super) fn baseline(&self, now: Time) -> LatencyBaseline {
        let mut latencies = self.current.clone();
        let mut seconds = Vec::with_capacity(BASELINE_SECONDS);
        for past in &self.past {
            if !past.latencies.is_empty() && now.since(past.ended) <= BASELINE_AGE {
                latencies += &past.latencies;
                seconds.push(past.summed_up());
            }
        }
        LatencyBaseline::new(latencies, &seconds)
    }

    /// Returns true if the summary will change as time passes.
    pub(super) fn is_moving(&self) -> bool {
        !self.current.is_empty() || self.summary.iops > 0.0
    }
}

/// Returns the processor time of the calling thread.
pub(super) fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use godwit_core::Arrivals;
    use godwit_core::units::{Extent, Lba};

    use super::*;

    fn flush(stats: &mut Stats, at: Time, took: Duration) {
        stats.answered(&Operation::Flush, true, at, at.after(took));
    }

    #[test]
    fn a_baseline_covers_the_last_ten_seconds_with_requests() {
        let mut stats = Stats::new(Time(0)).expect("bounds");
        assert_eq!(stats.baseline(Time(0)).requests(), 0);
        assert_eq!(stats.baseline(Time(0)).load(), None);
        for second in 0..15 {
            let took = Duration::from_millis(if second < 5 { 500 } else { 1 });
            flush(&mut stats, Time(second * SECOND), took);
            stats.summary(Time((second + 1) * SECOND));
        }
        flush(&mut stats, Time(15 * SECOND), Duration::from_millis(3));
        // Seconds without requests do not displace others.
        let mut now = Time(15 * SECOND);
        for second in 16..30 {
            now = Time(second * SECOND);
            stats.summary(now);
        }
        let baseline = stats.baseline(now);
        assert_eq!(baseline.requests(), 10);
        assert_eq!(baseline.load().map(|load| load.per_second), Some(1));
        assert!((990..1010).contains(&baseline.at_quantile(0.5).as_micros()));
        assert!((2990..3050).contains(&baseline.longest().as_micros()));
    }

    #[test]
    fn a_baseline_tells_what_decides_how_many_requests_there_are() {
        let arrivals = |most_under_way, seconds: [(u64, u64); 4]| {
            let mut stats = Stats::new(Time(0)).expect("bounds");
            for (second, (requests, wait_us)) in (0..).zip(seconds) {
                stats.under_way(most_under_way);
                stats.under_way(1);
                let wait = Duration::from_micros(wait_us);
                for _ in 0..requests {
                    flush(&mut stats, Time(second * SECOND), wait);
                }
                stats.summary(Time((second + 1) * SECOND));
            }
            let load = stats.baseline(Time(4 * SECOND)).load();
            load.map(|load| load.arrivals)
        };
        let paced = [(1000, 100), (1000, 300), (1000, 150), (1000, 700)];
        assert_eq!(arrivals(2, paced), Some(Arrivals::OpenLoop));
        let one_after_the_other = [(1000, 1000), (500, 2000), (250, 4000), (2000, 500)];
        assert_eq!(arrivals(1, one_after_the_other), Some(Arrivals::ClosedLoop));
        assert_eq!(arrivals(3, one_after_the_other), Some(Arrivals::Unknown));
    }

    #[test]
    fn a_baseline_forgets_what_is_long_ago() {
        let mut stats = Stats::new(Time(0)).expect("bounds");
        flush(&mut stats, Time(0), Duration::from_millis(1));
        stats.summary(Time(SECOND));
        assert_eq!(stats.baseline(Time(60 * SECOND)).requests(), 1);
        assert_eq!(stats.baseline(Time(62 * SECOND)).requests(), 0);
    }

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
