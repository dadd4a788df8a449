//! Judges if a migration approaches its end, and names the obstacle if not.

use core::time::Duration;

use crate::controller::governor::tuning::obstacles::{
    LEAST_FIRST_ROUND_BYTES, MOST_TIMES_AGAIN, MOVES_BYTES, PERIOD, ROUND_SHRINKS_PART,
    ROUNDS_AS_LONG,
};
use crate::event::{Obstacle, PauseReason};
use crate::units::Time;

/// Achievement of a migration up to now.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::controller) struct Achievement {
    /// Bytes still to be sent in this pass.
    pub(in crate::controller) left: u64,
    /// Part of `left` to be sent by delayed writes.
    pub(in crate::controller) delayed: u64,
    /// Bytes of the guest's writes sent at once.
    pub(in crate::controller) double_writes: u64,
    /// Time spent in pauses.
    pub(in crate::controller) paused: Duration,
}

#[derive(Debug)]
pub(in crate::controller) struct Obstacles {
    next: Time,
    last: Achievement,
    /// Bytes per second that the migration may send, if bounded.
    bandwidth: Option<u64>,
    obstacle: Option<Obstacle>,
    /// Obstacle reported last.
    told: Option<Obstacle>,
    rounds: Rounds,
}

/// Rounds of a policy that sends again the blocks written meanwhile.
#[derive(Clone, Copy, Debug, Default)]
struct Rounds {
    /// Bytes of the first round, of the last round, and of all rounds after the first.
    first: Option<u64>,
    last: u64,
    again: u64,
    /// Consecutive rounds that were no shorter than their predecessor.
    as_long: u32,
}

impl Rounds {
    /// Begins a round over this many bytes.
    fn begin(&mut self, bytes: u64) {
        if self.first.is_none() {
            self.first = Some(bytes.max(LEAST_FIRST_ROUND_BYTES));
        } else {
            self.again = self.again.saturating_add(bytes);
            let shorter = bytes < self.last - self.last / ROUND_SHRINKS_PART;
            self.as_long = if shorter { 0 } else { self.as_long + 1 };
        }
        self.last = bytes;
    }

    /// Returns true if the rounds do not converge: each round is as long as its predecessor, or together the rounds
    /// have sent the first round's bytes [several times](MOST_TIMES_AGAIN) again.
    fn come_to_no_end(&self) -> bool {
        let much = self
            .first
            .is_some_and(|first| self.again >= first.saturating_mul(MOST_TIMES_AGAIN));
        self.as_long >= ROUNDS_AS_LONG || much
    }
}

impl Obstacles {
    pub(in crate::controller) fn new(now: Time, bandwidth: Option<u64>) -> Self {
        Self {
            next: now.after(PERIOD),
            last: Achievement {
                left: u64::MAX,
                ..Achievement::default()
            },
            bandwidth,
            obstacle: None,
            told: None,
            rounds: Rounds::default(),
        }
    }

    pub(in crate::controller) fn obstacle(&self) -> Option<Obstacle> {
        let rounds = self.rounds.come_to_no_end();
        self.obstacle.or(rounds.then_some(Obstacle::WriteRate))
    }

    /// Begins a round over `bytes`: the first copy, or the blocks written meanwhile.
    pub(in crate::controller) fn begin_round(&mut self, bytes: u64) {
        self.rounds.begin(bytes);
    }

    /// Forgets the rounds: a pass begins that ends in any case.
    pub(in crate::controller) fn forget_rounds(&mut self) {
        self.rounds = Rounds::default();
    }

    /// Begins a pass: the previous pass says nothing about this pass.
    pub(in crate::controller) fn restart(&mut self, now: Time) {
        *self = Self {
            obstacle: self.obstacle,
            told: self.told,
            rounds: self.rounds,
            ..Self::new(now, self.bandwidth)
        };
    }

    /// Notes that nothing is left to be sent; returns the changed obstacle.
    pub(in crate::controller) fn arrive(&mut self, now: Time) -> Option<Option<Obstacle>> {
        self.forget_rounds();
        self.restart(now);
        self.obstacle = None;
        self.tell()
    }

