//! Triggers faults at their moments.

use godwit_core::Controller;
use godwit_core::authority::Ownership;
use godwit_core::event::{AbortReason, Phase};
use godwit_core::request::RequestError;
use godwit_core::units::Sectors;

use super::wires::network::Way;
use super::{MILLISECOND, World, name};
use crate::disk::Failing;
use crate::plan::{FaultKind, Moment, Trigger};
use crate::run::coverage::Reached;

/// Time after switchover within which a power loss reveals non-durable data of the destination.
const SOON: u64 = 20 * MILLISECOND;

impl World {
    pub(super) fn start_faults(&mut self) {
        for index in 0..self.plan.faults.len() {
            if let Trigger::At(at) = self.plan.faults[index].trigger {
                self.schedule(at, move |world| world.fault(index));
            }
        }
    }

    /// Schedules the faults aimed at this moment of the migration.
    pub(super) fn moment(&mut self, reached: Moment) {
        for index in 0..self.plan.faults.len() {
            let trigger = self.plan.faults[index].trigger;
            if let Trigger::After {
                moment,
                skip,
                delay,
            } = trigger
                && moment == reached
            {
                self.moments[index] += 1;
                if self.moments[index] == skip + 1 {
                    self.schedule(delay, move |world| world.fault(index));
                }
            }
        }
    }

    pub(super) fn fault(&mut self, index: usize) {
        if self.settling {
            return;
        }
        let fault = self.plan.faults[index];
        self.note(|| format!("   fault {:?} at {:?}", fault.kind, fault.target));
        if fault.excuses_waits() {
            self.course.promise = None;
        }
        let now = self.now;
        let node = self.course.node(fault.target);
        match fault.kind {
            FaultKind::Crash { down } => self.crash(node, down, false),
            FaultKind::PowerLoss { down } => self.crash(node, down, true),
            FaultKind::Cut => {
                if let Some(session) = self.network.youngest() {
                    self.reached(Reached::Cut);
                    self.cut(session, 5 * MILLISECOND);
                }
            }
            FaultKind::Cancel => {
                self.with(node, |c, now| c.cancel(now, AbortReason::Cancelled));
            }
            FaultKind::DiskError { error, lasts } => {
                let until = if lasts == 0 { 0 } else { now + lasts };
                self.nodes[node].disk.failing = Some(Failing { error, until });
            }
            FaultKind::DiskSlow { factor, lasts } => {
                self.reached(Reached::DiskSlow);
                self.nodes[node].disk.slow = (factor, now + lasts);
            }
            FaultKind::StoreSlow { delay, lasts } => {
                self.reached(Reached::StoreSlow);
                self.nodes[node].store.slow = (delay, now + lasts);
            }
            FaultKind::LinkSlow { divisor, lasts } => {
                self.reached(Reached::Congested);
                self.network.directions[node].slow = (divisor, now + lasts);
            }
            FaultKind::Stall { connection, lasts } => {
                if let Some(session) = self.network.youngest() {
                    self.reached(Reached::Stalled);
                    let connections = self.network.sessions[session].connections.len();
                    let connection = usize::from(connection) % connections;
                    let pipe = self.network.pipe(Way::new(session, connection, node));
                    pipe.stalled_until = pipe.stalled_until.max(now + lasts);
                }
            }
            FaultKind::Traffic { percent, lasts } => {
                self.reached(Reached::Traffic);
                self.network.directions[node].traffic = (percent, now + lasts);
            }
        }
    }

    /// Ends a node's process, or cuts its host's power.
    pub(super) fn crash(&mut self, node: usize, down: u64, power: bool) {
        if !self.nodes[node].is_up() {
            return;
        }
        self.count_crash(node, power);
        self.interrupt(node, power);
        let it = &self.nodes[node];
        let owner = it.store.record.ownership == Ownership::Serving || it.serves();
        if it.store.is_undecided() {
            self.reached(Reached::InDoubt);
        }
        self.lose_clients(node, owner && self.protection.is_none());
        if power {
            self.lose_power(node, owner);
        }
        if self.nodes[node].outgoing {
            self.course.end(self.now);
        }
        let it = &mut self.nodes[node];
        it.clear();
        it.incarnation += 1;
        // A new process reads another clock, at the latest after a boot.
        it.clock.0.offset = self.random.fault.below(1 << 50);
        // A dead host sends no farewell: the other end notices the missing answers.
        let notice = if power {
            self.random.fault.pick(&[5, 30, 400]) * MILLISECOND
        } else {
            3 * MILLISECOND
        };
        for session in self.network.live() {
            self.cut(session, notice);
        }
        for session in 0..self.network.sessions.len() {
            if !self.network.sessions[session].noticed[node] {
                self.network.forget(session, node);
            }
        }
        self.schedule(down, move |world| world.restart(node));
    }

