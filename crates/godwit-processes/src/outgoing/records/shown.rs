//! A process's move as the API shows it.

use godwit_api::{
    ProcessBreakdown, ProcessMigration, ProcessMigrationPhase as Phase, ProcessPartner,
};
use godwit_move::{Plane, Step};
use godwit_verbs::mover::Party;

use super::stored::Outgoing;
use crate::Processes;

pub(in crate::outgoing) fn shown(processes: &Processes, plan: &Outgoing) -> ProcessMigration {
    ProcessMigration {
        id: plan.id.clone(),
        pid: plan.pid,
        container: plan.container.as_ref().map(|one| one.id.clone()),
        command: plan.command.clone(),
        from: processes.context.config.name.clone(),
        to: plan.to.clone(),
        phase: phase(plan.moving.step()),
        waits_for: None,
        partners: shown_partners(&plan.partners),
        queue_pairs: plan.queue_pairs,
        image_bytes: 0,
        started_at: plan.started_at.clone(),
        ended_at: None,
        pre_copy_ms: None,
        pre_copied_bytes: 0,
        pre_copy_rounds: 0,
        pre_setup_ms: None,
        blackout_ms: None,
        wait_ms: None,
        breakdown_ms: ProcessBreakdown::default(),
        error: None,
        warnings: Vec::new(),
    }
}

pub(in crate::outgoing) fn shown_partners(partners: &[(String, Party)]) -> Vec<ProcessPartner> {
    let partner = |(name, party): &(String, Party)| ProcessPartner {
        node: name.clone(),
        pid: party.pid,
        connections: party.links.len(),
    };
    partners.iter().map(partner).collect()
}

pub(in crate::outgoing) fn phase(step: Step) -> Phase {
    match step {
        Step::Prepare => Phase::Waiting,
        Step::Copy(Plane::Objects) => Phase::PreSetup,
        Step::Copy(_) => Phase::PreCopy,
        Step::Stop | Step::Drain => Phase::Stopping,
        Step::Freeze(_) => Phase::Dumping,
        Step::Send(_) => Phase::Sending,
        Step::Decide => Phase::Restoring,
        Step::Settle => Phase::InDoubt,
        Step::TakeUp(_) | Step::Resume | Step::Pull(_) => Phase::Connecting,
        Step::TakeBack(_) | Step::ResumeHere | Step::LetGo | Step::End => Phase::GoingBack,
    }
}

/// Returns the step's name for logs and fail points.
pub(in crate::outgoing) fn name(step: Step) -> &'static str {
    match step {
        Step::Prepare => "claiming",
        Step::Copy(Plane::Objects) => "presetup",
        Step::Copy(_) => "precopying",
        Step::Stop => "suspending",
        Step::Drain => "waiting",
        Step::Freeze(Plane::Objects) => "releasing",
        Step::Freeze(_) => "dumping",
        Step::Send(_) => "sending",
        Step::Decide => "restoring",
        Step::Settle => "asking",
        Step::TakeUp(Plane::Objects) => "recreating",
        Step::TakeUp(_) => "connecting",
        Step::Resume => "resuming",
        Step::Pull(_) => "pulling",
        Step::TakeBack(Plane::Image) => "bringing_back",
        Step::TakeBack(_) | Step::ResumeHere => "going_on_here",
        Step::LetGo => "releasing_partners",
        Step::End => "ended",
    }
}