    /// Returns the obstacle if changed since the last report.
    fn tell(&mut self) -> Option<Option<Obstacle>> {
        let obstacle = self.obstacle();
        let changed = obstacle != self.told;
        self.told = obstacle;
        changed.then_some(obstacle)
    }

    /// Judges the last period once the period is over; returns the changed obstacle.
    pub(in crate::controller) fn judge(
        &mut self,
        now: Time,
        current: Achievement,
        last_pause: Option<PauseReason>,
        deadline: Option<Time>,
    ) -> Option<Option<Obstacle>> {
        if now < self.next {
            return None;
        }
        self.next = now.after(PERIOD);
        let last = core::mem::replace(&mut self.last, current);
        if last.left == u64::MAX {
            // The rounds may still show an obstacle.
            return self.tell();
        }
        let gained = last.left.saturating_sub(current.left);
        // A gain of a thousandth of the rest per period means more than an hour for the whole. A thousandth of a large
        // disk is a lot, so the required gain is capped. A requested bandwidth limit is not an obstacle.
        let rate = self
            .bandwidth
            .map_or(MOVES_BYTES, |limit| MOVES_BYTES.min(limit / 2));
        let enough = (last.left / 1000).min(rate.saturating_mul(PERIOD.as_secs()));
        let obstacle = if gained > enough {
            let periods_left = current.left / gained.max(1);
            let ends =
                now.after(PERIOD.saturating_mul(u32::try_from(periods_left).unwrap_or(u32::MAX)));
            deadline
                .is_some_and(|deadline| ends > deadline)
                .then_some(Obstacle::Deadline)
        } else if current.paused.saturating_sub(last.paused) * 2 > PERIOD
            && last_pause == Some(PauseReason::InterfaceBudget)
        {
            Some(Obstacle::InterfaceBudget)
        } else if current.delayed > last.delayed {
            Some(Obstacle::WriteRate)
        } else if self.guest_takes_all(current.double_writes.saturating_sub(last.double_writes)) {
            Some(Obstacle::Bandwidth)
        } else {
            Some(Obstacle::Promise)
        };
        self.obstacle = obstacle;
        self.tell()
    }

