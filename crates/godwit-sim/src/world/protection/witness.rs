//! The witness, and the messages to it and from it.

use godwit_protect::{Ask, Grant};

use super::Role;
use crate::world::{World, name};

impl World {
    /// Returns the time that a message to or from the witness takes; `None` if the message is lost.
    pub(super) fn witness_delay(&mut self) -> Option<u64> {
        let plan = self.plan.protection.as_ref()?;
        let random = &mut self.protection.as_mut()?.random;
        let lost = !self.settling && random.permille(plan.witness_loss);
        let delay = random.magnitude(1_000, plan.witness_delay.max(1_001));
        (!lost).then_some(delay)
    }

    pub(super) fn ask_witness(&mut self, node: usize, ask: Ask) {
        let Some(delay) = self.witness_delay() else {
            return;
        };
        // A request may arrive after the end of its process; its answer may not.
        let incarnation = self.nodes[node].incarnation;
        self.schedule(delay, move |world| {
            let Some(protection) = &mut world.protection else {
                return;
            };
            protection.witness = protection.witness.after(&ask);
            let current = protection.witness;
            let Some(delay) = world.witness_delay() else {
                return;
            };
            world.schedule(delay, move |world| {
                if world.nodes[node].incarnation == incarnation && world.nodes[node].is_up() {
                    world.witness_answered(node, &ask, current);
                }
            });
        });
    }

    pub(super) fn witness_answered(&mut self, node: usize, ask: &Ask, current: Grant) {
        self.note(|| format!("{}  granted {current:?}", name(node)));
        self.with_member(node, |role| match role {
            Role::Primary(primary) => primary.answered(ask, current),
            Role::Backup(backup) => backup.answered(ask, current),
        });
    }

    /// Repeats a request to the witness, now and again.
    pub(super) fn ask_again(&mut self, node: usize) {
        let Some(plan) = self.protection_plan() else {
            return;
        };
        self.schedule(plan.retry, move |world| world.ask_again(node));
        if self.nodes[node].is_up() {
            self.with_member(node, |role| match role {
                Role::Primary(primary) => primary.retry(),
                Role::Backup(backup) => backup.retry(),
            });
        }
    }
}
