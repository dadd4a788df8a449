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
    let (obstacle, lasted) = facts.obstacle?;
    (lasted >= PATIENCE).then_some(Leave {
        push_for: time_left,
        why: Why::Obstacle(obstacle, lasted),
    })
}
