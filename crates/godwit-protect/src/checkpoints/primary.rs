//! The checkpoints of a primary: when to capture the next one, and what an acknowledgement releases.

use core::time::Duration;
use std::collections::VecDeque;

use crate::checkpoints::Checkpoint;

/// Most checkpoints that are captured and not acknowledged. With two, the guest runs the next epoch while the last
/// checkpoint travels; with more, packets would only wait longer.
const IN_FLIGHT: usize = 2;

/// The next step of a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Stop the guest, and capture this checkpoint.
    Capture(Checkpoint),
    /// Look again after this time.
    Wait(Duration),
    /// Look again after an acknowledgement.
    AwaitAcknowledgement,
}

/// An acknowledged checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The packets of this epoch and of earlier ones may leave.
    pub release: Checkpoint,
    /// Time from the capture to the acknowledgement.
    pub lag: Duration,
}

/// The checkpoints of a primary. All times are since one fixed moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Checkpoints {
    interval: Duration,
    last: Checkpoint,
    /// Time from which the next checkpoint is due.
    due: Duration,
    /// The captured checkpoints without an acknowledgement, and the times of their captures.
    in_flight: VecDeque<(Checkpoint, Duration)>,
}

impl Checkpoints {
    /// Starts a session: the first checkpoint is due now.
    pub const fn new(interval: Duration, now: Duration) -> Self {
        Self {
            interval,
            last: Checkpoint(0),
            due: now,
            in_flight: VecDeque::new(),
        }
    }

    /// Returns the next step.
    pub fn step(&self, now: Duration) -> Step {
        if self.in_flight.len() >= IN_FLIGHT {
            return Step::AwaitAcknowledgement;
        }
        match self.due.checked_sub(now) {
            Some(wait) if !wait.is_zero() => Step::Wait(wait),
            _ => Step::Capture(self.last.next()),
        }
    }

    /// Notes that the guest was stopped now for the checkpoint of the last [`Step::Capture`]. The next one is due an
    /// interval after this one was; a late one does not hasten its successors.
    pub fn captured(&mut self, now: Duration) -> Checkpoint {
        self.last = self.last.next();
        self.in_flight.push_back((self.last, now));
        self.due = self.due.max(now.saturating_sub(self.interval)) + self.interval;
        self.last
    }

    /// Takes the backup's acknowledgement of a checkpoint and of all before. Returns `None` for one that is not awaited.
    pub fn acknowledged(&mut self, number: Checkpoint, now: Duration) -> Option<Acknowledged> {
        let at = self
            .in_flight
            .iter()
            .position(|(captured, _)| *captured == number)?;
        let (release, captured) = self.in_flight.drain(..=at).next_back()?;
        Some(Acknowledged {
            release,
            lag: now.saturating_sub(captured),
        })
    }

    /// Returns the age of the oldest checkpoint without an acknowledgement.
    pub fn oldest(&self, now: Duration) -> Option<Duration> {
        let (_, captured) = self.in_flight.front()?;
        Some(now.saturating_sub(*captured))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(50);

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn checkpoints_keep_their_interval_however_long_a_capture_takes() {
        let mut primary = Checkpoints::new(EVERY, ms(0));
        assert_eq!(primary.step(ms(0)), Step::Capture(Checkpoint(1)));
        primary.captured(ms(3));
        assert_eq!(primary.step(ms(10)), Step::Wait(ms(40)));
        assert_eq!(primary.step(ms(50)), Step::Capture(Checkpoint(2)));
    }

    #[test]
    fn a_late_checkpoint_is_not_made_up_for_by_a_burst() {
        let mut primary = Checkpoints::new(EVERY, ms(0));
        primary.captured(ms(0));
        assert!(primary.acknowledged(Checkpoint(1), ms(400)).is_some());
        primary.captured(ms(400));
        assert!(primary.acknowledged(Checkpoint(2), ms(401)).is_some());
        assert_eq!(primary.step(ms(401)), Step::Capture(Checkpoint(3)));
        primary.captured(ms(402));
        assert_eq!(primary.step(ms(403)), Step::Wait(ms(47)));
    }

    #[test]
    fn a_slow_backup_lowers_the_frequency() {
        let mut primary = Checkpoints::new(EVERY, ms(0));
        primary.captured(ms(0));
        primary.captured(ms(50));
        assert_eq!(primary.step(ms(100)), Step::AwaitAcknowledgement);
        assert_eq!(primary.oldest(ms(120)), Some(ms(120)));
        let first = primary.acknowledged(Checkpoint(1), ms(120));
        let lag = ms(120);
        let release = Checkpoint(1);
        assert_eq!(first, Some(Acknowledged { release, lag }));
        assert_eq!(primary.step(ms(120)), Step::Capture(Checkpoint(3)));
    }

    #[test]
    fn an_acknowledgement_releases_earlier_epochs_as_well_and_counts_once() {
        let mut primary = Checkpoints::new(EVERY, ms(0));
        assert_eq!(primary.acknowledged(Checkpoint(1), ms(0)), None);
        primary.captured(ms(0));
        primary.captured(ms(50));
        let both = primary.acknowledged(Checkpoint(2), ms(60));
        assert_eq!(both.map(|it| it.release), Some(Checkpoint(2)));
        assert_eq!(primary.acknowledged(Checkpoint(1), ms(61)), None);
        assert_eq!(primary.acknowledged(Checkpoint(2), ms(61)), None);
        assert_eq!(primary.oldest(ms(61)), None);
    }
}
