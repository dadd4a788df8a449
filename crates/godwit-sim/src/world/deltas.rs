//! State of the bodies for sending only part of a returning disk. The former owner remembers the migration by which the
//! disk left, while the image is unchanged. The owner remembers the writes since.

use godwit_core::authority::Ownership;
use godwit_core::units::{MigrationId, Sectors};
use godwit_core::{DeltaBy, OlderCopy, Written};

use crate::plan::OlderCopyPlan;
use crate::run::coverage::Reached;
use crate::world::World;

/// The writes since the disk came, stored by an owner's process when ending.
#[derive(Clone, Debug)]
pub(super) struct StoredWritten {
    since: MigrationId,
    words: Vec<u64>,
}

impl World {
    /// Returns the description of a node's older copy, for a disk about to come.
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

    /// Ends a process. An orderly end stores the writes since the disk came; a crash or a power loss leaves nothing.
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

    /// Hands the stored writes to a starting process and removes them from storage.
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

    /// Counts the migration's use of an older copy.
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
