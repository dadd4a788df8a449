//! Weighs slow copies against fast copies where slow copies do not spare the guest.
//!
//! Copies that step aside take longer. On a host whose processors are full the guest gets hardly more done in return:
//! each copied byte costs the guest the same at any pace. Once copies have gone slowly for [`HELD_BACK`] and the guest
//! still lacked something, copies hurry for a while: no rate holds them back, and the promise is eased as far as
//! allowed. Each pace is then judged by the cost of a byte ([`Cost`]).

use core::time::Duration;

use crate::auto::Cost;
use crate::controller::governor::tuning::haste::{
    FIRST_WAIT, HELD_BACK, LACKING_PART, LEAST_GAIN_FACTOR, LONGEST, SHORTEST, WINDOW,
};
use crate::units::Time;

/// The guest's losses and the copied bytes over some time.
#[derive(Clone, Copy, Debug, Default)]
struct Balance {
    elapsed: Duration,
    /// Time in which the guest would have done its lost work.
    lost: Duration,
    bytes: u64,
}

impl Balance {
    fn add(&mut self, elapsed: Duration, lost_part: f64, bytes: u64) {
        self.elapsed += elapsed;
        self.lost += elapsed.mul_f64(lost_part);
        self.bytes += bytes;
    }

    /// Halves the balance, so that the last few windows decide.
    fn fade(&mut self) {
        self.elapsed /= 2;
        self.lost /= 2;
        self.bytes /= 2;
    }

    /// Returns true if the guest lacked more than chance and short stalls explain.
    fn lacks(&self) -> bool {
        self.lost > self.elapsed.mul_f64(LACKING_PART)
    }

    /// Returns the cost of a byte in seconds: infinite if none was copied.
    fn per_byte(&self) -> f64 {
        let cost = Cost {
            until_free: self.elapsed,
            on_two_nodes: self.elapsed,
            lost: self.lost,
            late: Duration::ZERO,
        };
        cost.seconds() / self.bytes as f64
    }
}

/// The current pace and its balance so far.
#[derive(Clone, Copy, Debug)]
enum Pace {
    /// The guest is spared. The balance covers the last windows in which copies went slowly.
    Sparing { slowly: Balance, not_before: Time },
    /// Copies hurry; `sparing` is the balance to beat.
    Hurrying {
        since: Time,
        sparing: Balance,
        balance: Balance,
    },
}

/// Chooses between sparing the guest and hurrying.
#[derive(Debug)]
pub(in crate::controller) struct Haste {
    /// Requests per second of the guest if nothing else goes on.
    reference: f64,
    pace: Pace,
    /// Maximum bytes per second of copies in a window.
    fastest: f64,
    /// Time for which the guest is spared after a hurry without gain.
    wait: Duration,
    /// Maximum time of a gainful hurry before the guest is spared again for a new comparison.
    longest: Duration,
    /// The window under way.
    window: Window,
}

/// A window in which answers and copies are counted.
#[derive(Clone, Copy, Debug)]
struct Window {
    elapsed: Duration,
    counted_at: Time,
    answered: u32,
    bytes: u64,
    held_back: bool,
}

impl Window {
    const fn begin(now: Time) -> Self {
        Self {
            elapsed: Duration::ZERO,
            counted_at: now,
            answered: 0,
            bytes: 0,
            held_back: true,
        }
    }
}

impl Haste {
    /// Starts for a guest that makes `reference` requests per second if nothing else goes on.
    pub(in crate::controller) fn new(reference: u64, now: Time) -> Self {
        Self {
            reference: reference as f64,
            pace: Pace::Sparing {
                slowly: Balance::default(),
                not_before: now,
            },
            fastest: 0.0,
            wait: FIRST_WAIT,
            longest: LONGEST,
            window: Window::begin(now),
        }
    }

    /// Returns true while copies hurry.
    pub(in crate::controller) const fn hurries(&self) -> bool {
        matches!(self.pace, Pace::Hurrying { .. })
    }

    /// Skips time without requests or progress, which says nothing about a pace.
    pub(in crate::controller) const fn stood_still(&mut self, now: Time) {
        self.window.counted_at = now;
    }

    /// Adds the answers and the copied bytes of a sampling period in which copies were or were not held back for the
    /// guest's sake.
    pub(in crate::controller) fn count(
        &mut self,
        now: Time,
        answered: u32,
        bytes: u64,
        held_back: bool,
    ) {
        let window = &mut self.window;
        window.elapsed += now.since(window.counted_at);
        window.counted_at = now;
        window.answered += answered;
        window.bytes += bytes;
        window.held_back &= held_back;
        if window.elapsed >= WINDOW {
            let window = core::mem::replace(window, Window::begin(now));
            self.judge(now, &window);
        }
    }

