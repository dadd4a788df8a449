//! Compares the guest's throughput with its throughput before the migration. A latency far below the promise can still
//! be too long for a guest that waits for each answer before its next request.
//!
//! A closed loop takes as much as the machine gives. Such a guest can only get less while its disk moves, at any pace:
//! double writes alone cost as much as its own writes did. The guest loses least if the move is soon over, so a closed
//! loop is owed a part of its former rate, within the promised latency. Any other guest is owed its whole former rate:
//! if the guest has too little, the disk is in its way.

use core::time::Duration;

use crate::controller::governor::arrivals::{Arrivals, GuestLoad};
use crate::controller::governor::tuning::throughput::{
    CATCHING_UP_PART, CHANCE_REQUESTS, ENOUGH_AT_A_PACE_PART, ENOUGH_PART, PATIENCE, SLACK,
    WEIGHT_PART, WINDOW,
};
use crate::units::Time;

/// A guest that has had too little for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::controller) struct Shortage {
    /// Part of the owed requests that the guest did not get since the shortage began or was last found: more than 0, at
    /// most 1.
    pub(in crate::controller) lacked: f64,
    /// Bytes per second of copies and delayed writes in the last window.
    pub(in crate::controller) copied: u64,
}

/// Compares the guest's rate of requests with its former rate.
#[derive(Debug)]
pub(in crate::controller) struct Throughput {
    /// Requests per second owed to the guest, and the part of them that is enough.
    owed: f64,
    enough: f64,
    average: f64,
    counted: u32,
    /// Bytes of copies and delayed writes in the window.
    copied: u64,
    window_began: Time,
    /// Time at which answers were last counted.
    counted_at: Time,
    /// Requests missed and not made up for.
    missed: f64,
    /// Missed requests that were held against copies already.
    found: f64,
    /// Requests owed and requests done since the guest last had missed none or was last found short.
    due: f64,
    done: f64,
    /// Start of the current shortage.
    short_since: Option<Time>,
}

impl Throughput {
    /// Starts with the guest's load `before` as its reference.
    pub(in crate::controller) fn new(before: GuestLoad, now: Time) -> Self {
        let former = before.per_second as f64;
        let (owed, enough) = match before.arrivals {
            Arrivals::OpenLoop => (former, ENOUGH_AT_A_PACE_PART),
            Arrivals::ClosedLoop => (
                former / f64::from(GuestLoad::CLOSED_LOOP_PARTS),
                ENOUGH_PART,
            ),
            Arrivals::Unknown => (former, ENOUGH_PART),
        };
        Self {
            owed,
            enough,
            average: former,
            counted: 0,
            copied: 0,
            window_began: now,
            counted_at: now,
            missed: 0.0,
            found: 0.0,
            due: 0.0,
            done: 0.0,
            short_since: None,
        }
    }

    /// Returns true if the guest has had too little lately.
    pub(in crate::controller) const fn is_short(&self) -> bool {
        self.short_since.is_some()
    }

    /// Returns true if the guest has missed requests and not caught up yet.
    pub(in crate::controller) const fn lags(&self) -> bool {
        self.missed > 0.0
    }

    /// Skips time in which neither a request was answered nor a chunk: both waited for the disk, or the guest sent no
    /// request.
    pub(in crate::controller) fn stood_still(&mut self, now: Time) {
        self.window_began = self.window_began.after(now.since(self.counted_at));
        self.counted_at = now;
    }

    /// Adds answers, and bytes of copies and delayed writes in the same time. Returns a shortage that is found in a
    /// window that ends with these answers.
    pub(in crate::controller) fn count(
        &mut self,
        now: Time,
        answered: u32,
        copied: u64,
    ) -> Option<Shortage> {
        self.counted_at = now;
        self.counted += answered;
        self.copied += copied;
        let elapsed = now.since(self.window_began);
        if elapsed < WINDOW {
            return None;
        }
        self.window_began = now;
        let done = f64::from(core::mem::take(&mut self.counted));
        let copied = core::mem::take(&mut self.copied) as f64 / elapsed.as_secs_f64();
        self.judge(now, elapsed, done, copied as u64)
    }

