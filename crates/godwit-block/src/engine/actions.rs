//! Passes requests to the controller, and carries out the controller's actions.

use godwit_core::action::{Action, Content, DiskOperation, DiskTag, SourceSlot};
use godwit_core::event::Event;
use godwit_core::request::{Request, RequestError, RequestTag};
use godwit_core::units::Extent;

use crate::engine::config::EngineEvent;
use crate::engine::disk::Keep;
use crate::engine::run::Engine;
use crate::engine::slots::Owner;
use crate::engine::slots::chunks::Chunks;

impl Engine {
    /// Passes the controller a request of a front end or of a forwarding node.
    pub(super) fn take_request(&mut self, request: Request) {
        self.core.handle_request(self.now, request);
        self.stats.under_way(self.core.requests_in_flight());
    }

    /// Carries out all pending actions of the controller.
    pub(super) fn drain(&mut self) {
        // Before any submission: the kernel's workers keep the priority that they start with.
        self.follow_priority();
        // A failed note must not be followed by an acknowledgement.
        while self.broken.is_none()
            && let Some(action) = self.core.poll_action()
        {
            match action {
                Action::Disk { tag, operation } => self.start_disk(tag, operation),
                Action::Send { class, message } => self.send(class, message),
                Action::SendForwarder { forwarder, message } => {
                    self.send_forwarder(forwarder, message);
                }
                Action::Complete { tag, result } => self.answer(tag, result),
                Action::ReleaseReplica { tag } => self.slots.finish(tag),
                Action::ReleasePulled { slot } => self.release_pulled(slot),
                Action::NoteHere { extent } => self.note_here(extent),
                Action::StoreMissing => self.store_missing(),
                Action::DiscardUnsent { class } => self.discard_unsent(class),
                Action::Persist { record } => self.tell(EngineEvent::Persist(record)),
                Action::Notify(event) => self.notify(event),
            }
        }
    }

    fn start_disk(&mut self, tag: DiskTag, operation: DiskOperation) {
        if let DiskOperation::FindHole { extent } = operation {
            // A system call of a microsecond: no need for the ring.
            let found = Content::Hole(self.disk.hole(extent));
            return self.core.handle_disk_done(self.now, tag, Ok(found));
        }
        if let DiskOperation::FindLongHole { from } = operation {
            let (start, end) = self.disk.long_hole(from);
            let found = Content::LongHole { start, end };
            return self.core.handle_disk_done(self.now, tag, Ok(found));
        }
        if let Some(slot) = tag.source_slot() {
            let buffers = self.source_buffers(slot);
            buffers.begin();
            if buffers.defer(slot, operation) {
                return;
            }
        }
        self.run_disk(tag, operation);
    }

    /// Starts the deferred chunk reads whose buffers have been sent.
    pub(super) fn run_deferred_reads(&mut self) {
        while let Some((slot, operation)) =
            self.chunks.next_ready().or_else(|| self.owed.next_ready())
        {
            self.run_disk(slot.into(), operation);
        }
    }

    /// Returns the buffers that the slot belongs to.
    pub(super) const fn source_buffers(&mut self, slot: SourceSlot) -> &mut Chunks {
        match slot {
            SourceSlot::Chunk(_) | SourceSlot::Delayed(_) => &mut self.chunks,
            SourceSlot::Pull(_) => &mut self.owed,
        }
    }

    /// Ends the deferred reads: their data is no longer needed.
    pub(super) fn drop_deferred_reads(&mut self) {
        while let Some(slot) = self.chunks.cancel_deferred() {
            self.chunks.end();
            self.core
                .handle_disk_done(self.now, slot.into(), Err(RequestError::Io));
        }
    }

