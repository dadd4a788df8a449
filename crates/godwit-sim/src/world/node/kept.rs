//! Writes kept apart from a node's disk.

use std::collections::VecDeque;

use godwit_core::action::DiskOperation;

use crate::disk::Data;

/// A kept write.
#[derive(Clone, Debug)]
pub(crate) struct KeptWrite {
    /// Checkpoint that the write is applied with.
    pub(crate) epoch: u64,
    /// [`DiskOperation::Write`] or [`DiskOperation::WriteZeroes`].
    pub(crate) operation: DiskOperation,
    pub(crate) data: Data,
}

/// The kept writes of a process, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    waiting: VecDeque<KeptWrite>,
    /// The writes being applied, one at a time; empty unless the controller waits for their end.
    applying: Option<VecDeque<KeptWrite>>,
}

impl Kept {
    pub(crate) fn push(&mut self, write: KeptWrite) {
        self.waiting.push_back(write);
    }

    /// Begins to apply the writes up to this epoch.
    pub(crate) fn begin(&mut self, through: u64) {
        let end = self.waiting.partition_point(|it| it.epoch <= through);
        self.applying = Some(self.waiting.drain(..end).collect());
    }

    /// Returns the next write to apply.
    pub(crate) fn next(&mut self) -> Option<KeptWrite> {
        self.applying.as_mut()?.pop_front()
    }

    pub(crate) fn end(&mut self) {
        self.applying = None;
    }

    pub(crate) const fn is_applying(&self) -> bool {
        self.applying.is_some()
    }

    pub(crate) fn drop_waiting(&mut self) {
        self.waiting.clear();
    }
}