    fn judge(&mut self, now: Time, elapsed: Duration, done: f64, copied: u64) -> Option<Shortage> {
        let seconds = elapsed.as_secs_f64();
        self.average += (done / seconds - self.average) * WEIGHT_PART;
        let due = self.owed * seconds;
        // Requests that were held against copies already do not count as missed by this shortage.
        if self.missed <= self.found {
            (self.due, self.done) = (0.0, 0.0);
        }
        self.due += due;
        self.done += done;
        self.missed = (self.missed + due * self.enough - done).max(0.0);
        self.found = self.found.min(self.missed);
        let short = self.owed * SLACK.as_secs_f64() + CHANCE_REQUESTS;
        let lacks = done < due * self.enough;
        // A guest with enough throughput and no further requests will not catch up.
        let catches_up = lacks || done > due * CATCHING_UP_PART;
        let makes_up = self.is_short() && catches_up && self.missed >= short / 8.0;
        if self.missed - self.found < short / 2.0 && !makes_up {
            self.missed -= self.found;
            (self.short_since, self.found) = (None, 0.0);
            return None;
        }
        let since = *self.short_since.get_or_insert(now);
        // A guest that catches up after a stall needs no more room.
        let finding = (lacks && self.missed - self.found >= short).then(|| Shortage {
            lacked: 1.0 - self.done / self.due,
            copied,
        });
        if finding.is_some() {
            // The effect of this finding has to show before the next finding.
            self.found = self.missed - short / 2.0;
            (self.due, self.done) = (0.0, 0.0);
        }
        if now.since(since) >= PATIENCE {
            // During a catch-up a guest exceeds its lasting rate.
            self.owed = self.owed.min(self.average);
            (self.missed, self.found, self.short_since) = (0.0, 0.0, None);
        }
        finding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(per_second: u64, arrivals: Arrivals) -> Throughput {
        let before = GuestLoad {
            per_second,
            arrivals,
        };
        Throughput::new(before, Time(0))
    }

    fn unknown(per_second: u64) -> Throughput {
        guest(per_second, Arrivals::Unknown)
    }

    /// Returns the windows with a shortage, of `windows` in which the guest made `rate` requests a second.
    fn short(it: &mut Throughput, from: u32, windows: u32, rate: u32) -> usize {
        (from..from + windows)
            .filter(|number| {
                let now = Time(0).after(WINDOW * (number + 1));
                it.count(now, rate / 10, 0).is_some()
            })
            .count()
    }

    #[test]
    fn a_guest_that_gets_less_done_is_noticed_and_one_that_does_not_is_left_alone() {
        let mut it = unknown(10_000);
        assert_eq!(short(&mut it, 0, 10, 10_000), 0);
        assert!(short(&mut it, 10, 10, 8_000) >= 4);
        assert!(it.is_short());
        assert_eq!(short(&mut it, 20, 20, 10_000), 0, "it catches up");
        assert!(!it.is_short());
    }

    #[test]
    fn a_guest_that_makes_up_for_a_moment_has_missed_nothing() {
        let mut it = unknown(10_000);
        for number in 0..100 {
            assert_eq!(
                short(&mut it, number * 3, 1, 8_000),
                0,
                "it stood still for 20 ms"
            );
            assert_eq!(short(&mut it, number * 3 + 1, 1, 12_000), 0);
            assert_eq!(short(&mut it, number * 3 + 2, 1, 10_000), 0);
            assert!(!it.is_short());
        }
    }

    #[test]
    fn a_guest_is_short_until_it_has_made_up_for_all_that_it_missed() {
        let mut it = guest(10_000, Arrivals::OpenLoop);
        assert_eq!(short(&mut it, 0, 4, 8_000), 3, "720 are missed");
        for window in 4..7 {
            assert_eq!(short(&mut it, window, 1, 12_000), 0);
            assert!(it.is_short() && it.lags(), "window {window}");
        }
        assert_eq!(short(&mut it, 7, 1, 12_000), 0);
        assert!(!it.is_short() && !it.lags());
        assert_eq!(short(&mut it, 8, 4, 8_000), 3);
        assert_eq!(short(&mut it, 12, 1, 10_000), 0);
        assert!(!it.is_short(), "it does not make up for anything");
        assert_eq!(short(&mut it, 13, 8, 10_000), 0);
        assert!(!it.lags(), "nor is it waited for");
    }

    #[test]
    fn what_a_guest_missed_before_it_was_short_is_made_up_for_too() {
        let mut it = guest(10_000, Arrivals::OpenLoop);
        assert_eq!(short(&mut it, 0, 1, 9_000), 0);
        assert!(!it.is_short(), "80 are not many");
        assert_eq!(short(&mut it, 1, 1, 8_000), 1, "260 are missed");
        assert_eq!(short(&mut it, 2, 1, 12_000), 0);
        assert!(it.is_short(), "40 are left");
    }

    #[test]
    fn a_guest_that_catches_up_for_long_is_not_owed_more_afterwards() {
        let mut it = guest(10_000, Arrivals::OpenLoop);
        assert!(short(&mut it, 0, 20, 5_000) > 0);
        assert_eq!(short(&mut it, 20, 60, 11_000), 0);
        assert_eq!(short(&mut it, 80, 60, 10_000), 0);
        assert!(!it.is_short());
        assert!(short(&mut it, 140, 10, 9_000) > 0, "it is owed as much");
    }

    #[test]
    fn a_guest_that_sets_its_own_pace_is_short_of_less() {
        for (arrivals, expected) in [(Arrivals::OpenLoop, true), (Arrivals::Unknown, false)] {
            let mut it = guest(10_000, arrivals);
            assert_eq!(short(&mut it, 0, 40, 9_720) > 0, expected, "{arrivals:?}");
        }
    }

    #[test]
    fn time_in_which_everything_stood_still_does_not_count() {
        let mut it = unknown(10_000);
        let tenth = WINDOW / 10;
        for number in 1..=100 {
            let now = Time(0).after(tenth * number);
            if number % 20 < 12 {
                it.stood_still(now);
            } else {
                assert_eq!(it.count(now, 100, 1000), None, "{number}");
            }
            assert!(!it.is_short());
        }
    }

    #[test]
    fn chance_is_no_shortage_however_few_requests_there_are() {
        for rate in [200, 600, 5_000, 50_000] {
            let mut it = unknown(rate);
            let mut random = 1_u64;
            let expected = rate as f64 / 10.0;
            let found = (0..10_000)
                .filter(|window| {
                    // Twelve uniform numbers approximate a normal one.
                    let mut normal = -6.0;
                    for _ in 0..12 {
                        random = random
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1);
                        normal += (random >> 40) as f64 / f64::from(1 << 24);
                    }
                    let answered = (expected + normal * expected.sqrt()).max(0.0) as u32;
                    let now = Time(0).after(WINDOW * (window + 1));
                    it.count(now, answered, 1).is_some()
                })
                .count();
            assert!(
                found <= 10,
                "{found} of 10,000 windows at {rate} requests a second"
            );
        }
    }

