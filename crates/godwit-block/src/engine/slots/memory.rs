//! The memory for the data of an engine.

use godwit_core::action::{DiskOperation, DiskTag, SourceSlot};
use godwit_core::request::RequestTag;
use godwit_core::wire::Message;
use godwit_io::stream::{Keep, Payload};

use crate::engine::disk;
use crate::engine::slots::Slots;
use crate::engine::slots::chunks::Chunks;

/// The memory for the data of requests, frames and reads.
pub(in crate::engine) struct Memory {
    pub(in crate::engine) slots: Slots,
    /// Buffers of the current or last migration from here.
    pub(in crate::engine) chunks: Chunks,
    /// Buffers for the parts that an owner pulls after the disk was given away.
    pub(in crate::engine) owed: Chunks,
}

impl Memory {
    /// Ends the use of a sent payload.
    pub(in crate::engine) fn release(&mut self, payload: Payload) {
        match payload.keep {
            Keep::Slot(tag) => self.slots.release(tag),
            Keep::Chunk { slot, memory } => self.source(slot).release(slot, &memory),
            // The outbox keeps the buffer.
            Keep::Packed(_) => {}
        }
    }

    /// Gives up a peer's frame that was received in part or in full.
    pub(in crate::engine) fn drop_frame(&mut self, message: &Message, tag: RequestTag) {
        if matches!(message, Message::ForwardReply { .. }) {
            self.slots.release(tag);
        } else {
            self.slots.finish(tag);
        }
    }

    /// Returns the buffers that the slot belongs to.
    pub(in crate::engine) const fn source(&mut self, slot: SourceSlot) -> &mut Chunks {
        match slot {
            SourceSlot::Chunk(_) | SourceSlot::Delayed(_) => &mut self.chunks,
            SourceSlot::Pull(_) => &mut self.owed,
        }
    }

    /// Returns a deferred read whose buffer has been sent.
    pub(in crate::engine) fn next_ready(&mut self) -> Option<(SourceSlot, DiskOperation)> {
        self.chunks.next_ready().or_else(|| self.owed.next_ready())
    }

    /// Returns the memory for the `bytes` bytes of a disk operation, and the memory's owner if the owner could go away
    /// before the operation ends; `None` if there is no buffer as long. `pulled` is the slot of a pulled piece.
    pub(in crate::engine) fn place(
        &mut self,
        tag: DiskTag,
        bytes: usize,
        pulled: Option<RequestTag>,
    ) -> Option<(*mut u8, Option<disk::Keep>)> {
        if bytes == 0 {
            return Some((std::ptr::null_mut(), None));
        }
        if let Some(slot) = tag.source_slot() {
            let (pointer, memory) = self.source(slot).buffer(slot, bytes)?;
            return Some((pointer, Some(disk::Keep::Mapping(memory))));
        }
        let request = match tag {
            DiskTag::Request(request) | DiskTag::Replica(request) => request,
            DiskTag::Pulled(_) => pulled?,
            _ => return Some((std::ptr::null_mut(), None)),
        };
        let (pointer, room) = self.slots.address(request, 0)?;
        (room >= bytes).then_some((pointer, None))
    }
}
