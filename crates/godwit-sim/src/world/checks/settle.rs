//! The end of a run: all faults heal, and every acknowledged write must be there.

use godwit_core::Controller;
use godwit_core::event::AbortReason;

use crate::plan::PlannedChange;
use crate::run::coverage::Reached;
use crate::world::node::Node;
use crate::world::{MILLISECOND, World, name};

/// Time within which everything comes to an end.
const SETTLED_WITHIN: u64 = 8_000 * MILLISECOND;

/// Longest wait of the operator for a migration with a promise or a bandwidth limit, before cancelling it.
const PATIENCE: u64 = 1_500 * MILLISECOND;

impl World {
    /// Ends all faults; then exactly one node serves and holds every acknowledged write.
    pub(crate) fn settle(&mut self) {
        self.settling = true;
        let (deadline, patience) = (self.now + SETTLED_WITHIN, self.now + PATIENCE);
        self.note(|| "   everything heals".to_owned());
        self.end_protection();
        for node in &mut self.nodes {
            node.disk.failing = None;
            node.disk.slow.1 = 0;
            node.store.slow.1 = 0;
        }
        for direction in &mut self.network.directions {
            direction.slow.1 = 0;
            direction.traffic.1 = 0;
        }
        while self.holds() && !self.has_settled() {
            self.run_until(self.now + 5 * MILLISECOND);
            self.yield_the_rest();
            if self.now > patience && self.promises() {
                self.cancel();
            }
            if self.now > deadline {
                return self.fail_to_settle();
            }
        }
        if !self.holds() {
            return;
        }
        self.check_owner();
        let owner = (0..2).find(|node| self.nodes[*node].serves());
        if let (Some(owner), true, true) = (owner, self.plan.power_loss_at_end, self.holds()) {
            self.now += 1;
            self.crash(owner, 1, true);
            self.now += 1;
            self.restart(owner);
            self.check_owner();
        }
    }

    /// Cancels the migration at its source.
    pub(crate) fn cancel(&mut self) {
        let cancelled = AbortReason::Cancelled;
        self.with(self.course.source, |c, now| c.cancel(now, cancelled));
    }

    /// Returns true if no part of the disk is missing at its owner.
    pub(crate) fn is_whole(&self) -> bool {
        let mut nodes = self.nodes.iter();
        nodes.all(|node| node.store.record.remainder.is_none())
    }

    /// Returns true if the current migration has reasons to wait.
    fn promises(&self) -> bool {
        let Some(plan) = self.planned() else {
            return false;
        };
        let changes = |PlannedChange { change, .. }: PlannedChange| {
            change.sla.flatten().is_some() || change.max_bandwidth.flatten().is_some()
        };
        self.nodes[self.course.source].outgoing
            && (plan.options.sla.is_some()
                // Unthrottled writes of the guest count towards the limit, and delay copies.
                || plan.options.max_bandwidth.is_some()
                || plan.options.interface_budget.is_some()
                || plan.change.is_some_and(changes))
    }

    fn has_settled(&self) -> bool {
        let at_rest = |node: &Node| {
            !node.outgoing && node.sessions.migration.is_none() && node.is_up() && node.is_idle()
        };
        let owners = self.nodes.iter().filter(|node| node.serves()).count();
        self.guest.outstanding().next().is_none()
            && owners == 1
            && self.is_whole()
            && self.nodes.iter().all(at_rest)
    }

    fn fail_to_settle(&mut self) {
        let stuck = self.guest.outstanding();
        let stuck: Vec<_> = stuck.map(|o| (name(o.node), o.operation)).collect();
        let nodes = self.nodes.each_ref().map(|node| {
            let controller = node.controller.as_ref();
            let in_flight = controller.map(Controller::requests_in_flight);
            let (record, sessions) = (node.store.record, &node.sessions);
            let state = (node.is_idle(), node.serves(), in_flight, node.progress());
            format!("{record:?}, {sessions:?}, {state:?}")
        });
        let claim = if stuck.is_empty() {
            "a migration comes to its end, and one node serves, and has everything"
        } else {
            "every request is answered"
        };
        self.fail(claim, || format!("unanswered: {stuck:?}; nodes: {nodes:?}"));
    }

    fn check_owner(&mut self) {
        let Some(owner) = (0..2).find(|node| self.nodes[*node].serves()) else {
            let records = self.nodes.each_ref().map(|node| node.store.record);
            return self.fail("after everything one node serves", || {
                format!("{records:?}")
            });
        };
        let now = self.now;
        for sector in 0..self.plan.sectors {
            let value = self.nodes[owner].disk.current[sector as usize];
            let claim = "the owner holds every acknowledged write";
            self.check_sector(claim, sector, value, now);
            if !self.holds() {
                return;
            }
        }
        self.reached(Reached::Settled);
    }
}
