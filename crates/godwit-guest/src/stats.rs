//! Counters of all loads, and the guest's own view of gaps between writes.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::console;

/// Problems described on the console; further ones are only counted.
const DESCRIBED: u64 = 20;
/// The longest distinguishable latency, in microseconds: ten minutes.
const LONGEST: u64 = 600_000_000;
/// Significant digits of latencies.
const DIGITS: u8 = 3;

/// Counters of all threads. Gaps are those of the slowest disk.
#[derive(Debug)]
pub(crate) struct Stats {
    start: Instant,
    /// Number of printed reports.
    reports: Mutex<u64>,
    reads: AtomicU64,
    syncs: AtomicU64,
    file_operations: AtomicU64,
    memory_passes: AtomicU64,
    errors: AtomicU64,
    mismatches: AtomicU64,
    mark: AtomicU64,
    disks: Vec<Progress>,
    /// Microseconds of each request since the mark, on all disks: writes, reads and syncs.
    latency: Mutex<Histogram<u64>>,
}

/// The writes of one disk. Times are nanoseconds since the start.
#[derive(Debug, Default)]
struct Progress {
    writes: AtomicU64,
    last: AtomicU64,
    gap_since_report: AtomicU64,
    gap_since_mark: AtomicU64,
    last_tick: AtomicU64,
}

impl Stats {
    /// # Errors
    /// If the histogram of latencies cannot be made.
    pub(crate) fn new(disks: usize) -> io::Result<Self> {
        Ok(Self {
            start: Instant::now(),
            reports: Mutex::new(0),
            reads: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            file_operations: AtomicU64::new(0),
            memory_passes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            mismatches: AtomicU64::new(0),
            mark: AtomicU64::new(0),
            disks: (0..disks).map(|_| Progress::default()).collect(),
            latency: Mutex::new(
                Histogram::new_with_bounds(1, LONGEST, DIGITS).map_err(io::Error::other)?,
            ),
        })
    }

    fn latency(&self) -> MutexGuard<'_, Histogram<u64>> {
        self.latency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Begins the writes of a disk: no gap before now counts.
    pub(crate) fn disk_begins(&self, disk: usize) {
        self.disks[disk].last.store(self.now(), Relaxed);
    }

    /// Continues the count of a disk's writes after number `write`, the last one of earlier boots.
    pub(crate) fn resumed(&self, disk: usize, write: u64) {
        self.disks[disk].writes.store(write, Relaxed);
        console::say(&format!("{{\"resumed\":{disk},\"write\":{write}}}"));
    }

    /// Ends the writes of a disk: the time from now on is no gap.
    pub(crate) fn disk_ends(&self, disk: usize) {
        self.disks[disk].last.store(u64::MAX, Relaxed);
    }

    /// Records the latency of an answered request to a disk.
    pub(crate) fn answered(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.latency().saturating_record(micros);
    }

    /// Records an acknowledged write. At most one tick a millisecond is printed for each disk, so that the serial line
    /// does not limit the load.
    pub(crate) fn wrote(&self, disk: usize) {
        let progress = &self.disks[disk];
        let now = self.now();
        let gap = now.saturating_sub(progress.last.swap(now, Relaxed));
        progress.gap_since_report.fetch_max(gap, Relaxed);
        progress.gap_since_mark.fetch_max(gap, Relaxed);
        let writes = progress.writes.fetch_add(1, Relaxed) + 1;
        if now - progress.last_tick.load(Relaxed) >= 1_000_000 {
            progress.last_tick.store(now, Relaxed);
            console::say(&format!("~{disk} {writes}"));
        }
    }

    pub(crate) fn read(&self) {
        self.reads.fetch_add(1, Relaxed);
    }

    pub(crate) fn synced(&self) {
        self.syncs.fetch_add(1, Relaxed);
    }

    pub(crate) fn file_operation(&self) {
        self.file_operations.fetch_add(1, Relaxed);
    }

    pub(crate) fn memory_pass(&self) {
        self.memory_passes.fetch_add(1, Relaxed);
    }

    /// Records a failed operation.
    pub(crate) fn error(&self, what: &str) {
        if self.errors.fetch_add(1, Relaxed) < DESCRIBED {
            console::say_text("error", what);
        }
    }

