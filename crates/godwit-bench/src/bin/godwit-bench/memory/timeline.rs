//! A guest's memory measurements over time. All moments are seconds since the memory began to move.

use std::time::Instant;

use godwit_testkit::vm::Windows;

/// Seconds of a bin, about the length of a window of the guest's loads.
pub(crate) const BIN: f64 = 0.1;
/// Size of a page in MiB.
const PAGE_MIB: f64 = 4096.0 / (1 << 20) as f64;

/// A stretch of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Span {
    pub(crate) from: f64,
    pub(crate) to: f64,
}

impl Span {
    pub(crate) fn seconds(self) -> f64 {
        (self.to - self.from).max(0.0)
    }

    fn common(self, other: Self) -> f64 {
        (self.to.min(other.to) - self.from.max(other.from)).max(0.0)
    }
}

/// A window of the pointer chase.
#[derive(Clone, Copy, Debug)]
struct Chased {
    span: Span,
    accesses: f64,
    mean_ns: f64,
    slowest_run_ns: f64,
}

/// A window of the page writer.
#[derive(Clone, Copy, Debug)]
struct Written {
    span: Span,
    pages: f64,
}

/// All windows of a guest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    chased: Vec<Chased>,
    written: Vec<Written>,
}

impl Timeline {
    pub(crate) fn new(windows: &Windows, zero: Instant) -> Self {
        let span = |at: Instant, window_us: u64| {
            let to = seconds(at, zero);
            Span {
                from: to - window_us as f64 / 1e6,
                to,
            }
        };
        let chased = windows.pointer_chase.iter().map(|(at, window)| Chased {
            span: span(*at, window.window_us),
            accesses: window.accesses as f64,
            mean_ns: window.mean_ns,
            slowest_run_ns: window.slowest_run_ns as f64,
        });
        let written = windows.dirty_pages.iter().map(|(at, window)| Written {
            span: span(*at, window.window_us),
            pages: window.pages as f64,
        });
        Self {
            chased: chased.collect(),
            written: written.collect(),
        }
    }

    fn chased_in(&self, span: Span) -> impl Iterator<Item = &Chased> {
        let within = move |window: &&Chased| window.span.common(span) > 0.0;
        self.chased.iter().filter(within)
    }

    /// Returns the mean time of an access in nanoseconds.
    pub(crate) fn mean_ns(&self, span: Span) -> Option<f64> {
        let all: f64 = self.chased_in(span).map(|window| window.accesses).sum();
        let took = self.chased_in(span).map(|w| w.accesses * w.mean_ns);
        (all > 0.0).then(|| took.sum::<f64>() / all)
    }

    /// Returns the largest mean time of an access of any window, in nanoseconds.
    pub(crate) fn worst_window_ns(&self, span: Span) -> Option<f64> {
        let means = self.chased_in(span).map(|window| window.mean_ns);
        means.max_by(f64::total_cmp)
    }

    /// Returns the time of the slowest run of accesses in nanoseconds.
    pub(crate) fn slowest_run_ns(&self, span: Span) -> Option<f64> {
        let runs = self.chased_in(span).map(|window| window.slowest_run_ns);
        runs.max_by(f64::total_cmp)
    }

    /// Returns the writer's MiB of pages a second; `None` for an empty span.
    pub(crate) fn rate_mib(&self, span: Span) -> Option<f64> {
        // A window that is partly within the span counts for its overlap.
        let pages = self.written.iter().map(|window| {
            let part = window.span.common(span) / window.span.seconds().max(1e-6);
            window.pages * part
        });
        (span.seconds() > 0.0).then(|| pages.sum::<f64>() * PAGE_MIB / span.seconds())
    }

    /// Returns the writer's rate in each whole bin of a span.
    pub(crate) fn rates_mib(&self, span: Span) -> Vec<(f64, f64)> {
        let rate = |bin: Span| Some((rounded(bin.from), rounded(self.rate_mib(bin)?)));
        bins(span).filter_map(rate).collect()
    }

    /// Returns the pointer chase's mean latency in each window, in nanoseconds.
    pub(crate) fn latencies_ns(&self, span: Span) -> Vec<(f64, f64)> {
        let point = |window: &Chased| (rounded(window.span.from), rounded(window.mean_ns));
        self.chased_in(span).map(point).collect()
    }
}

/// Returns the whole bins of a span.
fn bins(span: Span) -> impl Iterator<Item = Span> {
    // A rounding error must not cost a bin.
    let count = (span.seconds() / BIN + 1e-9).floor() as usize;
    (0..count).map(move |index| {
        let from = span.from + index as f64 * BIN;
        Span {
            from,
            to: from + BIN,
        }
    })
}

/// Rounds a value for the report.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns the seconds from `zero` to `at`, negative if `at` is earlier.
pub(crate) fn seconds(at: Instant, zero: Instant) -> f64 {
    let after = at.saturating_duration_since(zero).as_secs_f64();
    after - zero.saturating_duration_since(at).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(from: f64, to: f64, pages: f64) -> Written {
        let span = Span { from, to };
        Written { span, pages }
    }

    #[test]
    fn a_window_counts_for_the_part_that_is_within() {
        let timeline = Timeline {
            chased: Vec::new(),
            // 100 MiB a second, then a long window with little, then nothing.
            written: vec![written(0.0, 0.1, 2560.0), written(0.1, 0.5, 256.0)],
        };
        let rate = |from, to| timeline.rate_mib(Span { from, to }).unwrap();
        assert!((rate(0.0, 0.1) - 100.0).abs() < 1e-6);
        assert!((rate(0.05, 0.1) - 100.0).abs() < 1e-6);
        assert!((rate(0.2, 0.3) - 2.5).abs() < 1e-6);
        assert!(rate(0.6, 0.7).abs() < 1e-9);
        let rates = timeline.rates_mib(Span {
            from: 0.0,
            to: 0.59,
        });
        assert_eq!(rates.len(), 5, "whole bins only: {rates:?}");
        assert_eq!(timeline.rate_mib(Span { from: 1.0, to: 1.0 }), None);
    }

    #[test]
    fn the_worst_window_is_not_hidden_by_many_accesses_elsewhere() {
        let chased = |from: f64, accesses, mean_ns| Chased {
            span: Span {
                from,
                to: from + 0.1,
            },
            accesses,
            mean_ns,
            slowest_run_ns: mean_ns * 16.0,
        };
        let timeline = Timeline {
            chased: vec![chased(0.0, 1000.0, 1.0), chased(0.1, 10.0, 90.0)],
            written: Vec::new(),
        };
        let all = Span { from: 0.0, to: 1.0 };
        assert_eq!(timeline.worst_window_ns(all), Some(90.0));
        assert!(timeline.mean_ns(all).unwrap() < 2.0);
        let later = Span { from: 5.0, to: 6.0 };
        assert_eq!(timeline.mean_ns(later), None);
        assert_eq!(timeline.worst_window_ns(later), None);
    }
}