    /// Returns true if the guest's writes of a period leave almost nothing of the bandwidth.
    fn guest_takes_all(&self, double_writes: u64) -> bool {
        self.bandwidth.is_some_and(|limit| {
            u128::from(double_writes) * 10 >= u128::from(limit) * 9 * u128::from(PERIOD.as_secs())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASS: u64 = 1 << 30;

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    fn judge(
        obstacles: &mut Obstacles,
        seconds: u64,
        (left, delayed, paused): (u64, u64, u64),
        deadline: Option<Time>,
    ) -> Option<Option<Obstacle>> {
        let current = Achievement {
            left,
            delayed,
            paused: Duration::from_secs(paused),
            ..Achievement::default()
        };
        let reason = Some(PauseReason::GuestLatency);
        obstacles.judge(at(seconds), current, reason, deadline)
    }

    #[test]
    fn a_migration_that_stands_still_says_why_and_when_it_no_longer_does() {
        let mut it = Obstacles::new(at(0), None);
        assert_eq!(judge(&mut it, 3, (PASS, 0, 0), None), None, "too early");
        assert_eq!(judge(&mut it, 5, (PASS, 0, 0), None), None);
        let stands = judge(&mut it, 10, (PASS, 0, 1), None);
        assert_eq!(stands, Some(Some(Obstacle::Promise)));
        let drowns = judge(&mut it, 15, (PASS + 4096, 4096, 1), None);
        assert_eq!(drowns, Some(Some(Obstacle::WriteRate)));
        assert_eq!(
            judge(&mut it, 20, (PASS + 8192, 8192, 1), None),
            None,
            "no change"
        );
        assert_eq!(judge(&mut it, 25, (PASS / 2, 0, 1), None), Some(None));
    }

    #[test]
    fn rounds_that_grow_no_shorter_or_send_all_again_and_again_come_to_no_end() {
        let after = |rounds: &[u64]| {
            let mut it = Obstacles::new(at(0), None);
            for bytes in rounds {
                it.restart(at(0));
                it.begin_round(*bytes);
            }
            it.obstacle()
        };
        let never = Some(Obstacle::WriteRate);
        assert_eq!(after(&[PASS, PASS / 2, PASS / 4, PASS / 8]), None);
        assert_eq!(after(&[PASS, PASS / 2, PASS / 2]), None, "it may pass");
        assert_eq!(after(&[PASS, PASS / 2, PASS / 2, PASS / 2]), never);
        assert_eq!(after(&[PASS, PASS, PASS / 2, PASS]), never, "twice again");
        assert_eq!(
            after(&[4096, PASS, PASS / 2]),
            never,
            "what differed was little"
        );
        let mut it = Obstacles::new(at(0), None);
        for _ in 0..4 {
            it.begin_round(PASS);
        }
        it.arrive(at(9));
        assert_eq!(it.obstacle(), None, "nothing is left");
    }

    #[test]
    fn what_the_rounds_come_to_is_told_until_a_pass_begins_that_ends() {
        let mut it = Obstacles::new(at(0), None);
        for _ in 0..4 {
            it.restart(at(0));
            it.begin_round(PASS);
        }
        let never = Some(Some(Obstacle::WriteRate));
        assert_eq!(judge(&mut it, 5, (PASS, 0, 0), None), never);
        let gains = judge(&mut it, 10, (PASS / 2, 0, 0), None);
        assert_eq!(gains, None, "this round ends, and another follows");
        it.restart(at(11));
        it.forget_rounds();
        assert_eq!(it.obstacle(), None);
        assert_eq!(judge(&mut it, 16, (PASS / 2, 0, 0), None), Some(None));
    }

    #[test]
    fn a_large_disk_takes_its_time_without_an_obstacle() {
        const LEFT: u64 = 1000 << 40;
        let judged = |bandwidth, rate: u64| {
            let mut it = Obstacles::new(at(0), bandwidth);
            judge(&mut it, 5, (LEFT, 0, 0), None);
            judge(&mut it, 10, (LEFT - 5 * rate, 0, 0), None);
            it.obstacle()
        };
        assert_eq!(judged(None, 8 << 30), None);
        assert_eq!(judged(None, 1 << 20), Some(Obstacle::Promise));
        const LIMIT: u64 = 1 << 20;
        assert_eq!(
            judged(Some(LIMIT), LIMIT),
            None,
            "as slow as it was asked to be"
        );
        assert_eq!(judged(Some(LIMIT), LIMIT / 4), Some(Obstacle::Promise));
    }

    #[test]
    fn writes_that_take_all_the_bandwidth_are_an_obstacle_of_their_own() {
        let stands = |bandwidth, written: u64| {
            let mut it = Obstacles::new(at(0), bandwidth);
            for (second, double_writes) in [(5, 0), (10, written)] {
                let current = Achievement {
                    left: PASS,
                    double_writes,
                    ..Achievement::default()
                };
                it.judge(at(second), current, None, None);
            }
            it.obstacle()
        };
        const LIMIT: u64 = 4 << 20;
        assert_eq!(
            stands(Some(LIMIT), 5 * LIMIT),
            Some(Obstacle::Bandwidth),
            "as much as the migration may send in five seconds"
        );
        assert_eq!(stands(Some(LIMIT), 4 * LIMIT), Some(Obstacle::Promise));
        assert_eq!(stands(None, 5 * LIMIT), Some(Obstacle::Promise));
    }

    #[test]
    fn a_deadline_that_will_be_missed_is_an_obstacle() {
        let mut it = Obstacles::new(at(0), None);
        judge(&mut it, 5, (PASS, 0, 0), Some(at(30)));
        let slow = judge(&mut it, 10, (PASS / 10 * 9, 0, 0), Some(at(30)));
        assert_eq!(slow, Some(Some(Obstacle::Deadline)));
        let fast = judge(&mut it, 15, (PASS / 10, 0, 0), Some(at(30)));
        assert_eq!(fast, Some(None));
    }
}