    fn judge(&mut self, now: Time, window: &Window) {
        let due = self.reference * window.elapsed.as_secs_f64();
        let rate = window.bytes as f64 / window.elapsed.as_secs_f64();
        self.fastest = self.fastest.max(rate);
        // The guest was meant to have room then, whatever the reason for slow copies.
        let slow = window.held_back || rate < self.fastest / 2.0;
        let lost = (1.0 - f64::from(window.answered) / due.max(1.0)).clamp(0.0, 1.0);
        match &mut self.pace {
            Pace::Sparing { .. } if !slow => {}
            Pace::Sparing { slowly, not_before } => {
                slowly.add(window.elapsed, lost, window.bytes);
                if slowly.elapsed < HELD_BACK {
                    return;
                }
                if slowly.lacks() && *not_before <= now {
                    self.pace = Pace::Hurrying {
                        since: now,
                        sparing: *slowly,
                        balance: Balance::default(),
                    };
                } else {
                    slowly.fade();
                }
            }
            Pace::Hurrying {
                since,
                sparing,
                balance,
            } => {
                balance.add(window.elapsed, lost, window.bytes);
                if balance.elapsed < SHORTEST {
                    return;
                }
                let gains = balance.per_byte() * LEAST_GAIN_FACTOR < sparing.per_byte();
                let ends = now.since(*since) >= self.longest;
                if gains && balance.lacks() && !ends {
                    balance.fade();
                    return;
                }
                if gains {
                    self.wait = FIRST_WAIT;
                    if ends {
                        self.longest = self.longest.saturating_mul(2);
                    }
                }
                let wait = if gains { Duration::ZERO } else { self.wait };
                if !gains {
                    self.wait = self.wait.saturating_mul(2);
                }
                self.pace = Pace::Sparing {
                    slowly: Balance::default(),
                    not_before: now.after(wait),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(10);
    const REQUESTS: u64 = 10_000;
    const MEBIBYTE: f64 = 1_048_576.0;

    /// Returns the seconds of ten in which copies hurry, on a host where the guest keeps `keeps(rate)` of its requests
    /// while copies take `rate` MiB per second.
    fn hurries(slow: f64, fast: f64, keeps: impl Fn(f64) -> f64) -> f64 {
        let mut haste = Haste::new(REQUESTS, Time(0));
        let periods = 1000;
        let hurried = (1..=periods).filter(|number| {
            let hurries = haste.hurries();
            let rate = if hurries { fast } else { slow };
            let answered = REQUESTS as f64 * keeps(rate) * PERIOD.as_secs_f64();
            let bytes = rate * MEBIBYTE * PERIOD.as_secs_f64();
            let now = Time(0).after(PERIOD * *number);
            haste.count(now, answered.round() as u32, bytes as u64, !hurries);
            hurries
        });
        hurried.count() as f64 * PERIOD.as_secs_f64()
    }

    #[test]
    fn a_guest_that_loses_as_much_per_byte_at_any_pace_is_not_spared() {
        // Each MiB costs the guest 1.8 ms of work.
        let host = |rate: f64| (1.0 - rate * 0.0018).max(0.05);
        assert!(hurries(57.0, 386.0, host) > 7.0);
    }

    #[test]
    fn a_guest_that_keeps_its_work_while_copies_are_slow_is_spared() {
        let host = |rate: f64| if rate > 100.0 { 0.3 } else { 0.99 };
        assert!(hurries(57.0, 386.0, host) < 0.01);
    }

    #[test]
    fn copies_that_hurry_in_vain_go_slowly_again_and_wait_longer_each_time() {
        // The link takes no more, so hurrying only costs.
        let hurried = hurries(57.0, 60.0, |rate| if rate > 58.0 { 0.2 } else { 0.9 });
        assert!(hurried > 0.4 && hurried < 3.0, "{hurried}");
    }

    #[test]
    fn copies_that_go_fast_already_never_hurry() {
        let mut haste = Haste::new(REQUESTS, Time(0));
        for number in 1..=1000 {
            haste.count(Time(0).after(PERIOD * number), 10, 1 << 20, false);
            assert!(!haste.hurries());
        }
    }

    #[test]
    fn a_guest_that_asks_for_nothing_says_nothing_about_a_pace() {
        let mut haste = Haste::new(REQUESTS, Time(0));
        for number in 1..=1000 {
            haste.stood_still(Time(0).after(PERIOD * number));
            assert!(!haste.hurries());
        }
    }
}
