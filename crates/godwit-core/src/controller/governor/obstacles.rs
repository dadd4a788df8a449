//! Whether a migration comes nearer to its end, and what keeps it when it does not.

use core::time::Duration;

use crate::controller::governor::tuning::obstacles::{MOVES_BYTES, PERIOD};
use crate::event::{Obstacle, PauseReason};
use crate::units::Time;

/// What a migration has achieved up to now.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::controller) struct Achievement {
    /// Bytes that still have to be sent in this pass.
    pub(in crate::controller) left: u64,
    /// Those of them that delayed writes have to bring.
    pub(in crate::controller) delayed: u64,
    /// Bytes of the guest's writes that were sent at once.
    pub(in crate::controller) double_writes: u64,
    /// Time spent in pauses.
    pub(in crate::controller) paused: Duration,
}

#[derive(Debug)]
pub(in crate::controller) struct Obstacles {
    next: Time,
    last: Achievement,
    /// Bytes per second that the migration may send, if that is limited.
    bandwidth: Option<u64>,
    obstacle: Option<Obstacle>,
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
        }
    }

    pub(in crate::controller) const fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle
    }

    /// A pass begins: what was left of the last one says nothing about it.
    pub(in crate::controller) fn restart(&mut self, now: Time) {
        *self = Self {
            obstacle: self.obstacle,
            ..Self::new(now, self.bandwidth)
        };
    }

    /// Nothing is left to be sent; returns what has changed.
    pub(in crate::controller) fn arrive(&mut self, now: Time) -> Option<Option<Obstacle>> {
        self.restart(now);
        self.obstacle.take().map(|_| None)
    }

    /// Judges the last period when it is over, and returns what has changed.
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
            return None;
        }
        let gained = last.left.saturating_sub(current.left);
        // A thousandth of what is left in a period is more than an hour for the whole. Of a large disk
        // that is much, and a limit that was asked for keeps nothing from its end.
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
        let changed = obstacle != self.obstacle;
        self.obstacle = obstacle;
        changed.then_some(obstacle)
    }

    /// Whether what the guest wrote in a period leaves next to nothing of the bandwidth.
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
