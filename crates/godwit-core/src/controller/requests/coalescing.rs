//! Writes of the same addresses that wait for each other are carried out as one.
//!
//! Overlapping writes are carried out one after another, so that both disks see them in the same
//! order, and each is a whole round to the destination. A guest that writes one hot block more often
//! than a round takes would wait ever longer. All that wait are under way at once, though, so any
//! order of them is allowed, and none but the last can be seen.

use crate::controller::Controller;
use crate::controller::requests::slots::{TagList, Work};
use crate::planted::PlantedBug;
use crate::request::{Operation, RequestTag};

impl Controller {
    /// The turn of a write that had to wait has come: of all that wait to write exactly its extent,
    /// the newest takes its place in the order of writes, and the others, which it overwrites, are
    /// answered as it is. It is made durable if one of them asked for that. Returns the write that
    /// is to be carried out; the rest wait for it.
    pub(in crate::controller) fn combine(&mut self, first: RequestTag) -> RequestTag {
        let Work::Request {
            operation: Operation::Write { extent, mut fua },
            ..
        } = self.slots[first].work
        else {
            return first;
        };
        // One that came when a client had attached must not take the place of one from before, and so
        // overtake what that client may have left between them.
        let era = self.slots[first].era;
        let mut others = TagList::EMPTY;
        let mut newest = first;
        while let Some(tag) = self.table.find(extent, |entry| {
            let slot = &self.slots[entry.tag];
            entry.extent == extent
                && slot.era == era
                && slot.plain_write().is_some()
                && slot.waits_for_another()
        }) {
            self.slots.stop_waiting(tag);
            self.withdraw(tag);
            let slot = &self.slots[tag];
            fua |= slot.plain_write() == Some(true) && !self.has_bug(PlantedBug::CombineForgetsFua);
            if slot.sequence > self.slots[newest].sequence {
                newest = tag;
            }
            self.slots.push(&mut others, tag);
        }
        if newest == first {
            return first;
        }
        self.withdraw(first);
        self.slots.push(&mut others, first);
        if !self.has_bug(PlantedBug::CombineOutOfPlace) {
            self.slots.change_places(newest, first);
        }
        while let Some(tag) = self.slots.pop(&mut others) {
            if tag != newest {
                self.slots[tag].combined = true;
                self.slots.wait_for(newest, tag);
            }
        }
        let slot = &mut self.slots[newest];
        if let Work::Request { operation, .. } = &mut slot.work {
            *operation = Operation::Write { extent, fua };
        }
        self.join(newest);
        newest
    }
}
