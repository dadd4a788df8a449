//! Migrations of this node's disks, in and out.

pub mod afterwards;
pub mod change;
mod choice;
pub mod incoming;
pub mod options;
pub mod outgoing;
mod promise;
mod recent_rate;
mod table;

use std::sync::Arc;

use afterwards::{forward, pulling, resolve};
use godwit_core::event::{AbortReason, Event, Phase};
use godwit_core::units::{Bytes, Extent, MigrationId};
pub use table::{Migrations, live, sample_rates};

use crate::disks::disk::{Activity, Disk};
use crate::disks::lifecycle::lacking;
use godwit_api::{ErrorBody, ErrorCode, MigrationPhase};
use godwit_context::failpoint;

/// Handles a controller's event about a disk.
pub async fn handle_event(migrations: &Arc<Migrations>, disk: &Arc<Disk>, event: Event) {
    match event {
        Event::PhaseEntered { migration, phase } => {
            tracing::info!(disk = disk.name, %migration, phase = phase.name(), "migration");
            if let Some(phase) = under_way(phase) {
                migrations.enter(migration, phase);
            }
            if phase == Phase::Copying {
                failpoint::reach(String::from("phase::copying")).await;
            }
        }
        // A migration under a tight promise pauses many times a second.
        Event::Paused { migration, reason } => {
            tracing::debug!(disk = disk.name, %migration, reason = reason.name(), "paused");
        }
        Event::PolicySwitched { migration } => {
            tracing::info!(disk = disk.name, %migration, "the disk leaves with what is there");
        }
        Event::Resumed { migration } => {
            tracing::debug!(disk = disk.name, %migration, "resumed");
        }
        Event::Obstructed {
            migration,
            obstacle: Some(obstacle),
        } => {
            let obstacle = obstacle.name();
            tracing::warn!(disk = disk.name, %migration, obstacle, "the migration comes no nearer to its end");
        }
        Event::Obstructed {
            migration,
            obstacle: None,
        } => {
            tracing::info!(disk = disk.name, %migration, "the migration comes nearer to its end again");
        }
        Event::Followed { migration } => {
            tracing::info!(disk = disk.name, %migration, "the other node follows");
        }
        Event::Severed { migration, reason } => {
            tracing::warn!(disk = disk.name, %migration, %reason, "the node that followed is lost: answers are held");
        }
        Event::Follows { migration, epoch } => {
            tracing::info!(disk = disk.name, %migration, epoch = epoch.0, "follows its source");
            migrations.enter(migration, MigrationPhase::Following);
            incoming::keep_copy(migrations, disk, migration).await;
        }
        Event::MigrationCompleted { migration } => {
            disk.end(Activity::Outgoing(migration));
            table::end(migrations, disk, migration, Ok(())).await;
        }
        Event::MigrationAborted {
            migration,
            reason,
            mismatch,
        } => {
            disk.end(Activity::Outgoing(migration));
            let error = aborted(
                &disk.name,
                reason,
                mismatch,
                migrations.context.is_closing(),
            );
            table::end(migrations, disk, migration, Err(error)).await;
        }
        Event::ReceiveCompleted { migration } => {
            disk.end(Activity::Incoming(migration));
            table::end(migrations, disk, migration, Ok(())).await;
        }
        Event::ReceiveAborted { migration, reason } => {
            lacking::forget(&migrations.disks, disk).await;
            let error = aborted(&disk.name, reason, None, migrations.context.is_closing());
            table::end(migrations, disk, migration, Err(error)).await;
            // Spawned: discarding ends the engine, whose events this task handles.
            godwit_context::spawn(incoming::discard(
                Arc::clone(migrations),
                Arc::clone(disk),
                migration,
            ));
        }
        Event::AuthorityChanged { record } => {
            use godwit_core::authority::Ownership;
            if let Ownership::Accepted { migration } = record.ownership {
                migrations.enter(migration, MigrationPhase::Accepted);
            }
        }
        Event::Owes { migration } => {
            tracing::info!(disk = disk.name, %migration, "its new owner lacks a part of the disk");
            pulling::start(migrations, disk);
        }
        Event::OwesNothing { migration } => {
            tracing::info!(disk = disk.name, %migration, "its owner has all of the disk");
        }
        Event::Whole { migration } => {
            tracing::info!(disk = disk.name, %migration, "all of the disk is here");
            lacking::forget(&migrations.disks, disk).await;
        }
        Event::LeftImage { migration } => {
            tracing::info!(disk = disk.name, %migration, "the disk has left, and needs its image here no more");
            lacking::forget(&migrations.disks, disk).await;
        }
        // Sharing is stored in the same place as records. A new base has an event of its own. Checkpoints are counted
        // where their memory is.
        Event::SharingChanged { .. }
        | Event::BecameBase { .. }
        | Event::CheckpointMarked { .. } => {}
        Event::OwnerMoved => forward::start(migrations, disk),
        Event::NeedPeer { migration } => resolve::start(migrations, disk, migration),
    }
}