    /// Counts the state in which a node crashes.
    fn count_crash(&mut self, node: usize, power: bool) {
        self.reached(if power {
            Reached::PowerLoss
        } else {
            Reached::Crash
        });
        let paused = self.course.paused;
        self.reached(match self.course.phase {
            Some(Phase::Copying | Phase::Verifying | Phase::Converged) if paused => {
                Reached::CrashPaused
            }
            Some(Phase::Copying) => Reached::CrashCopying,
            Some(Phase::Verifying) => Reached::CrashVerifying,
            Some(Phase::Converged) => Reached::CrashConverged,
            Some(Phase::Following) => Reached::CrashFollowed,
            Some(Phase::Draining) => Reached::CrashDraining,
            Some(Phase::Preparing) => Reached::CrashPreparing,
            Some(Phase::Relinquishing) => Reached::CrashRelinquishing,
            Some(Phase::Committing) => Reached::CrashCommitting,
            Some(Phase::Completed | Phase::Aborted) | None => Reached::CrashIdle,
        });
        let record = self.nodes[node].store.record;
        if record.lacks().is_some() {
            self.reached(Reached::CrashLacking);
        } else if record.owes().is_some() {
            self.reached(Reached::CrashOwing);
        }
    }

    /// Applies the end of a process to its operations in flight, and to what is being stored. An orderly end stores the
    /// writes since the disk came; a crash or a power loss leaves nothing.
    fn interrupt(&mut self, node: usize, power: bool) {
        let it = &mut self.nodes[node];
        let in_order = !power && self.random.delta.below(2) == 0;
        let written = it.controller.as_ref().filter(|c| in_order && c.serves());
        it.store
            .store_written(written.and_then(Controller::written));
        let random = &mut self.random.fault;
        let operations = std::mem::take(&mut it.operations);
        let torn = operations.interrupt(&mut it.disk, random);
        let kept = it.store.interrupt(random);
        let capacity = Sectors(self.plan.sectors);
        it.store.interrupt_missing(power, capacity, random);
        self.count(Reached::TornWrite, torn);
        match kept {
            Some(true) => {
                self.reached(Reached::RecordKept);
                self.check_records();
            }
            Some(false) => self.reached(Reached::RecordLost),
            None => {}
        }
    }

    /// Applies a power loss to a node's disk, and to the writes that the disk may have lost.
    fn lose_power(&mut self, node: usize, owner: bool) {
        let it = &mut self.nodes[node];
        let (lost, torn) = it.disk.power_loss(&mut self.random.fault);
        // A process killed before storing the ownership does not serve now, but the disk holds the answered writes.
        let served = it.store.served_on == Some(it.store.record);
        self.count(Reached::LostWrite, lost);
        self.count(Reached::TornWrite, torn);
        if owner || served {
            if self.history.unflushed() > 0 {
                self.reached(Reached::PowerLossOfOwner);
            }
            let last_move = self.course.last_move;
            if last_move > 0 && self.now - last_move < SOON {
                self.reached(Reached::PowerLossAfterMove);
            }
            if self.defers_power_loss(node) {
                return;
            }
            self.history.power_lost(self.now);
        }
    }

    pub(super) fn restart(&mut self, node: usize) {
        if self.nodes[node].is_up() {
            return;
        }
        self.note(|| format!("{}  starts again", name(node)));
        self.start_controller(node);
        self.schedule_reconnect(node);
    }

    /// Returns true if the guest may see this error because a disk has reported one.
    pub(super) fn is_expected(&self, error: RequestError) -> bool {
        match error {
            RequestError::Io => self.outcome.coverage.get(Reached::IoError) > 0,
            RequestError::NoSpace => self.outcome.coverage.get(Reached::NoSpace) > 0,
            // Another party writes, or a forwarded write has failed.
            RequestError::Uncertain => {
                self.guest.shares
                    || self.is_expected(RequestError::Io)
                    || self.is_expected(RequestError::NoSpace)
            }
            _ => false,
        }
    }
}
