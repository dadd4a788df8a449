//! Disk operations in flight.

use godwit_core::action::{DiskOperation, DiskTag};
use godwit_core::request::RequestError;

use crate::disk::{Data, Disk, Remains};
use crate::random::Random;

/// A disk operation in flight.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) tag: DiskTag,
    pub(crate) operation: DiskOperation,
    /// Data to write, or data already read.
    pub(crate) data: Data,
    pub(crate) error: Option<RequestError>,
    /// True if the operation takes effect at the start instead of the end; either may happen.
    pub(crate) early: bool,
    /// Last write made durable by a flush.
    pub(crate) mark: u32,
    pub(crate) started: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Operations {
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
}

impl Operations {
    pub(crate) fn has(&self, tag: DiskTag) -> bool {
        self.pending.iter().flatten().any(|it| it.tag == tag)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.iter().all(Option::is_none)
    }

    /// Adds an operation. Returns its place.
    pub(crate) fn begin(&mut self, operation: Pending) -> usize {
        let place = self.free.pop().unwrap_or(self.pending.len());
        if place == self.pending.len() {
            self.pending.push(None);
        }
        self.pending[place] = Some(operation);
        place
    }

    pub(crate) fn end(&mut self, place: usize) -> Option<Pending> {
        let ended = self.pending[place].take()?;
        self.free.push(place);
        Some(ended)
    }

    /// Applies the end of the process to its operations. Returns the number of torn writes.
    pub(crate) fn interrupt(self, disk: &mut Disk, random: &mut Random) -> u64 {
        let mut torn = 0;
        for pending in self.pending.into_iter().flatten() {
            if pending.early || matches!(pending.operation, DiskOperation::Read { .. }) {
                continue;
            }
            match Remains::draw(random) {
                Remains::Nothing => {}
                Remains::Everything => disk.store(&pending.operation, &pending.data),
                Remains::Torn => {
                    torn += u64::from(disk.tear(&pending.operation, &pending.data, random));
                }
            }
        }
        torn
    }
}