/// Ends a migration whose engine ended by itself.
pub async fn engine_failed(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    migration: MigrationId,
    problem: &str,
) {
    let error = ErrorBody::new(
        ErrorCode::Internal,
        format!("the migration of disk {} ended: {problem}", disk.name),
    )
    .hint("see the node's log; the disk is started again with the node");
    table::end(migrations, disk, migration, Err(error)).await;
    disk.end(Activity::Outgoing(migration));
    incoming::discard(Arc::clone(migrations), Arc::clone(disk), migration).await;
}

/// Ends a migration still undecided when an operator claimed the disk.
pub async fn claimed(migrations: &Arc<Migrations>, disk: &Arc<Disk>, migration: MigrationId) {
    let text = format!(
        "the migration of disk {} was not decided when an operator claimed the disk",
        disk.name
    );
    let error = ErrorBody::new(ErrorCode::Conflict, text)
        .hint("do not start the other node with its copy of the disk: remove that there");
    table::end(migrations, disk, migration, Err(error)).await;
}

/// Converts the phase for the API, while the migration has not ended.
const fn under_way(phase: Phase) -> Option<MigrationPhase> {
    Some(match phase {
        Phase::Copying => MigrationPhase::Copying,
        Phase::Verifying => MigrationPhase::Verifying,
        Phase::Converged => MigrationPhase::Converged,
        Phase::Following => MigrationPhase::Following,
        Phase::Draining => MigrationPhase::Draining,
        Phase::Preparing => MigrationPhase::Preparing,
        Phase::Relinquishing => MigrationPhase::Relinquishing,
        Phase::Committing => MigrationPhase::Committing,
        Phase::Completed | Phase::Aborted => return None,
    })
}

/// Returns the error of a migration that ended without moving the disk, with the remedy. `closing` is true if this node
/// is about to end, which cancels the activities of its disks.
fn aborted(disk: &str, reason: AbortReason, mismatch: Option<Extent>, closing: bool) -> ErrorBody {
    if closing && reason == AbortReason::Cancelled {
        let text = format!("the migration of disk {disk} ended: this node was stopped meanwhile");
        return ErrorBody::new(ErrorCode::ShuttingDown, text)
            .hint("start the migration again when the node is back");
    }
    let (code, hint) = match reason {
        AbortReason::Cancelled => (ErrorCode::Conflict, "start it again when you are ready"),
        AbortReason::PeerLost | AbortReason::PeerTimeout => (
            ErrorCode::PeerUnreachable,
            "see that the other node runs, and start it again",
        ),
        AbortReason::SourceDisk => (ErrorCode::Internal, "check the source's storage"),
        AbortReason::DestinationDisk => (ErrorCode::Internal, "check the destination's storage"),
        AbortReason::DestinationNoSpace => (
            ErrorCode::NoSpace,
            "free space at the destination and start it again",
        ),
        AbortReason::VerifyMismatch => (
            ErrorCode::Internal,
            "check memory and storage of both nodes before trying again",
        ),
        AbortReason::Protocol => (ErrorCode::Internal, "see the logs of both nodes"),
        AbortReason::Refused => (ErrorCode::PeerRefused, "see the log of the other node"),
    };
    let place = mismatch
        .map(|extent| {
            let (start, length) = (extent.start().byte_offset(), Bytes(extent.bytes()));
            format!(" ({length} from byte {start} on)")
        })
        .unwrap_or_default();
    ErrorBody::new(
        code,
        format!("the migration of disk {disk} ended: {reason}{place}"),
    )
    .hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_with_its_node_was_cancelled_by_nobody() {
        let told = |closing| aborted("d", AbortReason::Cancelled, None, closing).to_string();
        assert!(told(false).ends_with("it was cancelled"));
        assert!(told(true).ends_with("this node was stopped meanwhile"));
        let lost = aborted("d", AbortReason::PeerLost, None, true);
        assert_eq!(lost.code, ErrorCode::PeerUnreachable);
    }
}
