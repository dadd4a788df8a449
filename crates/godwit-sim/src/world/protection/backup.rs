//! The body of a backup.

use godwit_core::event::Phase;
use godwit_protect::{Backup, BackupState, Primary};

use super::{Role, member};
use crate::plan::Moment;
use crate::run::coverage::Reached;
use crate::world::{World, name};

impl World {
    /// Notes that every acknowledged write is at the destination.
    pub(crate) fn disk_follows(&mut self, node: usize) {
        if self.is_checkpointed() {
            return self.await_checkpoints(node);
        }
        self.with_backup(node, |backup| {
            backup.in_sync();
            Vec::new()
        });
    }

    /// Notes the end of a migration that brought a disk here.
    pub(crate) fn follower_ended(&mut self, node: usize) {
        let took = match self.protection.as_ref().map(|it| &it.roles[node]) {
            Some(Some(Role::Backup(backup))) => backup.state() == BackupState::Took,
            _ => return,
        };
        if took {
            return self.become_backup(node);
        }
        self.with_backup(node, |backup| {
            backup.resync();
            Vec::new()
        });
    }

    /// Lets the backup take a living primary for lost.
    pub(super) fn suspect(&mut self) {
        let node = 1 - self.machine();
        if self.nodes[node].is_up() && !self.settling {
            self.reached(Reached::Suspected);
            self.with_backup(node, Backup::primary_lost);
        }
    }

    /// Notes that a node has lost its connections to the other one.
    pub(crate) fn lose_primary(&mut self, node: usize) {
        self.with_backup(node, Backup::primary_lost);
    }

    pub(super) fn sever(&mut self, node: usize) {
        self.with(node, |c, now| c.sever(now));
        self.sever_checkpoints(node);
        if let Some(protection) = &mut self.protection {
            protection.severed.get_or_insert(self.now);
        }
        // The backup answers no ping from now on, and the primary notices within its lease.
        let lease = self.protection_plan().map_or(0, |plan| plan.lease);
        let primary = 1 - node;
        self.schedule_own(primary, lease, move |world| world.check_lease(primary));
    }

    /// Lets a primary hold its answers if the backup has been silent for longer than the lease.
    pub(super) fn check_lease(&mut self, node: usize) {
        let (Some(plan), Some(protection)) = (self.protection_plan(), &self.protection) else {
            return;
        };
        let silent = protection.severed.map(|since| self.now - since);
        if silent.is_some_and(|silent| silent >= plan.lease) {
            self.with_primary(node, Primary::backup_lost);
        }
    }

    /// Takes the disk once the primary's lease is over. With checkpoints there is no lease.
    pub(super) fn take_when_due(&mut self, node: usize) {
        let (Some(plan), Some(protection)) = (self.protection_plan(), &self.protection) else {
            return;
        };
        let patience = match plan.checkpoints {
            Some(_) => 0,
            None => plan.patience,
        };
        let due = protection.severed.unwrap_or(self.now) + patience;
        let delay = due.saturating_sub(self.now).max(1);
        self.schedule_own(node, delay, move |world| {
            if world.with(node, |c, now| c.take(now)) != Some(Ok(())) {
                world.become_backup(node);
            }
        });
    }

    /// Makes a backup that has durably taken the disk the primary.
    pub(crate) fn disk_taken(&mut self, node: usize) {
        let Some(protection) = &mut self.protection else {
            return;
        };
        let Some(Role::Backup(backup)) = &protection.roles[node] else {
            return self.fail("only a backup takes a disk", || name(node).to_string());
        };
        let primary = Primary::new(member(node), backup.known());
        protection.records[node] = Some(primary.record());
        protection.roles[node] = Some(Role::Primary(primary));
        protection.machine = node;
        self.reached(Reached::Taken);
        self.return_to_checkpoint(node);
        // The machine at the other node ends once that node hears of this; its requests are void from now on.
        let abandoned = self.leave(1 - node, 1);
        self.guest.left.extend(abandoned);
        self.nodes[1 - node].buffers.desert();
        self.course.source = node;
        self.course.phase = Some(Phase::Completed);
        self.course.end(self.now);
        if let Some(session) = self.nodes[node].sessions.migration.take() {
            self.close(session, node);
        }
        self.moment(Moment::Taken);
    }
}
