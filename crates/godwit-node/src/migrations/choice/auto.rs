//! Chooses a migration's policy where nobody did, and another one when that comes to no end.
//!
//! The decision is [`godwit_core::auto`]'s; here is what it is made from, and what people are told of it.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::auto::{Facts, Leave, Why, reconsider};
use godwit_core::event::Obstacle;
use godwit_core::units::Bytes;

use crate::migrations::change;
use crate::migrations::table::Chosen;
use crate::node::Node;
use godwit_api::text::format_seconds;
use godwit_api::{Migration, MigrationPhase, Policy, SwitchMigration};

/// Why a migration begins with double writes, whose image takes so many bytes.
pub(in crate::migrations) fn first_reason(taken: u64, source: &str) -> String {
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

/// Says how little goes to a node that has an older copy of the disk, once that is known.
pub(in crate::migrations) fn tell_of_delta(view: &mut Migration) {
    let (Some(delta), Some(options)) = (view.progress.delta, &mut view.options) else {
        return;
    };
    // Double writes have one pass, so that its bytes stay the same to the end; a short move has ended when it is looked at
    // for the first time.
    let chosen = options.policy == Policy::DoubleWrite && options.policy_reason.is_some();
    if !chosen || delta.comparing {
        return;
    }
    options.policy_reason = Some(format!(
        "{}: only the {} in which node '{}' has an older copy differ are sent, and node '{}' is not needed after that",
        Policy::DoubleWrite.name(),
        about(view.progress.bytes_total),
        view.to,
        view.from
    ));
}

/// Why a migration leaves with what is there, of which so many bytes are left.
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
    format!("{}: {why}", Policy::PushPull.name())
}

/// Thinks over the policies that nobody chose.
pub(in crate::migrations) async fn reconsider_all(node: &Arc<Node>) {
    for chosen in node.migrations.chosen_by_node() {
        if let Some(leave) = facts(&chosen).as_ref().and_then(reconsider) {
            take_up(node, &chosen, leave).await;
        }
    }
}

/// What is known of a migration that could still change; nothing of one that could not, or must not.
fn facts(
    Chosen {
        view,
        obstacle,
        pace,
    }: &Chosen,
) -> Option<Facts> {
    let options = view.options.as_ref()?;
    let copies = view.phase == MigrationPhase::Copying;
    let doubles = options.policy == Policy::DoubleWrite;
    let may = (doubles || options.policy == Policy::PreCopy) && !options.verify && copies;
    may.then_some(())?;
    Some(Facts {
        elapsed: Duration::from_secs_f64(view.lm_seconds?.max(0.0)),
        deadline: options.deadline_seconds.map(Duration::from_secs),
        obstacle: *obstacle,
        // Rounds say by themselves when they come to no end.
        pace: pace.filter(|_| doubles),
    })
}

/// Bytes that are left to be sent.
fn left(chosen: &Chosen) -> u64 {
    let progress = &chosen.view.progress;
    let in_pass = progress.bytes_total.saturating_sub(progress.bytes_done);
    chosen.pace.map_or(in_pass, |pace| pace.left.min(in_pass))
}

async fn take_up(node: &Arc<Node>, chosen: &Chosen, leave: Leave) {
    let why = told(leave.why, left(chosen));
    let request = SwitchMigration {
        policy: Some(Policy::PushPull),
        push_seconds: leave.push_for.map(|time| time.as_secs()),
        ..SwitchMigration::default()
    };
    match change::change_because(node, &chosen.view.id, &request, why).await {
        Ok(_) => {}
        // It may have ended, or the other node pulls nothing: it goes on as it is.
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
