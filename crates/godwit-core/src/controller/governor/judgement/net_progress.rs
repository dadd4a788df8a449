//! Judges if a migration gains on a guest that writes at the rate of the path to the destination, or faster. Each pause
//! answers such a guest's writes at once and leaves more behind than was sent since the last pause, so the next pause
//! comes sooner. An implicit promise is not worth this cost: the promise is eased until the guest waits for the
//! destination now and then and pauses are few enough for copies to gain. An explicit promise is kept, but pauses stay
//! short and so leave less behind.

use crate::controller::governor::tuning::net_progress::{
    FALL_FACTOR, LEAST_GAIN_PART, MOST_FACTOR, RISE_FACTOR, WINDOW,
};
use crate::units::Time;

/// A migration's gain, window by window.
#[derive(Debug)]
pub(in crate::controller) struct NetProgress {
    factor: f64,
    began: Time,
    /// Bytes left when the window began; `None` before the first window.
    left: Option<u64>,
    /// Bytes written by the guest since then.
    written: u64,
    /// True if the migration ran at all, if only for a moment.
    went_on: bool,
}

impl NetProgress {
    /// Starts with a migration that has just begun.
    pub(in crate::controller) const fn new(now: Time) -> Self {
        Self {
            factor: 1.0,
            began: now,
            left: None,
            written: 0,
            went_on: false,
        }
    }

    /// Returns the factor by which the guest's requests may exceed the promise: 1 to 100.
    pub(in crate::controller) const fn factor(&self) -> f64 {
        self.factor
    }

    /// Returns true if copies gained too little lately, up to 23 s ago after a long loss. A shorter memory would undo
    /// each remedy at once.
    pub(in crate::controller) fn is_lost(&self) -> bool {
        self.factor > 1.0
    }

    /// Counts bytes written by the guest.
    #[inline]
    pub(in crate::controller) const fn written(&mut self, bytes: u64) {
        self.written += bytes;
    }

    /// Restarts the count of the bytes left: the previous count says nothing.
    pub(in crate::controller) const fn restart(&mut self) {
        self.left = None;
    }

    /// Ends a sampling period after which `left` bytes are left. A constantly paused migration is not judged: a silent
    /// destination is not worth waiting for.
    pub(in crate::controller) fn period_ends(&mut self, now: Time, left: u64, paused: bool) {
        self.went_on |= !paused;
        let Some(before) = self.left else {
            return self.begin(now, left);
        };
        let elapsed = now.since(self.began);
        if elapsed < WINDOW {
            return;
        }
        if self.went_on {
            // The bytes left at the end are the guest's latest writes.
            let ends = left <= self.written;
            let gains = before as f64 - left as f64 >= self.written as f64 * LEAST_GAIN_PART;
            let change = if gains || ends {
                FALL_FACTOR
            } else {
                RISE_FACTOR
            };
            self.factor = (self.factor * change).clamp(1.0, MOST_FACTOR);
            self.begin(now, left);
        } else {
            self.began = now;
        }
    }

    const fn begin(&mut self, now: Time, left: u64) {
        self.began = now;
        self.left = Some(left);
        self.written = 0;
        self.went_on = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEBIBYTE: u64 = 1 << 20;

    /// Returns the factor after windows that begin with 1 GiB left, in which the guest wrote 20 MiB each and copies
    /// gained `gained`.
    fn after(windows: u32, gained: i64, paused: bool) -> f64 {
        let mut net_progress = NetProgress::new(Time(0));
        let mut left = 1024 * MEBIBYTE;
        net_progress.period_ends(Time(0), left, false);
        net_progress.period_ends(Time(0).after(WINDOW), left - MEBIBYTE, false);
        for window in 2..windows + 2 {
            net_progress.written(20 * MEBIBYTE);
            left = left.saturating_add_signed(-gained);
            net_progress.period_ends(Time(0).after(WINDOW * window), left, paused);
        }
        net_progress.factor()
    }

    #[test]
    fn a_migration_that_does_not_gain_eases_the_promise() {
        let mebibytes = |gained: i64| gained * MEBIBYTE as i64;
        assert!(after(1, mebibytes(11), false) <= 1.0);
        assert!(after(1, mebibytes(9), false) > 1.4);
        assert!(after(4, mebibytes(-20), false) > 5.0);
        assert!(after(100, mebibytes(-20), false) <= MOST_FACTOR);
        assert!(after(100, mebibytes(-20), true) <= 1.0, "nothing answers");
    }

    #[test]
    fn one_that_has_arrived_need_not_gain() {
        let mut net_progress = NetProgress::new(Time(0));
        for window in 0..10 {
            net_progress.written(20 * MEBIBYTE);
            let left = u64::from(window % 2) * MEBIBYTE;
            net_progress.period_ends(Time(0).after(WINDOW * window), left, false);
        }
        assert!(net_progress.factor() <= 1.0);
    }

    #[test]
    fn the_promise_comes_back_once_it_gains() {
        let mut net_progress = NetProgress::new(Time(0));
        net_progress.factor = MOST_FACTOR;
        for window in 0..100 {
            let left = (200 - u64::from(window)) * MEBIBYTE;
            net_progress.period_ends(Time(0).after(WINDOW * window), left, false);
        }
        assert!(net_progress.factor() <= 1.0);
    }

    #[test]
    fn a_pass_that_begins_has_lost_nothing() {
        let mut net_progress = NetProgress::new(Time(0));
        net_progress.period_ends(Time(0), 10 * MEBIBYTE, false);
        net_progress.restart();
        net_progress.period_ends(Time(0).after(WINDOW), 1024 * MEBIBYTE, false);
        net_progress.period_ends(Time(0).after(WINDOW * 2), 1000 * MEBIBYTE, false);
        assert!(net_progress.factor() <= 1.0);
    }
}
