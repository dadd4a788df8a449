//! The body of a primary.

use godwit_core::authority::Ownership;
use godwit_core::event::AbortReason;
use godwit_protect::{Backup, Primary};

use super::{Role, member};
use crate::plan::Moment;
use crate::run::coverage::Reached;
use crate::world::World;

impl World {
    /// Prepares both nodes for a synchronization by this source. Returns false if one of them is not ready.
    pub(crate) fn may_sync(&mut self, source: usize) -> bool {
        let Some(protection) = &self.protection else {
            return true;
        };
        let other = 1 - source;
        if !protection.is_alone(source) {
            return false;
        }
        let was_primary = matches!(protection.roles[other], Some(Role::Primary(_)));
        let record = self.nodes[source].store.record;
        if record.ownership != Ownership::Serving {
            return false;
        }
        if was_primary {
            if self.yields(other) {
                return false;
            }
            self.reached(Reached::Yielded);
            self.become_backup(other);
            self.answer_primary();
        } else {
            self.with(other, |c, now| c.cancel(now, AbortReason::Cancelled));
            self.answer_primary();
            self.with_backup(other, |backup| {
                backup.resync();
                Vec::new()
            });
        }
        true
    }

    /// Lets a former primary yield its disk to the other node, which has shown that it durably owns the disk. Returns true
    /// until that is stored.
    pub(super) fn yields(&mut self, node: usize) -> bool {
        let own = self.nodes[node].store.record;
        let owner = self.nodes[1 - node].store.record;
        let taken = own.ownership == Ownership::Serving
            && owner.ownership == Ownership::Serving
            && owner.epoch > own.epoch;
        if taken && self.nodes[node].is_up() {
            self.end_machine(node);
            self.with(node, |c, now| c.yield_to(now, owner.epoch));
        }
        taken
    }

    /// Lets a former primary yield once everything has come to rest.
    pub(crate) fn yield_the_rest(&mut self) {
        if self.protection.is_some() {
            (0..2).for_each(|node| _ = self.yields(node));
        }
    }

    /// Lets the backup answer the primary, because a synchronization begins.
    pub(super) const fn answer_primary(&mut self) {
        if let Some(protection) = &mut self.protection {
            protection.severed = None;
        }
    }

    /// Makes a node a backup that has nothing.
    pub(super) fn become_backup(&mut self, node: usize) {
        let Some(protection) = &mut self.protection else {
            return;
        };
        let known = match &protection.roles[node] {
            Some(Role::Primary(primary)) => primary.record().known,
            Some(Role::Backup(backup)) => backup.known(),
            None => protection.known[node],
        };
        let (backup, orders) = Backup::new(member(node), known);
        protection.records[node] = None;
        protection.known[node] = known;
        protection.lost_power[node] = false;
        protection.roles[node] = Some(Role::Backup(backup));
        self.obey(node, orders);
    }

    /// Notes that the destination follows a source.
    pub(crate) fn disk_followed(&mut self, node: usize) {
        self.reached(Reached::Followed);
        self.check_followed(node);
        if self.settling {
            self.with(node, |c, now| c.go_alone(now));
        } else if self.is_checkpointed() {
            self.start_checkpoints(node);
        } else {
            self.with_primary(node, Primary::in_sync);
            self.check_lease(node);
        }
    }

    /// Notes that a source has lost its follower.
    pub(crate) fn disk_severed(&mut self, node: usize) {
        self.reached(Reached::Severed);
        self.moment(Moment::Severed);
        if self.protection.as_ref().is_some_and(|it| it.is_alone(node)) {
            // The witness knows of no pair.
            self.end_checkpoints(node);
            self.with(node, |c, now| c.go_alone(now));
        } else {
            self.with_primary(node, Primary::backup_lost);
        }
    }

    /// Ends the protection: the primary goes on alone.
    pub(crate) fn end_protection(&mut self) {
        for node in 0..2 {
            let leaves = self.nodes[node].outgoing;
            if leaves && self.protection.as_ref().is_some_and(|it| it.is_alone(node)) {
                self.end_checkpoints(node);
                self.with(node, |c, now| c.go_alone(now));
            }
            self.with_primary(node, Primary::backup_lost);
        }
    }

    /// Returns true if a node's power loss has to wait for the decision who goes on.
    pub(crate) fn defers_power_loss(&mut self, node: usize) -> bool {
        let Some(protection) = &mut self.protection else {
            return false;
        };
        let defers = !protection.is_alone(node);
        if defers {
            protection.lost_power[node] = true;
            self.reached(Reached::PowerLossProtected);
        }
        defers
    }
}
