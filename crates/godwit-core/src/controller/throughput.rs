//! Whether the guest gets as much done as before the migration. A latency far below what was promised
//! can still be too long for a guest that waits for each answer before it asks for more.
//!
//! A guest that takes whatever the machine has can only get less while its disk moves, however slowly
//! that goes: its double writes alone cost what its writes did. It loses least when that is soon over,
//! so it is owed a quarter of what it did, within the latency that it was promised.

use core::time::Duration;

use crate::units::Time;

/// How long answers are counted before they are judged.
const WINDOW: Duration = Duration::from_millis(100);

/// Less than this part of what it did before is too little.
const ENOUGH: f64 = 0.97;

/// The part of what it did before that a guest is owed that takes whatever there is: where all share
/// one machine, double writes take half of it, and copies may have half of the rest.
const OWED_IF_SATURATING: f64 = 0.25;

/// As many windows on end with too little, although copies hardly move, are no stall: after one of
/// those a guest catches up as soon as there is room. As many with enough tell that it was one.
const SATURATING: u32 = 4;

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

/// What the end of a window showed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Finding {
    /// The guest had too little.
    Short(Shortage),
    /// The guest takes whatever there is, and is owed less from now on.
    Saturates,
}

/// Compares the guest's rate of requests with what it was.
#[derive(Debug)]
pub(super) struct Throughput {
    /// Requests per second that the guest makes if nothing else goes on.
    reference: f64,
    /// The part of them that it is owed.
    owed: f64,
    /// Windows on end that speak against what it is owed: with too little although copies hardly
    /// moved, or with all that it did before although it is owed a part of it.
    against: u32,
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
            owed: 1.0,
            against: 0,
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

    /// Adds answers, and bytes that copies and delayed writes took meanwhile; `crawl` is the pace in
    /// bytes per second below which they do not go, if they are held to it. What a window showed that
    /// ends with them, if there is anything to it.
    pub(super) fn count(
        &mut self,
        now: Time,
        answered: u32,
        copied: u64,
        crawl: Option<u64>,
    ) -> Option<Finding> {
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
        let owed = self.reference * self.owed;
        let lacks = rate < owed * ENOUGH;
        let saturating = self.owed < 1.0;
        // Where a link or a pause holds copies back, the guest may wait for that, too.
        let crawls = crawl.is_some_and(|pace| copied * 2.0 >= pace as f64);
        let against = if saturating {
            rate >= self.reference * ENOUGH
        } else {
            lacks && crawls
        };
        self.against = if against { self.against + 1 } else { 0 };
        if self.against >= SATURATING {
            self.against = 0;
            self.short_since = None;
            self.owed = if saturating { 1.0 } else { OWED_IF_SATURATING };
            return (!saturating).then_some(Finding::Saturates);
        }
        if self.average >= owed * ENOUGH {
            self.short_since = None;
            return None;
        }
        let since = *self.short_since.get_or_insert(now);
        if now.since(since) >= PATIENCE {
            self.reference = self.average;
            self.owed = 1.0;
            self.short_since = None;
        }
        // A guest that catches up after a stall needs no more room than it has.
        lacks.then(|| {
            Finding::Short(Shortage {
                lacked: 1.0 - rate / owed,
                copied: copied as u64,
            })
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
                let now = Time(0).after(WINDOW * (number + 1));
                let finding = it.count(now, rate / 10, 0, None);
                matches!(finding, Some(Finding::Short(_)))
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

    fn lacked(finding: Option<Finding>) -> Shortage {
        match finding {
            Some(Finding::Short(shortage)) => shortage,
            other => panic!("not short, but {other:?}"),
        }
    }

    #[test]
    fn what_is_lacked_and_what_copies_took_are_those_of_the_window() {
        let mut it = Throughput::new(10_000, Time(0));
        let half = Time(0).after(WINDOW / 2);
        assert_eq!(it.count(half, 500, 7_000_000, None), None);
        let shortage = lacked(it.count(Time(0).after(WINDOW), 250, 3_000_000, None));
        assert!((shortage.lacked - 0.25).abs() < 1e-9, "{shortage:?}");
        assert_eq!(shortage.copied, 100_000_000);
        let next = lacked(it.count(Time(0).after(WINDOW * 2), 500, 0, None));
        assert_eq!(next.copied, 0);
    }

    const CRAWL: Option<u64> = Some(50_000_000);

    /// What so many windows show in which the guest does `rate` requests a second, copies go at 40
    /// MB/s, and perhaps no slower than `crawl`.
    fn findings(it: &mut Throughput, windows: u32, rate: u32, crawl: Option<u64>) -> Vec<Finding> {
        let began = it.window_began;
        let window = |number| {
            let now = began.after(WINDOW * number);
            it.count(now, rate / 10, 4_000_000, crawl)
        };
        (1..=windows).filter_map(window).collect()
    }

    #[test]
    fn a_guest_that_never_has_enough_is_owed_a_quarter_once_that_is_known() {
        let mut it = Throughput::new(10_000, Time(0));
        let found = findings(&mut it, SATURATING, 8_000, CRAWL);
        assert_eq!(found.last(), Some(&Finding::Saturates));
        assert!(!it.is_short());
        assert_eq!(findings(&mut it, 30, 2_500, None), []);
        let found = findings(&mut it, 5, 1_250, None);
        let shortage = lacked(found.last().copied());
        assert!((shortage.lacked - 0.5).abs() < 1e-9, "{shortage:?}");
    }

    #[test]
    fn a_guest_has_too_little_for_reasons_of_its_own_only_while_copies_crawl() {
        for crawl in [None, Some(90_000_000)] {
            let mut it = Throughput::new(10_000, Time(0));
            let found = findings(&mut it, SATURATING * 5, 8_000, crawl);
            assert!(!found.contains(&Finding::Saturates), "{crawl:?}");
        }
    }

    #[test]
    fn a_guest_that_has_enough_again_is_owed_all_of_it() {
        let mut it = Throughput::new(10_000, Time(0));
        findings(&mut it, SATURATING, 8_000, CRAWL);
        assert_eq!(findings(&mut it, SATURATING, 10_000, None), []);
        let found = findings(&mut it, 5, 8_000, None);
        let shortage = lacked(found.last().copied());
        assert!((shortage.lacked - 0.2).abs() < 1e-9, "{shortage:?}");
    }

    #[test]
    fn a_guest_that_catches_up_after_a_stall_is_still_owed_all_of_it() {
        let mut it = Throughput::new(10_000, Time(0));
        for _ in 0..5 {
            let stalled = findings(&mut it, SATURATING - 1, 1_000, CRAWL);
            assert!(!stalled.contains(&Finding::Saturates));
            findings(&mut it, 6, 16_000, CRAWL);
        }
        assert!(!findings(&mut it, 10, 9_000, None).is_empty());
    }

    #[test]
    fn a_guest_that_asks_for_less_by_itself_is_taken_at_its_word() {
        let mut it = Throughput::new(10_000, Time(0));
        assert!(short(&mut it, 0, 40, 2_000) >= 30);
        assert_eq!(short(&mut it, 40, 20, 2_000), 0);
    }
}
