//! The stored activity log of a node, and the return of a node by its log.

use godwit_core::OlderCopy;
use godwit_core::authority::Ownership;
use godwit_core::units::{Lba, Sectors};

use crate::run::coverage::Reached;
use crate::world::node::Node;
use crate::world::{World, name};

impl World {
    /// Stores a node's activity log, or that there is none.
    pub(crate) fn store_activity(&mut self, node: usize) {
        let log = self.nodes[node].controller.as_ref();
        let log = log.and_then(|controller| controller.activity_to_store());
        let store = &mut self.nodes[node].store;
        if store.storing_activity.replace(log).is_some() {
            return self.fail("one activity log is stored at a time", || {
                name(node).to_string()
            });
        }
        let delay = store.latency(&mut self.random.store);
        self.schedule_own(node, delay, move |world| world.activity_stored(node));
    }

    fn activity_stored(&mut self, node: usize) {
        let store = &mut self.nodes[node].store;
        let Some(log) = store.storing_activity.take() else {
            return;
        };
        store.activity = log;
        self.reached(Reached::ActivityStored);
        self.with(node, |c, now| c.handle_activity_stored(now, true));
    }

    /// Hands the stored activity log to a starting process that may own the disk.
    pub(crate) fn restore_activity(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        if let (Some(log), Ownership::Serving, Some(controller)) = (
            &it.store.activity,
            it.store.record.ownership,
            &mut it.controller,
        ) {
            controller.restore_activity(log);
        }
    }

    /// Returns the older copy of a backup by its activity log, and adds the log to the writes that the source knows.
    pub(crate) fn copy_by_log(&mut self, backup: usize) -> OlderCopy {
        let store = &self.nodes[backup].store;
        let vacant = store.record.ownership == Ownership::Vacant;
        let Some(log) = store.activity.clone().filter(|_| vacant) else {
            return OlderCopy::Unknown;
        };
        self.reached(Reached::ReturnedByLog);
        self.with(1 - backup, |c, _| c.may_differ(&log));
        OlderCopy::Since(log.of)
    }

    /// Checks that a disk is the same at both nodes when it comes to be followed, if no write is under way.
    pub(super) fn check_followed(&mut self, source: usize) {
        let writes = |node: &Node| !node.operations.is_empty() || !node.buffers.all_free();
        // The destination may have died meanwhile, and lost writes with the power.
        let sessions = self.nodes.each_ref().map(|node| node.sessions.migration);
        let apart = sessions[0] != sessions[1];
        if apart || self.guest.outstanding().next().is_some() || self.nodes.iter().any(writes) {
            return;
        }
        self.reached(Reached::FollowedEqual);
        let [ours, theirs] = [source, 1 - source].map(|node| &self.nodes[node].disk.current);
        let Sectors(sectors) = Sectors(self.plan.sectors);
        let differs =
            (0..sectors).find(|sector| ours[*sector as usize] != theirs[*sector as usize]);
        if let Some(sector) = differs {
            let (ours, theirs) = (ours[sector as usize], theirs[sector as usize]);
            let writes = self.history.describe(sector);
            self.fail("the images are equal when a disk is followed", || {
                format!(
                    "{:?} holds #{ours} here and #{theirs} there; writes:{writes}",
                    Lba(sector)
                )
            });
        }
    }
}
