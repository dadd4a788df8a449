//! Triggers faults at their moments.

use godwit_core::authority::Ownership;
use godwit_core::event::{AbortReason, Phase};
use godwit_core::request::RequestError;

use super::MILLISECOND;
use super::Occurrence;
use super::World;
use super::name;
use crate::disk::Failing;
use crate::plan::{FaultKind, Moment, Target, Trigger};
use crate::run::coverage::Reached;

/// Time after switchover within which a power loss reveals non-durable data of the destination.
const SOON: u64 = 20 * MILLISECOND;

impl World {
    pub(super) fn start_faults(&mut self) {
        for index in 0..self.plan.faults.len() {
            if let Trigger::At(at) = self.plan.faults[index].trigger {
                self.schedule(at, Occurrence::Fault(index));
            }
        }
    }

    /// Schedules the faults aimed at this moment of the migration.
    pub(super) fn moment(&mut self, reached: Moment) {
        for index in 0..self.plan.faults.len() {
            let Trigger::After {
                moment,
                skip,
                delay,
            } = self.plan.faults[index].trigger
            else {
                continue;
            };
            if moment != reached {
                continue;
            }
            self.moments[index] += 1;
            if self.moments[index] == skip + 1 {
                self.schedule(delay, Occurrence::Fault(index));
            }
        }
    }

    pub(super) fn fault(&mut self, index: usize) {
        if self.settling {
            return;
        }
        let kind = self.plan.faults[index].kind;
        self.note(|| format!("   fault {kind:?}"));
        if kind.excuses_waits() {
            self.promise = None;
        }
        let now = self.now;
        match kind {
            FaultKind::Crash { target, down } => self.crash(self.node(target), down, false),
            FaultKind::PowerLoss { target, down } => self.crash(self.node(target), down, true),
            FaultKind::Cut => {
                if let Some(session) = self.network.youngest() {
                    self.reached(Reached::Cut);
                    self.cut(session, 5 * MILLISECOND);
                }
            }
            FaultKind::Cancel { target } => {
                let node = self.node(target);
                self.with(node, |controller, now| {
                    controller.cancel(now, AbortReason::Cancelled)
                });
            }
            FaultKind::DiskError {
                target,
                error,
                lasts,
            } => {
                let until = if lasts == 0 { 0 } else { now + lasts };
                let node = self.node(target);
                self.nodes[node].disk.failing = Some(Failing { error, until });
            }
            FaultKind::DiskSlow {
                target,
                factor,
                lasts,
            } => {
                self.reached(Reached::DiskSlow);
                let node = self.node(target);
                self.nodes[node].disk.slow = (factor, now + lasts);
            }
            FaultKind::StoreSlow {
                target,
                delay,
                lasts,
            } => {
                self.reached(Reached::StoreSlow);
                let node = self.node(target);
                self.nodes[node].slow_store = (delay, now + lasts);
            }
            FaultKind::LinkSlow {
                target,
                divisor,
                lasts,
            } => {
                self.reached(Reached::Congested);
                let node = self.node(target);
                self.network.directions[node].slow = (divisor, now + lasts);
            }
            FaultKind::Stall {
                target,
                connection,
                lasts,
            } => {
                if let Some(session) = self.network.youngest() {
                    self.reached(Reached::Stalled);
                    let connections = self.network.sessions[session].connections.len();
                    let connection = usize::from(connection) % connections;
                    let node = self.node(target);
                    self.network.stall(session, connection, node, now + lasts);
                }
            }
            FaultKind::Traffic {
                target,
                percent,
                lasts,
            } => {
                self.reached(Reached::Traffic);
                let node = self.node(target);
                self.network.directions[node].traffic = (percent, now + lasts);
            }
        }
    }

    pub(super) fn node(&self, target: Target) -> usize {
        match target {
            Target::Source => self.source,
            Target::Destination => 1 - self.source,
        }
    }

    /// Ends a node's process, or cuts its host's power.
    pub(super) fn crash(&mut self, node: usize, down: u64, power: bool) {
        if !self.nodes[node].is_up() {
            return;
        }
        self.reached(if power {
            Reached::PowerLoss
        } else {
            Reached::Crash
        });
        self.reached(match self.phase {
            Some(Phase::Copying | Phase::Verifying | Phase::Converged) if self.paused => {
                Reached::CrashPaused
            }
            Some(Phase::Copying) => Reached::CrashCopying,
            Some(Phase::Verifying) => Reached::CrashVerifying,
            Some(Phase::Converged) => Reached::CrashConverged,
            Some(Phase::Draining) => Reached::CrashDraining,
            Some(Phase::Preparing) => Reached::CrashPreparing,
            Some(Phase::Relinquishing) => Reached::CrashRelinquishing,
            Some(Phase::Committing) => Reached::CrashCommitting,
            Some(Phase::Completed | Phase::Aborted) | None => Reached::CrashIdle,
        });
        let record = self.nodes[node].record;
        if record.lacks().is_some() {
            self.reached(Reached::CrashLacking);
        } else if record.owes().is_some() {
            self.reached(Reached::CrashOwing);
        }
        self.end_written(node, power);
        self.interrupt(node);
        self.interrupt_missing(node, power);
        let it = &self.nodes[node];
        let owner = it.record.ownership == Ownership::Serving || it.serves();
        if self.nodes[node].is_undecided() {
            self.reached(Reached::InDoubt);
        }
        self.lose_clients(node, owner);
        if power {
            let (lost, torn) = self.nodes[node].disk.power_loss(&mut self.fault_random);
            self.coverage.add(Reached::LostWrite, lost);
            self.coverage.add(Reached::TornWrite, torn);
            // A process killed before storing the ownership does not serve now, but the disk holds the answered writes.
            let it = &self.nodes[node];
            if owner || it.served_on == Some(it.record) {
                if self.history.unflushed() > 0 {
                    self.reached(Reached::PowerLossOfOwner);
                }
                if self.last_move > 0 && self.now - self.last_move < SOON {
                    self.reached(Reached::PowerLossAfterMove);
                }
                self.history.power_lost(self.now);
            }
        }
        if self.nodes[node].outgoing {
            self.ended();
        }
        let it = &mut self.nodes[node];
        it.clear();
        it.incarnation += 1;
        // A new process reads another clock, at the latest after a boot.
        it.clock.0.offset = self.fault_random.below(1 << 50);
        // A dead host sends no farewell: the other end notices the missing answers.
        let notice = if power {
            self.fault_random.pick(&[5, 30, 400]) * MILLISECOND
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
        self.schedule(down, Occurrence::Restart(node));
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
            RequestError::Io => self.coverage.get(Reached::IoError) > 0,
            RequestError::NoSpace => self.coverage.get(Reached::NoSpace) > 0,
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
