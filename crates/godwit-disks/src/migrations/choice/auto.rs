//! Chooses a migration's policy if the user did not, and another policy if the migration does not end.
//!
//! [`godwit_core::auto`] makes the decision. This module collects the facts and words the reasons for people.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::PUSH_PULL;
use godwit_core::auto::{Facts, Leave, Why, reconsider};
use godwit_core::event::Obstacle;
use godwit_core::units::Bytes;

use crate::migrations::Migrations;
use crate::migrations::change;
use crate::migrations::table::Chosen;
use godwit_api::text::format_seconds;
use godwit_api::{Migration, MigrationPhase, Policy, SwitchMigration};

/// Returns the reason to begin with double writes, for an image of `taken` allocated bytes.
pub(in crate::migrations) fn first_reason(taken: u64, source: &str) -> String {
    format!(
        "{}: its {} go in one pass, and node '{source}' is not needed after it",
        Policy::default().name,
        about(taken)
    )
}

/// Rounds down to whole MiB, for people.
const fn about(bytes: u64) -> Bytes {
    const MIB: u64 = 1 << 20;
    Bytes(if bytes < MIB {
        bytes
    } else {
        bytes - bytes % MIB
    })
}

/// Updates the reason once the small delta to a node with an older copy of the disk is known.
pub(in crate::migrations) fn tell_of_delta(view: &mut Migration) {
    let (Some(delta), Some(options)) = (view.progress.delta, &mut view.options) else {
        return;
    };
    // There is one pass, so the bytes of the pass stay the same to the end. A short move may have ended before this
    // first look.
    let chosen = options.policy == Policy::default() && options.policy_reason.is_some();
    if !chosen || delta.comparing {
        return;
    }
    options.policy_reason = Some(format!(
        "{}: only the {} in which node '{}' has an older copy differ are sent, and node '{}' is not needed after that",
        options.policy.name,
        about(view.progress.bytes_total),
        view.to,
        view.from
    ));
}

/// Returns the reason to hand over with `left` bytes still to pull.
fn told(why: Why, left: u64) -> String {
    let why = match why {
        Why::Deadline => format!("its deadline has come with {} left", about(left)),
        Why::Writes(percent) => format!(
            "{percent} % of what is sent are the guest's writes, and to wait for the end would cost more than to pull \
             the {} that are left",
            about(left)
        ),
        Why::Obstacle(obstacle, lasted) => {
            let what = match obstacle {
                Obstacle::Promise => "the promise to the guest keeps its copies from their end",
                Obstacle::WriteRate => "the guest writes as fast as its writes can be sent",
                Obstacle::InterfaceBudget => "other traffic takes all of the interface's budget",
                Obstacle::Bandwidth => "the guest's writes alone take the bandwidth",
                Obstacle::Deadline => "at this rate it would miss its deadline",
            };
            format!("for {} {what}", format_seconds(lasted.as_secs_f64()))
        }
    };
    format!("{}: {why}", PUSH_PULL.name)
}

/// Reconsiders the policies chosen by the node.
pub(in crate::migrations) async fn reconsider_all(migrations: &Arc<Migrations>) {
    for chosen in migrations.chosen_by_node() {
        if let Some(leave) = facts(&chosen).as_ref().and_then(reconsider) {
            take_up(migrations, &chosen, leave).await;
        }
    }
}

/// Returns the facts of a migration whose policy may still change.
fn facts(
    Chosen {
        view,
        obstacle,
        pace,
    }: &Chosen,
) -> Option<Facts> {
    let options = view.options.as_ref()?;
    let copies = view.phase == MigrationPhase::Copying;
    let may = options.policy.reviewed && !options.verify && copies;
    may.then_some(())?;
    Some(Facts {
        elapsed: Duration::from_secs_f64(view.lm_seconds?.max(0.0)),
        deadline: options.deadline_seconds.map(Duration::from_secs),
        obstacle: *obstacle,
        // Rounds report a lack of convergence by themselves.
        pace: pace.filter(|_| options.policy.usual.rounds().is_none()),
    })
}

/// Returns the bytes left to send.
fn left(chosen: &Chosen) -> u64 {
    let progress = &chosen.view.progress;
    let in_pass = progress.bytes_total.saturating_sub(progress.bytes_done);
    chosen.pace.map_or(in_pass, |pace| pace.left.min(in_pass))
}

async fn take_up(migrations: &Arc<Migrations>, chosen: &Chosen, leave: Leave) {
    let why = told(leave.why, left(chosen));
    let request = SwitchMigration {
        policy: Some(Policy(PUSH_PULL)),
        push_seconds: leave.push_for.map(|time| time.as_secs()),
        ..SwitchMigration::default()
    };
    match change::change_because(migrations, &chosen.view.id, &request, Some(why)).await {
        Ok(_) => {}
        // The migration may have ended, or the other node cannot pull: the policy stays.
        Err(error) => tracing::debug!(migration = chosen.view.id, %error, "the policy stays"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_sentence_with_what_is_left() {
        assert_eq!(
            told(Why::Deadline, 3 << 30),
            "push-pull: its deadline has come with 3 GiB left"
        );
        let stuck = Why::Obstacle(Obstacle::Bandwidth, Duration::from_secs(20));
        let stuck = told(stuck, 3 << 30);
        assert!(stuck.contains("take the bandwidth"), "{stuck}");
        let writes = told(Why::Writes(62), 5 << 20);
        assert!(
            writes.contains("62 %") && writes.contains("5 MiB"),
            "{writes}"
        );
    }
}
