//! A guest's memory measurements over time. All moments are seconds since the memory began to move.

use std::time::Instant;

use godwit_testkit::vm::{ChaseWindow, Windows};

/// Seconds of a bin, about the length of a window of the guest's loads.
pub(super) const BIN: f64 = 0.1;
/// Size of a page in MiB.
const PAGE_MIB: f64 = 4096.0 / (1 << 20) as f64;

/// A stretch of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Span {
    pub(super) from: f64,
    pub(super) to: f64,
}

impl Span {
    fn seconds(self) -> f64 {
        (self.to - self.from).max(0.0)
    }

    fn common(self, other: Self) -> f64 {
        (self.to.min(other.to) - self.from.max(other.from)).max(0.0)
    }
}

/// All windows of a guest, around the moment at which the memory began to move.
pub(super) struct Timeline {
    pub(super) windows: Windows,
    pub(super) zero: Instant,
}

impl Timeline {
    fn span(&self, at: Instant, window_us: u64) -> Span {
        let to = seconds(at, self.zero);
        let from = to - window_us as f64 / 1e6;
        Span { from, to }
    }

    fn chased_in(&self, span: Span) -> impl Iterator<Item = (Span, &ChaseWindow)> {
        let windows = self.windows.pointer_chase.iter();
        let windows = windows.map(|(at, window)| (self.span(*at, window.window_us), window));
        windows.filter(move |(of, _)| of.common(span) > 0.0)
    }

    /// Returns the mean time of an access in nanoseconds.
    pub(super) fn mean_ns(&self, span: Span) -> Option<f64> {
        let all = self.chased_in(span).map(|(_, window)| window.accesses);
        let all = all.sum::<u64>() as f64;
        let took = self
            .chased_in(span)
            .map(|(_, window)| window.accesses as f64 * window.mean_ns);
        (all > 0.0).then(|| took.sum::<f64>() / all)
    }

    /// Returns the largest mean time of an access of any window, in nanoseconds.
    pub(super) fn worst_window_ns(&self, span: Span) -> Option<f64> {
        let means = self.chased_in(span).map(|(_, window)| window.mean_ns);
        means.max_by(f64::total_cmp)
    }

    /// Returns the time of the slowest run of accesses in nanoseconds.
    pub(super) fn slowest_run_ns(&self, span: Span) -> Option<f64> {
        let slowest = self
            .chased_in(span)
            .map(|(_, window)| window.slowest_run_ns)
            .max();
        slowest.map(|nanoseconds| nanoseconds as f64)
    }

    /// Returns the writer's MiB of pages a second; `None` for an empty span. A window that is partly within the span
    /// counts for its overlap.
    pub(super) fn rate_mib(&self, span: Span) -> Option<f64> {
        let pages = self.windows.dirty_pages.iter().map(|(at, window)| {
            let of = self.span(*at, window.window_us);
            window.pages as f64 * of.common(span) / of.seconds().max(1e-6)
        });
        (span.seconds() > 0.0).then(|| pages.sum::<f64>() * PAGE_MIB / span.seconds())
    }

    /// Returns the writer's rate in each whole bin of a span.
    pub(super) fn rates_mib(&self, span: Span) -> Vec<(f64, f64)> {
        // A rounding error must not cost a bin.
        let count = (span.seconds() / BIN + 1e-9).floor() as usize;
        let rate = |index: usize| {
            let from = span.from + index as f64 * BIN;
            let to = from + BIN;
            Some((rounded(from), rounded(self.rate_mib(Span { from, to })?)))
        };
        (0..count).filter_map(rate).collect()
    }

    /// Returns the pointer chase's mean latency in each window, in nanoseconds.
    pub(super) fn latencies_ns(&self, span: Span) -> Vec<(f64, f64)> {
        let windows = self.chased_in(span);
        windows
            .map(|(span, window)| (rounded(span.from), rounded(window.mean_ns)))
            .collect()
    }
}

/// Rounds a value for the report.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns the seconds from `zero` to `at`, negative if `at` is earlier.
pub(super) fn seconds(at: Instant, zero: Instant) -> f64 {
    let after = at.saturating_duration_since(zero).as_secs_f64();
    after - zero.saturating_duration_since(at).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use godwit_testkit::vm::DirtyWindow;

    use super::*;

    fn timeline(chased: &[(u64, f64)], written: &[(u64, u64, u64)]) -> Timeline {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut windows = Windows::default();
        for (accesses, mean_ns) in chased {
            let window = ChaseWindow {
                window_us: 100_000,
                accesses: *accesses,
                mean_ns: *mean_ns,
                slowest_run_ns: *mean_ns as u64 * 16,
            };
            let number = windows.pointer_chase.len() as u64 + 1;
            windows.pointer_chase.push((at(100 * number), window));
        }
        for (from_ms, to_ms, pages) in written {
            let window = DirtyWindow {
                window_us: (to_ms - from_ms) * 1000,
                pages: *pages,
            };
            windows.dirty_pages.push((at(*to_ms), window));
        }
        Timeline { windows, zero }
    }

    #[test]
    fn a_window_counts_for_the_part_that_is_within() {
        // 100 MiB a second, then a long window with little, then nothing.
        let timeline = timeline(&[], &[(0, 100, 2560), (100, 500, 256)]);
        let rate = |from, to| timeline.rate_mib(Span { from, to }).unwrap();
        assert!((rate(0.0, 0.1) - 100.0).abs() < 1e-6);
        assert!((rate(0.05, 0.1) - 100.0).abs() < 1e-6);
        assert!((rate(0.2, 0.3) - 2.5).abs() < 1e-6);
        assert!(rate(0.6, 0.7).abs() < 1e-9);
        let (from, to) = (0.0, 0.59);
        let rates = timeline.rates_mib(Span { from, to });
        assert_eq!(rates.len(), 5, "whole bins only: {rates:?}");
        assert_eq!(timeline.rate_mib(Span { from: 1.0, to: 1.0 }), None);
    }

    #[test]
    fn the_worst_window_is_not_hidden_by_many_accesses_elsewhere() {
        let timeline = timeline(&[(1000, 1.0), (10, 90.0)], &[]);
        let all = Span { from: 0.0, to: 1.0 };
        assert_eq!(timeline.worst_window_ns(all), Some(90.0));
        assert!(timeline.mean_ns(all).unwrap() < 2.0);
        let later = Span { from: 5.0, to: 6.0 };
        assert_eq!(timeline.mean_ns(later), None);
        assert_eq!(timeline.worst_window_ns(later), None);
    }
}