    #[test]
    fn a_guest_with_few_requests_that_gets_fewer_is_noticed_a_little_later() {
        let mut it = unknown(600);
        assert_eq!(short(&mut it, 0, 3, 400), 0);
        assert!(short(&mut it, 3, 17, 400) >= 3);
    }

    #[test]
    fn what_is_lacked_counts_since_it_began_and_what_copies_took_is_that_of_the_window() {
        let mut it = unknown(10_000);
        let half = Time(0).after(WINDOW / 2);
        assert_eq!(it.count(half, 500, 7_000_000), None);
        assert_eq!(it.count(Time(0).after(WINDOW), 400, 3_000_000), None);
        let shortage = it
            .count(Time(0).after(WINDOW * 2), 600, 10_000_000)
            .expect("a shortage");
        assert!((shortage.lacked - 0.25).abs() < 1e-9, "{shortage:?}");
        assert_eq!(shortage.copied, 100_000_000);
        let next = it
            .count(Time(0).after(WINDOW * 3), 500, 0)
            .expect("a shortage");
        assert!((next.lacked - 0.5).abs() < 1e-9, "{next:?}");
        assert_eq!(next.copied, 0);
    }

    #[test]
    fn a_shortage_after_a_catch_up_is_measured_from_its_own_beginning() {
        let mut it = guest(10_000, Arrivals::OpenLoop);
        let mut window = 0;
        let mut count = |answered| {
            window += 1;
            it.count(Time(0).after(WINDOW * window), answered, 0)
        };
        assert!(count(500).is_some());
        for _ in 0..4 {
            assert_eq!(count(1030), None);
        }
        let shortage = count(700).expect("a shortage");
        assert!((shortage.lacked - 0.3).abs() < 1e-9, "{shortage:?}");
    }

    /// Returns the shortages in `windows` in which the guest makes `rate` requests a second.
    fn shortages(it: &mut Throughput, windows: u32, rate: u32) -> Vec<Shortage> {
        let began = it.window_began;
        let window = |number| it.count(began.after(WINDOW * number), rate / 10, 4_000_000);
        (1..=windows).filter_map(window).collect()
    }

    #[test]
    fn a_closed_loop_is_owed_a_sixteenth_however_much_it_gets() {
        let mut it = guest(10_000, Arrivals::ClosedLoop);
        for rate in [650, 10_000, 650] {
            assert_eq!(shortages(&mut it, 30, rate), [], "{rate}");
        }
        let found = shortages(&mut it, 10, 310);
        let lacked = found.last().expect("a shortage").lacked;
        assert!((lacked - 0.5).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn a_guest_that_catches_up_after_stalls_is_owed_all_of_its_rate() {
        for arrivals in [Arrivals::OpenLoop, Arrivals::Unknown] {
            let mut it = guest(10_000, arrivals);
            for _ in 0..5 {
                shortages(&mut it, 3, 1_000);
                shortages(&mut it, 6, 16_000);
            }
            assert!(!shortages(&mut it, 10, 9_000).is_empty(), "{arrivals:?}");
        }
    }

    #[test]
    fn a_guest_that_asks_for_less_by_itself_is_taken_at_its_word() {
        let mut it = unknown(10_000);
        assert!(short(&mut it, 0, 40, 2_000) >= 30);
        assert_eq!(short(&mut it, 40, 20, 2_000), 0);
    }
}