    fn run_disk(&mut self, tag: DiskTag, operation: DiskOperation) {
        let needed = match operation {
            DiskOperation::Read { extent, .. } | DiskOperation::Write { extent, .. } => {
                Some(extent)
            }
            DiskOperation::WriteZeroes { .. }
            | DiskOperation::Flush
            | DiskOperation::FindHole { .. }
            | DiskOperation::FindLongHole { .. } => None,
        };
        let bytes = needed.map_or(0, Extent::bytes) as usize;
        let (memory, keep) = match (tag, tag.source_slot()) {
            _ if bytes == 0 => (Some(std::ptr::null_mut()), None),
            (DiskTag::Request(request) | DiskTag::Replica(request), _) => {
                let place = self
                    .slots
                    .address(request, 0)
                    .filter(|&(_, room)| room >= bytes);
                (place.map(|(pointer, _)| pointer), None)
            }
            (_, Some(slot)) => {
                let (pointer, keep) = self.source_buffers(slot).buffer(slot, bytes).unzip();
                (pointer, keep.map(Keep::Chunks))
            }
            (DiskTag::Pulled(slot), None) => {
                let place = self
                    .pulled_tag(slot)
                    .and_then(|tag| self.slots.address(tag, 0))
                    .filter(|&(_, room)| room >= bytes);
                (place.map(|(pointer, _)| pointer), None)
            }
            (_, None) => (Some(std::ptr::null_mut()), None),
        };
        let Some(memory) = memory else {
            // The controller asked for more than the request has: only a defect can do that.
            debug_assert!(false, "{tag:?} has no buffer for {operation:?}");
            if let Some(slot) = tag.source_slot() {
                self.source_buffers(slot).end();
            }
            self.core
                .handle_disk_done(self.now, tag, Err(RequestError::Io));
            return;
        };
        let mut keep = keep;
        if let DiskTag::Request(request) | DiskTag::Replica(request) = tag {
            self.slots.hold(request);
            if bytes > 0
                && let Owner::Ring { .. } = self.slots.owner(request)
            {
                keep = self.guest_memory_for(request, operation).map(Keep::Guest);
                if self.has_lost_data(request, operation) {
                    self.pieces.clear();
                    self.slots.release(request);
                    return self
                        .core
                        .handle_disk_done(self.now, tag, Err(RequestError::Io));
                }
            }
        }
        // SAFETY: the hold keeps a slot's buffer allocated until `disk_done` releases the hold. A pulled piece keeps
        // its buffer until the controller lets go of the piece. `keep` holds a chunk's memory and a guest's memory,
        // which the guest itself may spoil. No frame of the buffer waits to be sent any more. The controller starts one
        // changing operation at a time on a buffer.
        unsafe {
            self.disk.start(
                &mut self.ring,
                tag,
                operation,
                memory,
                &mut self.pieces,
                keep,
            )
        };
    }

    /// Ends a step of a disk operation.
    pub(super) fn disk_done(&mut self, index: u32, result: i32) {
        let Some(finished) = self.disk.completed(&mut self.ring, index, result) else {
            return;
        };
        if let Some(slot) = finished.tag.source_slot() {
            self.source_buffers(slot).end();
        }
        self.core
            .handle_disk_done(self.now, finished.tag, finished.result);
        if let DiskTag::Request(tag) | DiskTag::Replica(tag) = finished.tag {
            self.slots.release(tag);
        }
        self.drain();
    }

    fn answer(&mut self, tag: RequestTag, result: Result<(), RequestError>) {
        match self.slots.owner(tag) {
            Owner::Client {
                connection,
                request,
                operation,
                rest,
                part,
            } => {
                let owner = (connection, request, operation, rest, part);
                self.answer_client(tag, owner, result);
            }
            Owner::Forwarded {
                connection,
                tag: peer_tag,
                number,
                operation,
            } => {
                self.answer_peer(tag, (connection, peer_tag, number, operation), result);
            }
            Owner::Ring { operation } => self.answer_ring(tag, operation, result),
            Owner::Replica | Owner::None => self.slots.finish(tag),
        }
    }

    fn notify(&mut self, event: Event) {
        self.relink(&event);
        self.publish();
        let Event::BecameBase { migration } = event else {
            return self.tell(EngineEvent::Core(event));
        };
        if let Some(fingerprint) = self.disk.fingerprint() {
            self.tell(EngineEvent::BecameBase {
                migration,
                fingerprint,
            });
        }
    }
}
