//! Combination of waiting writes to the same addresses.
//!
//! Overlapping writes are carried out one after another, so that both disks see the same order. Each write is a whole
//! round trip to the destination. A guest that writes one hot block more often than a round trip takes would wait ever
//! longer. But all waiting writes are under way at once: any order is allowed, and only the last write can be seen.

use crate::controller::cx::Cx;
use crate::controller::requests::slots::{TagList, Work};
use crate::planted::PlantedBug;
use crate::request::{Operation, RequestTag};

impl Cx {
    /// Combines the writes that wait for exactly the extent of `first`, whose turn has come. The newest write takes the
    /// place of `first` in the order of writes. The others, overwritten by the newest, get the newest's answer. The
    /// newest is made durable if any of them asked for durability. Returns the write to carry out; the rest wait for
    /// this write.
    pub(in crate::controller) fn combine(&mut self, first: RequestTag) -> RequestTag {
        let Work::Request {
            operation: Operation::Write { extent, mut fua },
            ..
        } = self.slots[first].work
        else {
            return first;
        };
        // A write from after a client's attachment must not take the place of an earlier write: the later write would
        // overtake this client's own writes in between.
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
