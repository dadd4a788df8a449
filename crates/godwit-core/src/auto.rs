//! The cost of a move to its operator, and the conditions under which a move without a named policy changes its policy.
//!
//! Pure, so that nodes and the simulator decide alike.

use core::time::Duration;

use crate::event::Obstacle;

/// Time an obstacle must last before the policy changes: two agreeing judgements of the engine, and time for a passing
/// obstacle to end.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The cost of a move to its operator, to be kept small by the choice of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Time from the command until the source is no longer needed.
    pub until_free: Duration,
    /// Time during which the guest depended on two nodes: the loss of either node stops the guest.
    pub on_two_nodes: Duration,
    /// Time the guest would have needed for the work lost because of the move.
    pub lost: Duration,
    /// Delay of the switchover beyond the deadline.
    pub late: Duration,
}

impl Cost {
    /// Weight of a second beyond the deadline, in ordinary seconds: the host is to be vacated by the deadline.
    pub const LATE_FACTOR: u32 = 10;

    /// Returns the seconds until the source may go, plus the seconds of lost work, plus the seconds on two nodes once
    /// more, plus the seconds of lateness [`Self::LATE_FACTOR`] times.
    pub fn seconds(&self) -> f64 {
        let late = self.late * Self::LATE_FACTOR;
        (self.until_free + self.on_two_nodes + self.lost + late).as_secs_f64()
    }
}

/// Facts about a migration by double writes on which its policy is reconsidered.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Time since the start.
    pub elapsed: Duration,
    /// Time from the start by which the disk is to be handed over.
    pub deadline: Option<Duration>,
    /// The obstacle between the migration and its end, and the time the obstacle has lasted.
    pub obstacle: Option<(Obstacle, Duration)>,
    /// Recent progress, where known.
    pub pace: Option<Pace>,
}

/// Progress of a migration by double writes over the last seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Time over which the progress was measured.
    pub measured: Duration,
    /// Bytes of data still to be copied, without holes and without data that the destination has in an older copy.
    pub left: u64,
    /// Bytes of data copied.
    pub copied: u64,
    /// Bytes of copies sent per second.
    pub copies: f64,
    /// Bytes of the guest's writes sent per second.
    pub doubled: f64,
    /// Bytes written by the guest per second, to either node.
    pub written: f64,
}

/// Minimum measurement. Rates over a shorter time are a guess. Double writes sent during the measurement may turn out
/// to be in vain.
const SHORTEST: Duration = Duration::from_secs(1);

/// Minimum part of the data copied. With a smaller part the share of the guest's writes to be sent is unknown.
const LEAST_COPIED: f64 = 0.05;

/// Steps in which the rest of the copy is simulated.
const STEPS: u32 = 64;

/// Upper bound on the cost of pushing and then pulling, relative to the time in which the link takes the rest.
/// Rewritten data is pushed again until the data is left to be pulled, which counts twice. In the simulator the factor
/// is 1.1 to 1.5 for every load whose double writes would fill the link.
const PUSHED_AGAIN: f64 = 1.5;

/// A guest's writes count as uniform if the writes sent differ from the expected writes by less than this factor.
const ALIKE: f64 = 2.0;

impl Pace {
    /// Bytes per second sent to the other node.
    fn link(&self) -> f64 {
        self.copies + self.doubled
    }

    /// The copied part of the data.
    fn part(&self) -> f64 {
        self.copied as f64 / (self.copied + self.left).max(1) as f64
    }

    /// Cost of going on, relative to the time in which the link would take all of the data.
    ///
    /// The more has been copied, the more of the guest's writes are sent. Once double writes and copies take half of
    /// the link each, they wait for each other and the guest gets less done.
    fn going_on(&self) -> f64 {
        let part = self.part();
        let step = (1.0 - part) / f64::from(STEPS);
        let steps = (0..STEPS).map(|number| {
            let copied = (f64::from(number) + 0.5).mul_add(step, part);
            let doubled = (self.doubled * copied / part).min(self.written) / self.link();
            let lost = if doubled > 0.5 {
                1.0 - 0.5 / doubled
            } else {
                0.0
            };
            step / (1.0 - doubled.min(0.5)) * (1.0 + lost)
        });
        steps.sum()
    }

    /// Returns true if the data pushed first would be written again before the push ends, wherever the data lies.
    fn pushes_in_vain(&self) -> bool {
        let expected = self.written * self.part();
        let alike = self.doubled > expected / ALIKE && self.doubled < expected * ALIKE;
        alike && self.written >= self.link()
    }

    /// Returns true if leaving now costs less than going on.
    fn is_better_left(&self) -> bool {
        self.measured >= SHORTEST
            && self.link() >= 1.0
            && self.part() >= LEAST_COPIED
            && self.going_on() > PUSHED_AGAIN * (1.0 - self.part())
    }
}

/// The decision to leave with the data at the destination and to pull the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leave {
    /// Time left for pushing; `None` to push until nothing is left.
    pub push_for: Option<Duration>,
    /// Reason for the decision.
    pub why: Why,
}

/// Reason to leave with the data at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The deadline has come.
    Deadline,
    /// The obstacle has blocked the migration for this long.
    Obstacle(Obstacle, Duration),
    /// This percentage of the sent bytes are the guest's writes, and waiting for the end would cost more.
    Writes(u8),
}