    /// Records a read that differs from the written content.
    pub(crate) fn mismatch(&self, what: &str) {
        if self.mismatches.fetch_add(1, Relaxed) < DESCRIBED {
            console::say_text("mismatch", what);
        }
    }

    /// Forgets the gaps so far, unless this mark was set before.
    pub(crate) fn set_mark(&self, id: u64) {
        if self.mark.swap(id, Relaxed) != id {
            for disk in &self.disks {
                disk.gap_since_mark.store(0, Relaxed);
            }
            self.latency().reset();
        }
        console::say(&format!("{{\"marked\":{id}}}"));
    }

    pub(crate) fn report(&self) {
        self.report_to(console::say);
    }

    /// Prints a report. Two threads report, each second and on command. The lock is held until the line is out: a
    /// report that comes after a later one is the sign of a guest that runs twice.
    fn report_to(&self, say: impl FnOnce(&str)) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        *reports += 1;
        let now = self.now();
        let (mut writes, mut gap, mut since_mark) = (0, 0, 0);
        for disk in &self.disks {
            writes += disk.writes.load(Relaxed);
            // A write still under way counts with its time so far.
            let open = now.saturating_sub(disk.last.load(Relaxed));
            gap = gap.max(disk.gap_since_report.swap(0, Relaxed)).max(open);
            since_mark = since_mark.max(disk.gap_since_mark.load(Relaxed)).max(open);
        }
        let latency = {
            let latency = self.latency();
            let at = |quantile| latency.value_at_quantile(quantile);
            format!(
                "{{\"p50_us\":{},\"p99_us\":{},\"p999_us\":{},\"max_us\":{}}}",
                at(0.5),
                at(0.99),
                at(0.999),
                latency.max()
            )
        };
        say(&format!(
            "{{\"seq\":{reports},\"uptime_ms\":{},\"writes\":{writes},\"reads\":{},\"syncs\":{},\
             \"file_operations\":{},\"memory_passes\":{},\"errors\":{},\"mismatches\":{},\
             \"largest_gap_ms\":{:.3},\"gap_since_mark_ms\":{:.3},\"mark\":{},\
             \"latency_since_mark\":{latency}}}",
            now / 1_000_000,
            self.reads.load(Relaxed),
            self.syncs.load(Relaxed),
            self.file_operations.load(Relaxed),
            self.memory_passes.load(Relaxed),
            self.errors.load(Relaxed),
            self.mismatches.load(Relaxed),
            gap as f64 / 1e6,
            since_mark as f64 / 1e6,
            self.mark.load(Relaxed),
        ));
    }

    /// Prints the last line: everything was verified and the disks are unmounted.
    pub(crate) fn finished(&self) {
        let writes: u64 = self
            .disks
            .iter()
            .map(|disk| disk.writes.load(Relaxed))
            .sum();
        console::say(&format!(
            "\n{{\"finished\":true,\"writes\":{writes},\"errors\":{},\"mismatches\":{}}}",
            self.errors.load(Relaxed),
            self.mismatches.load(Relaxed),
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;
    use std::time::Duration;

    use super::{LONGEST, Stats};

    #[test]
    fn slow_requests_are_told_apart_until_the_mark() {
        let stats = Stats::new(1).unwrap();
        stats.answered(Duration::from_micros(80));
        stats.answered(Duration::from_secs(3));
        let near = |value: u64, expected: u64| value.abs_diff(expected) <= expected / 100;
        assert!(near(stats.latency().value_at_quantile(0.5), 80));
        assert!(near(stats.latency().max(), 3_000_000));
        stats.answered(Duration::from_hours(1));
        assert!(near(stats.latency().max(), LONGEST));
        stats.set_mark(1);
        assert_eq!(stats.latency().max(), 0);
    }

    #[test]
    fn reports_of_two_threads_come_in_the_order_of_their_numbers() {
        const EACH: usize = 2000;
        let stats = Stats::new(1).unwrap();
        let printed = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        stats.report_to(|line| {
                            let (number, _) = line["{\"seq\":".len()..].split_once(',').unwrap();
                            let number: usize = number.parse().unwrap();
                            printed.lock().unwrap().push(number);
                        });
                    }
                });
            }
        });
        let printed = printed.into_inner().unwrap();
        assert!(printed.into_iter().eq(1..=2 * EACH));
    }
}
