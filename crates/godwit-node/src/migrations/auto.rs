//! Chooses a migration's policy where nobody did, and another one when that comes to no end.
//!
//! Double writes need the source no more once the disk has changed hands, so a migration begins with them. What
//! keeps them from their end, or from being in time, keeps push and pull from nothing: the guest's writes go to one
//! node only. But the guest depends on two nodes until all has been pulled, so that is taken up only when it must be.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::Bytes;

use super::change;
use crate::node::Node;
use godwit_api::text::format_seconds;
use godwit_api::{Migration, MigrationPhase, Obstacle, Policy, SwitchMigration};

/// How long something keeps a migration from its end before the policy changes: two judgements of the engine that
/// agree, and time for what passes by itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why a migration begins with double writes, whose image takes so many bytes.
pub(super) fn first_reason(taken: u64, source: &str) -> String {
    format!(
        "{}: its {} go in one pass, and node '{source}' is not needed after it",
        Policy::DoubleWrite.name(),
        about(taken)
    )
}

/// As many whole MiB as there are, for people.
const fn about(bytes: u64) -> Bytes {
    const MIB: u64 = 1 << 20;
    Bytes(if bytes < MIB {
        bytes
    } else {
        bytes - bytes % MIB
    })
}

/// What is known of a migration when its policy is thought over.
#[derive(Clone, Copy, Debug)]
struct Facts {
    elapsed: Duration,
    deadline: Option<Duration>,
    /// What keeps it from its end, and for how long.
    obstacle: Option<(Obstacle, Duration)>,
    /// Bytes that are left of this pass.
    left: u64,
}

/// What a migration is to do from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Leave {
    /// How long it may go on pushing; without it, until nothing is left to push.
    push_for: Option<Duration>,
    why: String,
}

/// Whether a migration by double writes should leave with what is there.
fn reconsider(facts: &Facts) -> Option<Leave> {
    let name = Policy::PushPull.name();
    let time_left = facts
        .deadline
        .map(|deadline| deadline.saturating_sub(facts.elapsed));
    if time_left == Some(Duration::ZERO) {
        return Some(Leave {
            push_for: Some(Duration::ZERO),
            why: format!(
                "{name}: its deadline has come with {} left",
                about(facts.left)
            ),
        });
    }
    let (obstacle, lasted) = facts.obstacle?;
    if lasted < PATIENCE {
        return None;
    }
    let what = match obstacle {
        Obstacle::Promise => "the promise to the guest keeps its copies from their end",
        Obstacle::WriteRate => "the guest writes as fast as its writes can be sent",
        Obstacle::InterfaceBudget => "other traffic takes all of the interface's budget",
        Obstacle::Bandwidth => "the guest's writes alone take the bandwidth",
        Obstacle::Deadline => "at this rate it would miss its deadline",
    };
    Some(Leave {
        push_for: time_left,
        why: format!(
            "{name}: for {} {what}",
            format_seconds(lasted.as_secs_f64())
        ),
    })
}

/// Thinks over the policies that nobody chose.
pub(super) async fn reconsider_all(node: &Arc<Node>) {
    for (view, obstructed) in node.migrations.chosen_by_node() {
        if let Some(leave) = facts(&view, obstructed).as_ref().and_then(reconsider) {
            take_up(node, &view, leave).await;
        }
    }
}

/// What is known of a migration that could still change; nothing of one that could not, or must not.
fn facts(view: &Migration, obstructed: Option<Duration>) -> Option<Facts> {
    let options = view.options.as_ref()?;
    let copies = view.phase == MigrationPhase::Copying;
    let may = options.policy == Policy::DoubleWrite && !options.verify && copies;
    let obstacle = view.promise.as_ref().and_then(|promise| promise.obstacle);
    may.then_some(())?;
    Some(Facts {
        elapsed: Duration::from_secs_f64(view.lm_seconds?.max(0.0)),
        deadline: options.deadline_seconds.map(Duration::from_secs),
        obstacle: obstacle.zip(obstructed),
        left: (view.progress.bytes_total).saturating_sub(view.progress.bytes_done),
    })
}

async fn take_up(node: &Arc<Node>, view: &Migration, leave: Leave) {
    let request = SwitchMigration {
        policy: Some(Policy::PushPull),
        push_seconds: leave.push_for.map(|time| time.as_secs()),
        ..SwitchMigration::default()
    };
    match change::change_because(node, &view.id, &request, leave.why).await {
        Ok(_) => {}
        // It may have ended, or the other node pulls nothing: it goes on as it is.
        Err(error) => tracing::debug!(migration = view.id, %error, "the policy stays"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const NOTHING: Facts = Facts {
        elapsed: Duration::from_secs(3600),
        deadline: None,
        obstacle: None,
        left: 3 << 30,
    };

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
        assert_eq!(
            leave.why,
            "push-pull: its deadline has come with 3 GiB left"
        );
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
        assert!(leave.why.contains("take the bandwidth"), "{}", leave.why);
        let pressed = Facts {
            deadline: Some(3610 * SECOND),
            ..stuck(PATIENCE)
        };
        let leave = reconsider(&pressed).expect("it leaves");
        assert_eq!(leave.push_for, Some(10 * SECOND));
    }
}
