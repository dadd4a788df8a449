//! Signs of life between the nodes of a protection: who counts as lost, and when.
//!
//! The primary sends pings, and the backup answers each. The backup takes the primary for lost after [`Timing::lost`]
//! without a ping. A ping that was answered had arrived after it was sent, so until the same time after its *sending*
//! the backup has not begun to take the machine. The primary has this time as a lease: [`Timing::lease`], which is
//! shorter, because two clocks differ and a machine needs time to stop. After the lease the guest stands still, so that
//! nobody reads from a machine that may run elsewhere.

use core::time::Duration;
use std::collections::VecDeque;

/// Most pings without an answer that are remembered.
const REMEMBERED: usize = 64;

/// The periods of a protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Time between two pings.
    pub every: Duration,
    /// Silence after which the other node counts as lost.
    pub lost: Duration,
}

impl Timing {
    /// Returns the periods for this time until a silent node counts as lost.
    pub fn of(lost: Duration) -> Self {
        let every = (lost / 6).min(Duration::from_millis(500));
        Self { every, lost }
    }

    /// Time after the sending of an answered ping for which the guest may run.
    pub fn lease(&self) -> Duration {
        self.lost / 3 * 2
    }
}

/// The state of the other node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The other node is there.
    Alive,
    /// Primary: the other node was silent for as long as the guest may run.
    Silent,
    /// The other node was silent for too long.
    Lost,
}

/// The pings of a primary. All times are since one fixed moment.
#[derive(Clone, Debug)]
pub struct Pings {
    timing: Timing,
    next: u64,
    sent: VecDeque<(u64, Duration)>,
    /// The time of sending of the latest answered ping.
    answered: Duration,
}

impl Pings {
    /// Starts with a backup that has just been heard.
    pub const fn new(timing: Timing, now: Duration) -> Self {
        Self {
            timing,
            next: 0,
            sent: VecDeque::new(),
            answered: now,
        }
    }

    /// Returns the number of a ping that is sent now.
    pub fn send(&mut self, now: Duration) -> u64 {
        let number = self.next;
        self.next += 1;
        if self.sent.len() == REMEMBERED {
            self.sent.pop_front();
        }
        self.sent.push_back((number, now));
        number
    }

    /// Takes the answer to a ping.
    pub fn answered(&mut self, number: u64) {
        let Some(at) = self.sent.iter().position(|(sent, _)| *sent == number) else {
            return;
        };
        for (_, sent) in self.sent.drain(..=at) {
            self.answered = self.answered.max(sent);
        }
    }

    /// Returns the time since the sending of the latest answered ping.
    pub const fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.answered)
    }

    /// Returns the state of the backup.
    pub fn sign(&self, now: Duration) -> Sign {
        let silent = self.silence(now);
        match silent {
            _ if silent >= self.timing.lost => Sign::Lost,
            _ if silent >= self.timing.lease() => Sign::Silent,
            _ => Sign::Alive,
        }
    }
}

/// The pings that a backup has heard.
#[derive(Clone, Copy, Debug)]
pub struct Heard {
    timing: Timing,
    last: Duration,
    /// The time of the last look.
    looked: Duration,
}

impl Heard {
    /// Starts with a primary that has just been heard.
    pub const fn new(timing: Timing, now: Duration) -> Self {
        Self {
            timing,
            last: now,
            looked: now,
        }
    }

    /// Notes a ping.
    pub fn ping(&mut self, now: Duration) {
        self.last = self.last.max(now);
    }

    /// Returns the state of the primary. To be called at least as often as pings come: after a longer time, the silence
    /// was that of this node, which stood still, and the primary may have gone on alone.
    pub fn sign(&mut self, now: Duration) -> Sign {
        if now.saturating_sub(self.looked) >= self.timing.lost / 2 {
            self.last = now;
        }
        self.looked = now;
        match now.saturating_sub(self.last) >= self.timing.lost {
            true => Sign::Lost,
            false => Sign::Alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_lease_counts_from_the_sending() {
        let timing = Timing::of(ms(3000));
        assert_eq!((timing.every, timing.lease()), (ms(500), ms(2000)));
        let mut pings = Pings::new(timing, ms(0));
        let (first, second) = (pings.send(ms(100)), pings.send(ms(600)));
        pings.answered(first);
        assert_eq!(pings.sign(ms(2099)), Sign::Alive);
        assert_eq!(pings.sign(ms(2100)), Sign::Silent);
        // A late answer renews the lease from the time of its ping.
        pings.answered(second);
        assert_eq!(pings.sign(ms(2599)), Sign::Alive);
        assert_eq!(pings.sign(ms(3599)), Sign::Silent);
        assert_eq!(pings.sign(ms(3600)), Sign::Lost);
    }

    #[test]
    fn answers_to_nothing_renew_nothing() {
        let mut pings = Pings::new(Timing::of(ms(3000)), ms(0));
        let first = pings.send(ms(500));
        let second = pings.send(ms(1000));
        pings.answered(second);
        for number in [first, second, 7] {
            pings.answered(number);
        }
        assert_eq!(pings.sign(ms(2999)), Sign::Alive);
        assert_eq!(pings.sign(ms(3000)), Sign::Silent);
    }

    #[test]
    fn a_backup_that_stood_still_itself_does_not_blame_the_primary() {
        let mut heard = Heard::new(Timing::of(ms(3000)), ms(0));
        assert_eq!(heard.sign(ms(1400)), Sign::Alive);
        assert_eq!(heard.sign(ms(9000)), Sign::Alive);
        let mut looks = (9100..20_000).step_by(100);
        let lost = looks.find(|now| heard.sign(ms(*now)) == Sign::Lost);
        assert_eq!(lost, Some(12_000));
    }

    /// Whatever the delays, the guest stands still before the backup begins to take the machine.
    #[test]
    fn the_guest_stands_still_before_the_backup_asks() {
        let timing = Timing::of(ms(3000));
        for there in [0, 10, 900, 1400] {
            let mut pings = Pings::new(timing, ms(0));
            let mut heard = Heard::new(timing, ms(0));
            for beat in 1..10 {
                let number = pings.send(ms(beat * 500));
                heard.ping(ms(beat * 500 + there));
                pings.answered(number);
                assert_eq!(heard.sign(ms(beat * 500 + there)), Sign::Alive);
            }
            for now in (4500 + there..12_000).step_by(10) {
                let takes = heard.sign(ms(now)) == Sign::Lost;
                let stands = pings.sign(ms(now)) != Sign::Alive;
                assert!(!takes || stands, "at {now} ms");
            }
        }
    }
}
