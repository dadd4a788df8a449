//! Whether the guest gets as much done as before the migration. A latency far below what was promised
//! can still be too long for a guest that waits for each answer before it asks for more.

use core::time::Duration;

use crate::units::Time;

/// How long answers are counted before they are judged.
const WINDOW: Duration = Duration::from_millis(100);

/// Less than this part of what it did before is too little.
const ENOUGH: f64 = 0.97;

/// Weight of the last window in the average.
const WEIGHT: f64 = 0.4;

/// A guest that does not do more although the migration has stepped back this long asks for no more.
const PATIENCE: Duration = Duration::from_secs(3);

/// A window in which the guest had too little.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shortage {
    /// The part of what it is owed that it did not get: more than 0, at most 1.
    pub(super) lacked: f64,
    /// Bytes per second that copies and delayed writes took meanwhile.
    pub(super) copied: u64,
}

/// Compares the guest's rate of requests with what it was.
#[derive(Debug)]
pub(super) struct Throughput {
    /// Requests per second that the guest is owed.
    reference: f64,
    average: f64,
    counted: u32,
    /// Bytes of copies and delayed writes in the window.
    copied: u64,
    window_began: Time,
    /// Since when it has had too little.
    short_since: Option<Time>,
}

impl Throughput {
    /// The guest did `reference` requests per second before.
    pub(super) fn new(reference: u64, now: Time) -> Self {
        Self {
            reference: reference as f64,
            average: reference as f64,
            counted: 0,
            copied: 0,
            window_began: now,
            short_since: None,
        }
    }

    /// The guest has had too little lately.
    pub(super) const fn is_short(&self) -> bool {
        self.short_since.is_some()
    }

    /// Adds answers, and bytes that copies and delayed writes took meanwhile. When a window ends with
    /// them in which the guest had too little: what it lacked.
    pub(super) fn count(&mut self, now: Time, answered: u32, copied: u64) -> Option<Shortage> {
        self.counted += answered;
        self.copied += copied;
        let elapsed = now.since(self.window_began);
        if elapsed < WINDOW {
            return None;
        }
        let rate = f64::from(self.counted) / elapsed.as_secs_f64();
        let copied = self.copied as f64 / elapsed.as_secs_f64();
        (self.counted, self.copied) = (0, 0);
        self.window_began = now;
        self.average += (rate - self.average) * WEIGHT;
        if self.average >= self.reference * ENOUGH {
            self.short_since = None;
            return None;
        }
        let since = *self.short_since.get_or_insert(now);
        if now.since(since) >= PATIENCE {
            self.reference = self.average;
            self.short_since = None;
        }
        // A guest that catches up after a stall needs no more room than it has.
        (rate < self.reference * ENOUGH).then(|| Shortage {
            lacked: 1.0 - rate / self.reference,
            copied: copied as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows that judged the guest to be short, of `windows` in which it did `rate` requests a
    /// second.
    fn short(it: &mut Throughput, from: u32, windows: u32, rate: u32) -> usize {
        (from..from + windows)
            .filter(|number| {
                it.count(Time(0).after(WINDOW * (number + 1)), rate / 10, 0)
                    .is_some()
            })
            .count()
    }

    #[test]
    fn a_guest_that_gets_less_done_is_noticed_and_one_that_does_not_is_left_alone() {
        let mut it = Throughput::new(10_000, Time(0));
        assert_eq!(short(&mut it, 0, 10, 10_000), 0);
        assert!(short(&mut it, 10, 10, 8_000) >= 9);
        assert!(it.is_short());
        assert_eq!(short(&mut it, 20, 20, 10_000), 0, "it catches up");
        assert!(!it.is_short());
    }

    #[test]
    fn what_is_lacked_and_what_copies_took_are_those_of_the_window() {
        let mut it = Throughput::new(10_000, Time(0));
        assert_eq!(it.count(Time(0).after(WINDOW / 2), 500, 7_000_000), None);
        let shortage = it.count(Time(0).after(WINDOW), 250, 3_000_000);
        let shortage = shortage.expect("three quarters are not enough");
        assert!((shortage.lacked - 0.25).abs() < 1e-9, "{shortage:?}");
        assert_eq!(shortage.copied, 100_000_000);
        let next = it.count(Time(0).after(WINDOW * 2), 500, 0);
        assert_eq!(next.map(|shortage| shortage.copied), Some(0));
    }

    #[test]
    fn a_guest_that_asks_for_less_by_itself_is_taken_at_its_word() {
        let mut it = Throughput::new(10_000, Time(0));
        assert!(short(&mut it, 0, 40, 2_000) >= 30);
        assert_eq!(short(&mut it, 40, 20, 2_000), 0);
    }
}
