//! Carries out the controller's actions.

use godwit_core::action::{Action, Content, DiskOperation, DiskTag};
use godwit_core::event::Event;
use godwit_core::request::{RequestError, RequestTag};

use crate::engine::config::EngineEvent;
use crate::engine::disk::{Keep, User};
use crate::engine::front_ends::vhost::requests::LostData;
use crate::engine::run::Engine;
use crate::engine::slots::Owner;

impl Engine {
    /// Carries out all pending actions of the controller.
    pub(super) fn drain(&mut self) {
        // Before any submission: the kernel's workers keep the priority that they start with.
        self.cx.follow_priority();
        // A failed note must not be followed by an acknowledgement.
        while self.broken.is_none()
            && let Some(action) = self.cx.core.poll_action()
        {
            match action {
                Action::Disk { tag, operation } => self.start_disk(tag, operation),
                Action::Send { class, message } => self.send(class, message),
                Action::SendForwarder { forwarder, message } => {
                    self.send_forwarder(forwarder, message);
                }
                Action::Complete { tag, result } => self.answer(tag, result),
                Action::ReleaseReplica { tag } => self.memory.slots.finish(tag),
                Action::ReleasePulled { slot } => {
                    if let Some(tag) = self.pulls.take_piece(slot) {
                        self.memory.slots.finish(tag);
                    }
                }
                Action::NoteHere { extent } => {
                    if let Err(error) = self.pulls.note(self.cx.core.missing(), extent) {
                        let failure = self.cx.failure("note what has come of the disk", &error);
                        self.broken = Some(failure);
                    }
                }
                Action::StoreMissing => self.store_missing(),
                Action::StoreActivity => {
                    let log = self.cx.core.activity_to_store();
                    self.cx.tell(EngineEvent::StoreActivity(log));
                }
                Action::ApplyKept { through } => self.apply_kept(through),
                Action::DropKept => self.drop_kept(),
                Action::DiscardUnsent { class } => self.discard_unsent(class),
                Action::Persist { record } => self.cx.tell(EngineEvent::Persist(record)),
                Action::Notify(event) => self.notify(event),
            }
        }
    }

    fn start_disk(&mut self, tag: DiskTag, operation: DiskOperation) {
        if let DiskOperation::FindHole { extent } = operation {
            // A system call of a microsecond: no need for the ring.
            let found = Content::Hole(self.disk.hole(extent));
            return self.cx.core.handle_disk_done(self.cx.now, tag, Ok(found));
        }
        if let DiskOperation::FindLongHole { from } = operation {
            let (start, end) = self.disk.long_hole(from);
            let found = Content::LongHole { start, end };
            return self.cx.core.handle_disk_done(self.cx.now, tag, Ok(found));
        }
        if let DiskOperation::Keep { .. } | DiskOperation::KeepZeroes { .. } = operation {
            return self.keep(tag, operation);
        }
        if let Some(slot) = tag.source_slot() {
            let buffers = self.memory.source(slot);
            buffers.begin();
            if buffers.defer(slot, operation) {
                return;
            }
        }
        self.run_disk(tag, operation);
    }

    /// Starts the deferred chunk reads whose buffers have been sent.
    pub(super) fn run_deferred_reads(&mut self) {
        while let Some((slot, operation)) = self.memory.next_ready() {
            self.run_disk(slot.into(), operation);
        }
    }

    /// Ends the deferred reads: their data is no longer needed.
    pub(super) fn drop_deferred_reads(&mut self) {
        while let Some(slot) = self.memory.chunks.cancel_deferred() {
            self.memory.chunks.end();
            self.disk_failed(slot.into());
        }
    }

    fn disk_failed(&mut self, tag: DiskTag) {
        let result = Err(RequestError::Io);
        self.cx.core.handle_disk_done(self.cx.now, tag, result);
    }

    fn run_disk(&mut self, tag: DiskTag, operation: DiskOperation) {
        let bytes = match operation {
            DiskOperation::Read { extent, .. } | DiskOperation::Write { extent, .. } => {
                extent.bytes() as usize
            }
            DiskOperation::WriteZeroes { .. }
            | DiskOperation::Flush
            | DiskOperation::Keep { .. }
            | DiskOperation::KeepZeroes { .. }
            | DiskOperation::FindHole { .. }
            | DiskOperation::FindLongHole { .. } => 0,
        };
        let pulled = match tag {
            DiskTag::Pulled(slot) => self.pulls.piece(slot),
            _ => None,
        };
        let Some((memory, mut keep)) = self.memory.place(tag, bytes, pulled) else {
            // The controller asked for more than the request has: only a defect can do that.
            debug_assert!(false, "{tag:?} has no buffer for {operation:?}");
            if let Some(slot) = tag.source_slot() {
                self.memory.source(slot).end();
            }
            return self.disk_failed(tag);
        };
        if let DiskTag::Request(request) | DiskTag::Replica(request) = tag {
            let slots = &mut self.memory.slots;
            slots.hold(request);
            if bytes > 0
                && let Owner::Ring { .. } = slots.owner(request)
            {
                // Data that is also sent to another node must be the same in both places, and the guest may change its
                // memory at any time.
                let alone = !self.moves.is_watching();
                let (vhost, disk) = (&mut self.vhost, &self.disk);
                match vhost.guest_memory_for(request, operation, alone, disk, slots) {
                    Ok(ram) => keep = ram.map(Keep::Guest),
                    Err(LostData) => {
                        slots.release(request);
                        return self.disk_failed(tag);
                    }
                }
            }
        }
        let (ring, pieces) = (&mut self.ring, &mut self.vhost.pieces);
        // SAFETY: the hold keeps a slot's buffer allocated until `disk_done` releases the hold. A pulled piece keeps
        // its buffer until the controller lets go of the piece. `keep` holds a chunk's memory and a guest's memory,
        // which the guest itself may spoil. No frame of the buffer waits to be sent any more. The controller starts one
        // changing operation at a time on a buffer.
        unsafe { self.disk.start(ring, tag, operation, memory, pieces, keep) };
    }

    /// Ends a step of a disk operation.
    pub(super) fn disk_done(&mut self, index: u32, result: i32) {
        let Some(finished) = self.disk.completed(&mut self.ring, index, result) else {
            return;
        };
        match finished.user {
            User::Core(tag) => self.disk_done_for(tag, finished.result),
            User::Kept(number) => self.kept_done(number, finished.result.map(|_| ())),
        }
        self.drain();
    }

    fn disk_done_for(&mut self, tag: DiskTag, result: Result<Content, RequestError>) {
        if let Some(slot) = tag.source_slot() {
            self.memory.source(slot).end();
        }
        self.cx.core.handle_disk_done(self.cx.now, tag, result);
        if let DiskTag::Request(tag) | DiskTag::Replica(tag) = tag {
            self.memory.slots.release(tag);
        }
    }

    fn answer(&mut self, tag: RequestTag, result: Result<(), RequestError>) {
        match self.memory.slots.owner(tag) {
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
            Owner::Replica | Owner::None => self.memory.slots.finish(tag),
        }
    }

    fn notify(&mut self, event: Event) {
        self.relink(&event);
        self.publish();
        let Event::BecameBase { migration } = event else {
            return self.cx.tell(EngineEvent::Core(event));
        };
        if let Some(fingerprint) = self.disk.fingerprint() {
            self.cx.tell(EngineEvent::BecameBase {
                migration,
                fingerprint,
            });
        }
    }
}
