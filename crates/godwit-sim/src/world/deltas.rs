//! What bodies keep so that a disk that comes back need not be sent whole: at the node that it left, that its image is
//! what the disk was then; at its owner, what was written since.

use godwit_core::authority::Ownership;
use godwit_core::units::{MigrationId, Sectors};
use godwit_core::{DeltaBy, OlderCopy, Written};

use crate::plan::OlderCopyPlan;
use crate::run::coverage::Reached;
use crate::world::World;

/// What an owner's process has stored at its end of what was written since the disk came.
#[derive(Clone, Debug)]
pub(super) struct StoredWritten {
    since: MigrationId,
    words: Vec<u64>,
}

impl World {
    /// What a node that is about to get the disk tells of what it has.
    pub(super) fn older_copy(&self, node: usize, planned: OlderCopyPlan) -> OlderCopy {
        let it = &self.nodes[node];
        let had_it = matches!(it.record.ownership, Ownership::Departed { .. });
        match (planned, it.base) {
            (OlderCopyPlan::Use, Some(migration)) => OlderCopy::Since(migration),
            (OlderCopyPlan::Use | OlderCopyPlan::Compare, _) if had_it => OlderCopy::Unknown,
            (OlderCopyPlan::Ignore, _) => OlderCopy::Zeroes,
            _ if it.disk.current.iter().all(|value| *value == 0) => OlderCopy::Zeroes,
            _ => OlderCopy::None,
        }
    }

    /// A process ends. One that ends in order stores what was written; one that does not, or whose host loses its
    /// power, leaves nothing.
    pub(super) fn end_written(&mut self, node: usize, power: bool) {
        let in_order = !power && self.delta_random.below(2) == 0;
        let it = &mut self.nodes[node];
        let written = it
            .controller
            .as_ref()
            .filter(|controller| in_order && controller.serves())
            .and_then(|controller| controller.written());
        it.written = written.map(|written| StoredWritten {
            since: written.since(),
            words: written.words().collect(),
        });
    }

    /// A process that starts takes what was stored, so that no later one finds it.
    pub(super) fn restore_written(&mut self, node: usize) {
        let capacity = Sectors(self.plan.sectors);
        let it = &mut self.nodes[node];
        let written = it
            .written
            .take()
            .and_then(|stored| Written::from_words(stored.since, capacity, &stored.words));
        if let (Some(written), Some(controller)) = (written, &mut it.controller)
            && controller.serves()
        {
            controller.restore_written(written);
            self.reached(Reached::WrittenRestored);
        }
    }

    /// Counts what a migration left out by which the disk has moved.
    pub(super) fn count_delta(&mut self, node: usize) {
        let delta = self.nodes[node]
            .controller
            .as_ref()
            .and_then(|controller| controller.progress()?.delta);
        let Some(delta) = delta.filter(|delta| delta.bytes_skipped > 0) else {
            return;
        };
        self.reached(match delta.by {
            DeltaBy::Written => Reached::DeltaByWritten,
            DeltaBy::Compared => Reached::DeltaByCompared,
        });
    }
}
