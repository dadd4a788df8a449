//! A process's move as the API shows it.

use godwit_api::{
    ProcessBreakdown, ProcessMigration, ProcessMigrationPhase as Phase, ProcessPartner,
};
use godwit_verbs::mover::{Party, Step};

use super::stored::Outgoing;
use crate::node::Node;

pub(in crate::processes::outgoing) fn shown(node: &Node, plan: &Outgoing) -> ProcessMigration {
    ProcessMigration {
        id: plan.id.clone(),
        pid: plan.pid,
        container: plan.container.as_ref().map(|one| one.id.clone()),
        command: plan.command.clone(),
        from: node.config.name.clone(),
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

pub(in crate::processes::outgoing) fn shown_partners(
    partners: &[(String, Party)],
) -> Vec<ProcessPartner> {
    let partner = |(name, party): &(String, Party)| ProcessPartner {
        node: name.clone(),
        pid: party.pid,
        connections: party.links.len(),
    };
    partners.iter().map(partner).collect()
}

pub(in crate::processes::outgoing) fn phase(step: Step) -> Phase {
    match step {
        Step::Wait => Phase::Waiting,
        Step::PreCopy => Phase::PreCopy,
        Step::PreSetup => Phase::PreSetup,
        Step::Suspend | Step::Drain => Phase::Stopping,
        Step::Release | Step::Dump => Phase::Dumping,
        Step::Send => Phase::Sending,
        Step::Restore => Phase::Restoring,
        Step::Settle => Phase::InDoubt,
        Step::Recreate | Step::Connect | Step::Resume => Phase::Connecting,
        Step::BringBack
        | Step::RecreateHere
        | Step::ConnectHere
        | Step::ResumeHere
        | Step::ResumePartners
        | Step::End => Phase::GoingBack,
    }
}