/// Decides if a migration by double writes should leave with the data at the destination.
///
/// Double writes leave the source unneeded after the switchover, so a migration begins with double writes. An obstacle
/// to double writes, or to their deadline, does not hold up push and pull: the guest's writes go to one node only. But
/// the guest depends on two nodes until everything has been pulled, so push and pull is the last resort.
pub fn reconsider(facts: &Facts) -> Option<Leave> {
    let time_left = facts
        .deadline
        .map(|deadline| deadline.saturating_sub(facts.elapsed));
    if time_left == Some(Duration::ZERO) {
        return Some(Leave {
            push_for: Some(Duration::ZERO),
            why: Why::Deadline,
        });
    }
    if let Some((obstacle, lasted)) = facts.obstacle
        && lasted >= PATIENCE
    {
        return Some(Leave {
            push_for: time_left,
            why: Why::Obstacle(obstacle, lasted),
        });
    }
    let pace = facts.pace.filter(Pace::is_better_left)?;
    Some(Leave {
        push_for: match pace.pushes_in_vain() {
            true => Some(Duration::ZERO),
            false => time_left,
        },
        why: Why::Writes((pace.doubled / pace.link() * 100.0) as u8),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const NOTHING: Facts = Facts {
        elapsed: Duration::from_secs(3600),
        deadline: None,
        obstacle: None,
        pace: None,
    };

    /// A tenth of the disk has been copied over a link of 100 MB/s. The guest writes `hundredths` percent of the link's
    /// rate, and the part `sent` of these writes had to be sent.
    fn writing(hundredths: f64, sent: f64) -> Facts {
        let written = hundredths * 1e6;
        let doubled = (written * sent).min(9e7);
        Facts {
            pace: Some(Pace {
                measured: 3 * SECOND,
                left: 9_000_000_000,
                copied: 1_000_000_000,
                copies: 1e8 - doubled,
                doubled,
                written,
            }),
            ..NOTHING
        }
    }

    #[test]
    fn a_move_that_comes_to_its_end_goes_on_however_long_it_takes() {
        assert_eq!(reconsider(&NOTHING), None);
        let in_time = Facts {
            deadline: Some(3601 * SECOND),
            ..NOTHING
        };
        assert_eq!(reconsider(&in_time), None);
    }

    #[test]
    fn at_its_deadline_a_move_leaves_with_what_is_there() {
        let late = Facts {
            deadline: Some(3600 * SECOND),
            ..NOTHING
        };
        let leave = reconsider(&late).expect("it leaves");
        assert_eq!(leave.push_for, Some(Duration::ZERO));
        assert_eq!(leave.why, Why::Deadline);
    }

    #[test]
    fn a_move_that_would_never_end_goes_on_by_push_and_pull() {
        let stuck = |lasts| Facts {
            obstacle: Some((Obstacle::Bandwidth, lasts)),
            ..NOTHING
        };
        assert_eq!(reconsider(&stuck(PATIENCE - SECOND)), None, "it may pass");
        let leave = reconsider(&stuck(PATIENCE)).expect("it leaves");
        assert_eq!(leave.push_for, None, "what is cold is pushed first");
        assert_eq!(leave.why, Why::Obstacle(Obstacle::Bandwidth, PATIENCE));
        let pressed = Facts {
            deadline: Some(3610 * SECOND),
            ..stuck(PATIENCE)
        };
        let leave = reconsider(&pressed).expect("it leaves");
        assert_eq!(leave.push_for, Some(10 * SECOND));
    }

    #[test]
    fn it_leaves_a_guest_whose_writes_would_fill_the_link() {
        for few in [0.0, 10.0, 40.0] {
            assert_eq!(reconsider(&writing(few, 0.1)), None, "{few} %");
        }
        let push_for = |facts| reconsider(&facts).map(|leave| leave.push_for);
        assert_eq!(push_for(writing(80.0, 0.1)), Some(None));
        for many in [150.0, 400.0] {
            let at_once = Some(Some(Duration::ZERO));
            assert_eq!(push_for(writing(many, 0.1)), at_once, "{many} %");
        }
    }

    #[test]
    fn what_a_writer_of_few_places_leaves_alone_is_pushed_first() {
        let leave = reconsider(&writing(150.0, 0.5)).expect("it leaves");
        assert_eq!(leave.push_for, None);
        assert_eq!(leave.why, Why::Writes(75));
        // All of the guest's writes are sent already and leave room.
        assert_eq!(reconsider(&writing(20.0, 1.0)), None);
    }

    #[test]
    fn what_was_measured_too_shortly_or_near_the_start_says_nothing() {
        let facts = writing(150.0, 0.1);
        let with = |change: fn(&mut Pace)| {
            let mut pace = facts.pace.expect("it has one");
            change(&mut pace);
            Facts {
                pace: Some(pace),
                ..facts
            }
        };
        assert!(reconsider(&facts).is_some());
        assert_eq!(reconsider(&with(|pace| pace.measured = SECOND / 2)), None);
        assert_eq!(reconsider(&with(|pace| pace.copied = 10_000_000)), None);
        let nothing_sent = with(|pace| (pace.copies, pace.doubled) = (0.0, 0.0));
        assert_eq!(reconsider(&nothing_sent), None);
    }

    #[test]
    fn what_a_move_costs_is_time_work_and_risk() {
        let cost = Cost {
            until_free: 10 * SECOND,
            on_two_nodes: 4 * SECOND,
            lost: SECOND,
            late: 2 * SECOND,
        };
        assert!((cost.seconds() - 35.0).abs() < 1e-9);
    }
}
