//! What a move costs who asked for it, and when a move whose policy nobody chose is to go on otherwise.
//!
//! Pure, so that nodes and the simulator decide alike.

use core::time::Duration;

use crate::event::Obstacle;

/// How long something keeps a migration from its end before the policy changes: two judgements of the engine that
/// agree, and time for what passes by itself.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What a move costs who asked for it: what the choice of a policy is to keep small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// From the command until the source is needed no more.
    pub until_free: Duration,
    /// How long the guest depended on two nodes meanwhile: the loss of either stops it.
    pub on_two_nodes: Duration,
    /// How long the guest would have needed for the work that it did not get done because of the move.
    pub lost: Duration,
    /// How long after its deadline the disk changed hands.
    pub late: Duration,
}

impl Cost {
    /// A second after the deadline is as bad as so many without one: the host is to be left by then.
    pub const LATE_FACTOR: u32 = 10;

    /// The seconds until the source may go, those of lost work, once more those on two nodes, and those of
    /// lateness [`Self::LATE_FACTOR`] times.
    pub fn seconds(&self) -> f64 {
        let late = self.late * Self::LATE_FACTOR;
        (self.until_free + self.on_two_nodes + self.lost + late).as_secs_f64()
    }
}

/// What is known of a migration by double writes when its policy is thought over.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Since its start.
    pub elapsed: Duration,
    /// When it is to have handed the disk over, from its start.
    pub deadline: Option<Duration>,
    /// What keeps it from its end, and for how long.
    pub obstacle: Option<(Obstacle, Duration)>,
    /// How it went lately, where that is known.
    pub pace: Option<Pace>,
}

/// How a migration by double writes went over the last seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// For how long that was measured.
    pub measured: Duration,
    /// Bytes of data that still have to be copied: without holes, and without what the destination has of an older copy.
    pub left: u64,
    /// Bytes of data that have been copied.
    pub copied: u64,
    /// Bytes of copies sent per second.
    pub copies: f64,
    /// Bytes of the guest's writes sent per second.
    pub doubled: f64,
    /// Bytes that the guest wrote per second, wherever they went.
    pub written: f64,
}

/// The rates of less than this are a guess; while it is waited for, double writes are sent that may turn out to be in
/// vain.
const SHORTEST: Duration = Duration::from_secs(1);

/// With less of the data copied, nobody can tell how much of what the guest writes will have to be sent.
const LEAST_COPIED: f64 = 0.05;

/// What is left is gone through in so many steps when the rest of the copy is foreseen.
const STEPS: u32 = 64;

/// What pushing and then pulling costs at most, in the time in which the link takes what is left: what is written again
/// is pushed again, until it is left to be pulled, which counts twice. In the simulator it is 1.1 to 1.5 with every load
/// whose double writes would fill the link.
const PUSHED_AGAIN: f64 = 1.5;

/// A guest writes everywhere alike if so many times more or less of its writes than that had to be sent.
const ALIKE: f64 = 2.0;

impl Pace {
    /// Bytes per second that went to the other node.
    fn link(&self) -> f64 {
        self.copies + self.doubled
    }

    /// The part of the data that has been copied.
    fn part(&self) -> f64 {
        self.copied as f64 / (self.copied + self.left).max(1) as f64
    }

    /// What it costs to go on, in the time in which the link would take all of the data.
    ///
    /// The more has been copied, the more of the guest's writes are sent, until these and copies take a half each: from
    /// then on they wait for each other, and the guest gets less done.
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

    /// Whether what is pushed first would have been written again before all of it is pushed, wherever it is.
    fn pushes_in_vain(&self) -> bool {
        let expected = self.written * self.part();
        let alike = self.doubled > expected / ALIKE && self.doubled < expected * ALIKE;
        alike && self.written >= self.link()
    }

    /// Whether it costs less to leave.
    fn is_better_left(&self) -> bool {
        self.measured >= SHORTEST
            && self.link() >= 1.0
            && self.part() >= LEAST_COPIED
            && self.going_on() > PUSHED_AGAIN * (1.0 - self.part())
    }
}

/// That a migration is to leave with what is at the destination, and pull the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leave {
    /// How long it may go on pushing; without it, until nothing is left to push.
    pub push_for: Option<Duration>,
    /// Why.
    pub why: Why,
}

/// Why a migration is to leave with what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its deadline has come.
    Deadline,
    /// This has kept it from its end for so long.
    Obstacle(Obstacle, Duration),
    /// So many hundredths of what it sends are the guest's writes, and it would cost more to wait for its end.
    Writes(u8),
}

/// Whether a migration by double writes should leave with what is there.
///
/// Double writes need the source no more once the disk has changed hands, so a migration begins with them. What
/// keeps them from their end, or from being in time, keeps push and pull from nothing: the guest's writes go to one
/// node only. But the guest depends on two nodes until all has been pulled, so that is taken up only when it must be.
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

    /// A tenth has been copied, over a link of 100 MB/s, under a guest that writes so many hundredths of that, of which
    /// this part had to be sent.
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
        // All that it writes is sent already, and leaves room.
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
