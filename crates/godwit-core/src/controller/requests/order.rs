//! The order of overlapping writes, and of writes and chunks.

use crate::controller::cx::Cx;
use crate::controller::requests::slots::{TagList, WorkStage};
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::transfer::window::{ChunkKind, ChunkState};
use crate::planted::PlantedBug;
use crate::request::RequestTag;
use crate::units::Extent;
use crate::write_table::Entry;

impl Cx {
    /// Enters a slot's write into the order of writes.
    #[inline]
    pub(in crate::controller) fn join(&mut self, tag: RequestTag) {
        let slot = &mut self.slots[tag];
        if let (true, Some(extent)) = (slot.is_write(), slot.extent) {
            slot.registered = true;
            let sequence = slot.sequence;
            self.table.insert(Entry {
                extent,
                sequence,
                tag,
            });
        }
    }

    /// Takes a slot's write out of the order of writes, if present; its waiters go on waiting. Returns the write's
    /// extent.
    #[inline]
    pub(in crate::controller) fn withdraw(&mut self, tag: RequestTag) -> Option<Extent> {
        let slot = &mut self.slots[tag];
        let extent = slot.extent.filter(|_| slot.registered)?;
        slot.registered = false;
        self.table.remove(tag, extent);
        Some(extent)
    }

    /// Queues a slot's work behind an earlier overlapping write, if there is one; returns true if so.
    #[inline]
    pub(super) fn waits_for_write(&mut self, tag: RequestTag, extent: Extent) -> bool {
        // While a disk comes back to this node, its clients' requests go to the owner, whose double writes arrive here
        // as frames. Such frames must not wait for the requests. Pulled data and a guest's writes have no order: each
        // waits for the other only while the other is at the disk, because a write may itself wait for pulled data.
        let slots = &self.slots;
        let slot = &slots[tag];
        let (sequence, is_request, pulled) = (slot.sequence, slot.is_request(), slot.is_pulled());
        let earlier = self.table.find(extent, |entry| {
            let other = &slots[entry.tag];
            if other.is_request() == is_request {
                entry.sequence < sequence
            } else {
                (pulled || other.is_pulled()) && other.is_at_disk()
            }
        });
        if let Some(blocker) = earlier {
            self.slots[tag].stage = WorkStage::Waiting;
            self.slots.wait_for(blocker, tag);
        }
        earlier.is_some()
    }
}

impl Outgoing {
    /// Queues a slot's write behind the chunk that locks its addresses, if there is one and the write has to wait for
    /// the chunk; returns true if so.
    #[inline]
    pub(super) fn waits_for_chunk(&mut self, cx: &mut Cx, tag: RequestTag, extent: Extent) -> bool {
        let slot = &cx.slots[tag];
        if !slot.is_write() || slot.unlocked || cx.has_bug(PlantedBug::SkipWindowLock) {
            return false;
        }
        let is_request = slot.is_request();
        let ignores_locks = cx.has_bug(PlantedBug::MirrorUnlocked);
        let Some(source) = &mut self.source else {
            return false;
        };
        if ignores_locks && source.mirrors() {
            return false;
        }
        let copies = source.is_copying_pass();
        let passes = is_request && source.passes_chunks();
        let Some(chunk) = source.window.lock_over(extent) else {
            return false;
        };
        // A chunk that waits for writes to finish would wait forever if more writes came. A hole under examination
        // would no longer be a hole, and a written hole would be compared again at its whole length.
        if passes
            && (copies || chunk.kind == ChunkKind::Data)
            && !matches!(chunk.state, ChunkState::Quiescing | ChunkState::Looking)
        {
            cx.slots[tag].unlocked = copies;
            return false;
        }
        cx.slots[tag].stage = WorkStage::Locked;
        cx.slots.push(&mut chunk.waiters, tag);
        self.watch(cx, tag);
        true
    }

    /// Restarts a forwarded request. The request is no longer under way, so a waiting chunk may be read; otherwise the
    /// request and the chunk would wait for each other.
    pub(in crate::controller) fn start_over(&mut self, cx: &mut Cx, tag: RequestTag) {
        let slot = &mut cx.slots[tag];
        slot.stage = WorkStage::Waiting;
        if let Some(extent) = slot.extent {
            self.writes_left(cx, extent);
        }
        cx.ready.push_back(tag);
    }

    /// Takes a finished slot out of the order of writes and wakes its waiters.
    #[inline]
    pub(in crate::controller) fn leave(&mut self, cx: &mut Cx, tag: RequestTag) {
        let mut waiters = core::mem::replace(&mut cx.slots[tag].waiters, TagList::EMPTY);
        if let Some(extent) = cx.withdraw(tag) {
            self.writes_left(cx, extent);
        }
        let result = cx.slots[tag].result;
        while let Some(waiter) = cx.slots.pop(&mut waiters) {
            if cx.slots[waiter].combined {
                cx.slots[waiter].result = result;
            }
            cx.ready.push_back(waiter);
        }
    }
}
