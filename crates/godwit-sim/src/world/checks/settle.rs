//! The end of a run: all faults heal, and every acknowledged write must be there.

use godwit_core::event::AbortReason;

use crate::plan::PlannedChange;
use crate::run::coverage::Reached;
use crate::world::MILLISECOND;
use crate::world::World;
use crate::world::name;

/// Time within which everything comes to an end.
const SETTLED_WITHIN: u64 = 8_000 * MILLISECOND;

/// Longest wait of the operator for a migration with a promise or a bandwidth limit, before cancelling it.
const PATIENCE: u64 = 1_500 * MILLISECOND;

impl World {
    /// Ends all faults; then exactly one node serves and holds every acknowledged write.
    pub(in crate::world) fn settle(&mut self) {
        self.settling = true;
        let (deadline, patience) = (self.now + SETTLED_WITHIN, self.now + PATIENCE);
        self.note(|| "   everything heals".to_owned());
        for node in &mut self.nodes {
            node.disk.failing = None;
            node.disk.slow.1 = 0;
            node.slow_store.1 = 0;
        }
        for direction in &mut self.network.directions {
            direction.slow.1 = 0;
            direction.traffic.1 = 0;
        }
        while self.violation.is_none() && !self.has_settled() {
            let until = self.now + 5 * MILLISECOND;
            while self.violation.is_none() && self.step(until) {}
            if self.now > patience && self.promises() {
                let source = self.source;
                self.with(source, |controller, now| {
                    controller.cancel(now, AbortReason::Cancelled)
                });
            }
            if self.now > deadline {
                return self.fail_to_settle();
            }
        }
        if self.violation.is_some() {
            return;
        }
        self.check_owner();
        let owner = (0..2).find(|node| self.nodes[*node].serves());
        if let (Some(owner), true, None) = (owner, self.plan.power_loss_at_end, &self.violation) {
            self.now += 1;
            self.crash(owner, 1, true);
            self.now += 1;
            self.restart(owner);
            self.check_owner();
        }
    }

    /// Returns true if the current migration has reasons to wait.
    fn promises(&self) -> bool {
        let planned = self.next_migration.checked_sub(1);
        let Some(plan) = planned.map(|last| self.plan.migrations[last]) else {
            return false;
        };
        let changes = |PlannedChange { change, .. }: PlannedChange| {
            change.sla.flatten().is_some() || change.max_bandwidth.flatten().is_some()
        };
        self.nodes[self.source].outgoing
            && (plan.options.sla.is_some()
                // Unthrottled writes of the guest count towards the limit, and delay copies.
                || plan.options.max_bandwidth.is_some()
                || plan.options.interface_budget.is_some()
                || plan.change.is_some_and(changes))
    }

    fn has_settled(&self) -> bool {
        let migrating = self
            .nodes
            .iter()
            .any(|node| node.outgoing || node.migration.is_some());
        let owners = self.nodes.iter().filter(|node| node.serves()).count();
        self.guest.outstanding().next().is_none()
            && !migrating
            && owners == 1
            && self
                .nodes
                .iter()
                .all(|node| node.record.remainder.is_none())
            && self.nodes.iter().all(|node| node.is_up() && node.is_idle())
    }

    fn fail_to_settle(&mut self) {
        let stuck: Vec<_> = self
            .guest
            .outstanding()
            .map(|o| (name(o.node), o.operation))
            .collect();
        let nodes: Vec<_> = self
            .nodes
            .iter()
            .map(|node| {
                (
                    node.record,
                    node.migration,
                    node.forward,
                    node.is_idle(),
                    node.controller.as_ref().map(|controller| {
                        (
                            controller.serves(),
                            controller.requests_in_flight(),
                            controller.progress(),
                        )
                    }),
                )
            })
            .collect();
        let claim = if stuck.is_empty() {
            "a migration comes to its end, and one node serves, and has everything"
        } else {
            "every request is answered"
        };
        self.fail(claim, || format!("unanswered: {stuck:?}; nodes: {nodes:?}"));
    }

    fn check_owner(&mut self) {
        let Some(owner) = (0..2).find(|node| self.nodes[*node].serves()) else {
            let records = self.nodes.each_ref().map(|node| node.record);
            return self.fail("after everything one node serves", || {
                format!("{records:?}")
            });
        };
        let now = self.now;
        for sector in 0..self.plan.sectors {
            let value = self.nodes[owner].disk.current[sector as usize];
            let claim = "the owner holds every acknowledged write";
            self.check_sector(claim, sector, value, now);
            if self.violation.is_some() {
                return;
            }
        }
        self.reached(Reached::Settled);
    }
}
