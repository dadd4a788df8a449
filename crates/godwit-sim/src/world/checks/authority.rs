//! One authority: checks of the serving node.

use godwit_core::authority::Ownership;
use godwit_core::units::Epoch;
use godwit_core::wire::Message;

use crate::run::coverage::Reached;
use crate::world::node::StoredMissing;
use crate::world::{World, name};

/// The node that has served each epoch.
#[derive(Debug, Default)]
pub(crate) struct Epochs(Vec<Option<usize>>);

impl Epochs {
    /// Records that a node serves in an epoch. Returns another node, if one has already served in the epoch.
    fn serves(&mut self, epoch: Epoch, node: usize) -> Option<usize> {
        let epoch = epoch.0 as usize;
        if self.0.len() <= epoch {
            self.0.resize(epoch + 1, None);
        }
        let served = self.0[epoch].get_or_insert(node);
        (*served != node).then_some(*served)
    }
}

impl World {
    /// Checks for a single serving node.
    pub(crate) fn check_authority(&mut self, node: usize, serves: bool) {
        if serves && self.nodes[1 - node].serves() && !self.is_unheard(1 - self.machine()) {
            let records = self.nodes.each_ref().map(|node| node.store.record);
            self.fail("at most one node serves", || format!("{records:?}"));
        }
    }

    /// Checks that a node may serve when guest I/O reaches its disk.
    pub(crate) fn check_may_serve(&mut self, node: usize) {
        let [record, other] = [node, 1 - node].map(|node| self.nodes[node].store.record);
        let may = match record.ownership {
            Ownership::Serving => true,
            // A disk durably given away by the other node may be served at once.
            Ownership::Accepted { migration } => {
                self.reached(Reached::ServedBeforeStored);
                other.ownership == Ownership::Relinquished { migration }
                    && other.epoch == record.epoch
            }
            _ => false,
        };
        if !may {
            self.fail(
                "a node serves only what it has durably stored that it owns, or that it accepted and \
                 the other gave away",
                || {
                    let name = name(node);
                    format!("{name} has stored {record:?}, the other one {other:?}")
                },
            );
        } else if let Some(other) = self.epochs.serves(record.epoch, node) {
            self.fail("an epoch is served by one node", || {
                format!(
                    "epoch {} by {} and {}",
                    record.epoch,
                    name(other),
                    name(node)
                )
            });
        }
    }

    pub(crate) fn check_records(&mut self) {
        let owner = |node: usize| self.nodes[node].store.record.ownership == Ownership::Serving;
        // A primary may come back after its backup has taken the disk, in the next epoch.
        let taken = self.protection.is_some()
            && self.nodes[0].store.record.epoch != self.nodes[1].store.record.epoch;
        if owner(0) && owner(1) && !taken {
            let records = self.nodes.each_ref().map(|node| node.store.record);
            self.fail("at most one node has stored that it owns the disk", || {
                format!("{records:?}")
            });
        }
    }

    /// Checks that the authority claimed in a message is stored.
    pub(crate) fn check_promise_is_stored(&mut self, node: usize, message: &Message) {
        let record = self.nodes[node].store.record;
        let stored = match *message {
            Message::Prepared { migration } => {
                record.ownership == Ownership::Accepted { migration }
            }
            Message::Commit { migration, .. } => {
                record.ownership == Ownership::Relinquished { migration }
                    || record.ownership == Ownership::Departed { migration }
            }
            Message::Committed { .. } => !matches!(
                record.ownership,
                Ownership::Accepted { .. } | Ownership::Vacant
            ),
            Message::Whole { migration } => {
                let missing = self.nodes[node].store.missing.as_ref();
                record.remainder != Some(migration) || missing.is_some_and(StoredMissing::is_repaid)
            }
            _ => true,
        };
        if !stored {
            self.fail(
                "a step of the switchover is stored before it is said",
                || format!("{} says {message:?} and has stored {record:?}", name(node)),
            );
        }
    }
}
