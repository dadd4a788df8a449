//! The path of a guest's request: the node that serves it, the work it waits for, its destination.

mod coalescing;
pub(super) mod forwarding;
mod order;
pub(super) mod slots;

use core::time::Duration;

use crate::action::{Action, DiskOperation, DiskTag, Inspect};
use crate::controller::Controller;
use crate::controller::cx::Cx;
use crate::controller::governor::Answer;
use crate::controller::policy::Route;
use crate::controller::requests::forwarding::ForwardLink;
use crate::controller::requests::slots::{Slot, TagList, Work, WorkStage};
use crate::event::{AbortReason, Event};
use crate::planted::PlantedBug;
use crate::request::{Operation, Origin, Request, RequestError, RequestTag};
use crate::units::{Bytes, Extent, Generation, Time};
use crate::wire::{Message, TrafficClass, double_write_id};

/// Decision on a request that arrives now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// Served from the local disk.
    Serve,
    /// Held until the owner is known.
    Hold,
    /// Forwarded to the owner.
    Forward,
    /// Refused: the disk is elsewhere.
    Refuse,
}

/// Treatment of finished requests of guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Answers {
    /// Answered at once.
    #[default]
    Flow,
    /// Kept back: another node may have become the owner.
    Held,
    /// Answered with an error, whatever the local disk did: another node has become the owner.
    Fail,
}

/// Numbers of the requests, and those that wait for an owner.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// Requests that wait until the owner is known.
    held: TagList,
    /// Requests that were finished while answers were held.
    pub(super) done: TagList,
    pub(super) answers: Answers,
    /// Admitted requests that have not finished.
    pub(super) admitted: u32,
    /// Requests that have entered and are unanswered.
    pub(super) unanswered: u32,
    /// Arrival of the last request.
    pub(super) last: Option<Time>,
}

/// Time without requests after which a guest is idle.
const GUEST_IDLE_AFTER: Duration = Duration::from_millis(100);

impl Requests {
    fn hold(&mut self, cx: &mut Cx, tag: RequestTag) {
        cx.slots[tag].stage = WorkStage::Held;
        cx.slots.push(&mut self.held, tag);
    }
}

impl Controller {
    /// Returns true if no guest waits for an answer or has made a request in the last 100 ms.
    pub fn guest_is_idle(&self) -> bool {
        let long_ago = |last: Time| self.cx.now.since(last) > GUEST_IDLE_AFTER;
        self.requests.unanswered == 0 && self.requests.last.is_none_or(long_ago)
    }

    /// Handles a request of a guest or of the peer (forwarding). The answer is [`Action::Complete`], possibly only
    /// after a migration has been decided. A tag that is busy or out of range is ignored: the body hands out tags.
    #[inline]
    pub fn handle_request(&mut self, now: Time, request: Request) {
        self.cx.now = now;
        let Request {
            tag,
            origin,
            operation,
        } = request;
        let extent = operation.extent();
        if !self
            .cx
            .slots
            .occupy(tag, Work::Request { operation, origin }, extent)
        {
            debug_assert!(false, "{tag:?} is busy or out of range");
            return;
        }
        self.cx.slots[tag].arrived = now;
        self.requests.unanswered += 1;
        self.requests.last = Some(now);
        if extent.is_some_and(|extent| !extent.within(self.cx.capacity)) {
            self.answer(tag, Err(RequestError::OutOfRange));
            return;
        }
        self.enter(tag, origin);
    }

    /// Notes that a sync connection to the owner is up. Once the owner has reported the fate of requests forwarded on a
    /// lost connection ([`Message::Fence`]), the rest is sent again, and held requests are forwarded. Frames of older
    /// connections must not reach [`Self::handle_message`] any more.
    pub fn handle_forward_up(&mut self, now: Time) {
        self.cx.now = now;
        self.forwarding.link = ForwardLink::Opening;
        self.forwarding.may_forward(&mut self.cx, true);
        // A client may have attached while the owner was out of reach.
        self.cx.send(TrafficClass::Sync, Message::ClientAttached);
        self.run_ready();
    }

    /// Notes the end of the connection on which this node forwards. Forwarded requests wait for the next connection
    /// ([`Self::handle_forward_up`]), for this node to become the owner, or for [`Self::fail_forwarded`].
    pub fn handle_forward_lost(&mut self, now: Time) {
        self.cx.now = now;
        if self.forwarding.link.is_there() {
            self.forwarding.link = ForwardLink::Down;
        }
        if self.cx.authority.may_serve() {
            self.take_back_forwarded();
        }
        self.give_up_abandoned();
        self.run_ready();
    }

    /// Fails every request that waits for the owner, because forwarding has become hopeless.
    pub fn fail_forwarded(&mut self, now: Time) {
        self.cx.now = now;
        self.forwarding.link = ForwardLink::Absent;
        for tag in self.cx.slots.select(Slot::is_forwarded) {
            self.cx.slots[tag].stage = WorkStage::Done;
            self.cx.slots[tag].result = Err(RequestError::NotServing);
            self.finish(tag);
        }
        self.release_held();
        self.run_ready();
    }

    /// Returns true if a client's request would be held now. A body that can leave a request unread should ask again
    /// after the next input.
    pub fn holds_requests(&self) -> bool {
        self.gate() == Gate::Hold
    }

    /// Returns true if a client's request would fail now, because the disk is elsewhere and its owner out of reach.
    pub fn refuses_requests(&self) -> bool {
        self.gate() == Gate::Refuse
    }

    pub(super) fn gate(&self) -> Gate {
        if self.requests.answers == Answers::Held {
            return Gate::Hold;
        }
        if self.cx.authority.may_serve() {
            let freezing = self
                .outgoing
                .source
                .as_ref()
                .is_some_and(|source| source.is_frozen());
            let holds = freezing || self.forwarding.stores();
            return if holds { Gate::Hold } else { Gate::Serve };
        }
        if self.cx.authority.is_elsewhere() {
            return match self.forwarding.link {
                ForwardLink::Up => Gate::Forward,
                ForwardLink::Down | ForwardLink::Opening => Gate::Hold,
                ForwardLink::Absent => Gate::Refuse,
            };
        }
        // Only the destination can serve a disk given away. The destination holds requests until its ownership is known
        // there.
        if self.cx.authority.gave_away() && self.forwarding.link == ForwardLink::Up {
            return Gate::Forward;
        }
        Gate::Hold
    }

    /// Reconsiders every held request, in order of arrival.
    pub(super) fn release_held(&mut self) {
        let mut held = core::mem::replace(&mut self.requests.held, TagList::EMPTY);
        while let Some(tag) = self.cx.slots.pop(&mut held) {
            let Work::Request { origin, .. } = self.cx.slots[tag].work else {
                continue;
            };
            if self.cx.slots[tag].admitted {
                // The request keeps its place in the order of writes.
                self.cx.ready.push_back(tag);
            } else {
                self.enter(tag, origin);
            }
        }
    }

    #[inline]
    fn enter(&mut self, tag: RequestTag, origin: Origin) {
        if self.cx.slots[tag].abandoned {
            return self.answer(tag, Err(RequestError::NotServing));
        }
        // Once an owner is certain, the peer finds the owner alone. Passing the peer's request on could send the
        // request in circles. Holding the request until this node reaches the owner could make the two nodes wait for
        // each other.
        if origin == Origin::Peer && self.cx.authority.is_elsewhere() {
            return self.answer(tag, Err(RequestError::NotServing));
        }
        match self.gate() {
            Gate::Serve => self.admit(tag),
            Gate::Forward if origin == Origin::Peer => self.requests.hold(&mut self.cx, tag),
            Gate::Forward => self.admit(tag),
            Gate::Hold => self.requests.hold(&mut self.cx, tag),
            Gate::Refuse => self.answer(tag, Err(RequestError::NotServing)),
        }
    }

    #[inline]
    fn admit(&mut self, tag: RequestTag) {
        self.requests.admitted += 1;
        self.cx.slots[tag].admitted = true;
        self.cx.join(tag);
        self.advance(tag);
    }

    /// Advances the tags whose blocker is gone as far as possible.
    #[inline]
    pub(super) fn run_ready(&mut self) {
        while let Some(tag) = self.cx.ready.pop_front() {
            if self.cx.slots.get(tag).is_some() {
                self.advance(tag);
            }
        }
        self.check_drained();
    }

    /// Starts the work in a slot, or queues the work behind an earlier overlapping write or behind the chunk that locks
    /// its addresses. Under a promise to the guest a write need not wait for a chunk being copied: the write then
    /// reaches the destination later, like a delayed write. No write waits for the comparison of a chunk.
    #[inline]
    pub(super) fn advance(&mut self, tag: RequestTag) {
        let slot = &mut self.cx.slots[tag];
        if slot.combined {
            return self.finish(tag);
        }
        if slot.abandoned {
            return self.give_up(tag);
        }
        let has_waited = slot.is_waiting();
        if has_waited {
            slot.stage = WorkStage::Waiting;
        }
        let (is_request, is_write) = (slot.is_request(), slot.is_write());
        // Nothing is copied behind a write during a comparison: a write that was let through during the copy, and has
        // since waited for another write, goes to both nodes.
        slot.unlocked &= self
            .outgoing
            .source
            .as_ref()
            .is_some_and(|source| source.is_copying_pass());
        if let Some(extent) = slot.extent
            && (self.cx.waits_for_write(tag, extent)
                || self.outgoing.waits_for_chunk(&mut self.cx, tag, extent))
        {
            return;
        }
        if is_request {
            if self.lacking.is_some()
                && self.cx.authority.may_serve()
                && let Some(extent) = self.cx.slots[tag].extent
                && self.waits_for_missing(tag, extent, is_write)
            {
                return;
            }
            let tag = if has_waited {
                self.cx.combine(tag)
            } else {
                tag
            };
            self.issue(tag)
        } else {
            self.issue_replica(tag)
        }
    }

    #[inline]
    fn issue(&mut self, tag: RequestTag) {
        let Work::Request { operation, .. } = self.cx.slots[tag].work else {
            return;
        };
        if self.cx.authority.may_serve() {
            if operation.is_write() && self.waits_for_activity(tag) {
                return;
            }
            return self.issue_here(tag, operation);
        }
        if !self.cx.authority.is_elsewhere() && self.gate() != Gate::Forward {
            return self.requests.hold(&mut self.cx, tag);
        }
        let slot = &mut self.cx.slots[tag];
        slot.stage = WorkStage::Forwarded { sent: false };
        slot.issued = self.cx.now;
        match self.forwarding.link {
            ForwardLink::Up => self.forwarding.forward(&mut self.cx, tag),
            ForwardLink::Down | ForwardLink::Opening => {}
            ForwardLink::Absent => {
                slot.stage = WorkStage::Done;
                slot.result = Err(RequestError::NotServing);
                self.finish(tag);
            }
        }
    }

    /// Starts a request on the local disk and, if the destination already has the addresses, also at the destination
    /// (`SendDoubleWrites`, Alg. 1).
    #[inline]
    fn issue_here(&mut self, tag: RequestTag, operation: Operation) {
        if operation == Operation::Flush && self.needs_checkpoint() {
            return self.wait_for_checkpoint(tag);
        }
        let slot = &mut self.cx.slots[tag];
        slot.stage = WorkStage::Here {
            at_disk: true,
            at_destination: false,
        };
        slot.issued = self.cx.now;
        let (local, remote) = match operation {
            Operation::Read(extent) => (
                DiskOperation::Read {
                    extent,
                    inspect: Inspect::Nothing,
                },
                None,
            ),
            Operation::Write { extent, fua } => (
                DiskOperation::Write { extent, fua },
                Some((extent, false, false)),
            ),
            Operation::WriteZeroes { extent, fua, unmap } => (
                DiskOperation::WriteZeroes { extent, fua, unmap },
                Some((extent, true, unmap)),
            ),
            // Until switchover only the source's disk has to survive, and the destination makes everything durable
            // before it accepts the disk: a local flush is a whole flush.
            Operation::Flush => (DiskOperation::Flush, None),
        };
        if let Some((extent, zeroes, _)) = remote {
            self.guest_writes(extent);
            self.differences
                .differs_from_image(&mut self.cx, extent, zeroes);
        }
        self.cx.act(Action::Disk {
            tag: DiskTag::Request(tag),
            operation: local,
        });
        if let Some((extent, zeroes, unmap)) = remote
            && let Some(source) = &mut self.outgoing.source
        {
            match source.route(extent, zeroes, self.cx.slots[tag].unlocked) {
                Route::Local => return,
                Route::Later => return self.copy_again(),
                Route::Both => {}
            }
            let generation = source.generation;
            source.double_written(extent, zeroes);
            let turn = source.posted.next_turn(tag);
            let slot = &mut self.cx.slots[tag];
            slot.stage = WorkStage::Here {
                at_disk: true,
                at_destination: true,
            };
            slot.doubled = true;
            slot.turn = turn;
            slot.generation = generation;
            let message = Message::DoubleWrite {
                tag,
                turn,
                generation,
                extent,
                zeroes,
                unmap,
            };
            self.cx.send(TrafficClass::Sync, message);
            self.outgoing.watch(&mut self.cx, tag);
        }
    }

    #[inline]
    pub(super) fn request_disk_done(&mut self, tag: RequestTag, result: Result<(), RequestError>) {
        let Some(slot) = self.cx.slots.get_mut(tag).filter(|slot| slot.is_at_disk()) else {
            return;
        };
        let waits = slot.is_at_destination();
        if self.saw_unacknowledged(tag) {
            return;
        }
        let slot = &mut self.cx.slots[tag];
        slot.stage = WorkStage::Here {
            at_disk: false,
            at_destination: waits,
        };
        slot.result = result;
        let doubled = slot.doubled;
        let written = slot.extent.filter(|_| slot.is_write());
        if self.lacking.is_some() && result.is_ok() {
            let (durable, extent) = (slot.durable_write(), slot.extent);
            let zeroes = slot.plain_write().is_none();
            if let (Some(durable), Some(extent)) = (durable, extent) {
                if !(zeroes && self.cx.has_bug(PlantedBug::ForgetZeroed)) {
                    self.written_here(extent);
                }
                if durable && self.needs_checkpoint() {
                    return self.wait_for_checkpoint(tag);
                }
            }
        }
        if !waits || (result.is_ok() && self.outgoing.post(&mut self.cx, tag)) {
            self.finish(tag);
        }
        if let (Err(_), Some(extent)) = (result, written) {
            self.stays_where_not_written(extent);
        }
        if result.is_err() && doubled {
            // The destination may hold data that the source failed to store: the images differ.
            self.abort_source(AbortReason::SourceDisk);
        }
    }

    /// Handles the acknowledgement or failure of a double write. Acknowledgements of an older generation or turn are
    /// ignored: nobody waits for them, and the tag may have a new owner.
    #[inline]
    pub(super) fn double_write_acknowledged(&mut self, id: u32, generation: Generation) {
        let tag = RequestTag(id & 0xFFFF);
        let is_current =
            |slot: &Slot| slot.generation == generation && double_write_id(tag, slot.turn) == id;
        if self.cx.slots.get(tag).is_some_and(is_current) {
            self.give_up_double_write(tag);
        }
    }

    /// Stops a request from waiting for its double write.
    #[inline]
    pub(super) fn give_up_double_write(&mut self, tag: RequestTag) {
        let waiting = self.cx.slots.get_mut(tag);
        let Some(slot) = waiting.filter(|slot| slot.is_at_destination()) else {
            return;
        };
        if !slot.forget_destination() {
            self.finish(tag);
        } else if let Some(source) = &mut self.outgoing.source {
            source.prune_watched(&self.cx.slots);
        }
    }

    pub(super) fn forward_reply(
        &mut self,
        tag: RequestTag,
        number: u32,
        result: Result<(), RequestError>,
    ) {
        let Some(slot) = self
            .cx
            .slots
            .get_mut(tag)
            .filter(|slot| slot.awaits_reply(number))
        else {
            return;
        };
        if result != Err(RequestError::NotServing) {
            slot.stage = WorkStage::Done;
            slot.result = result;
            return self.finish(tag);
        }
        // The other node refused the request as a former owner. Before giving the disk away the node answered all other
        // requests taken by then, so the remaining requests are not carried out either.
        let serves = self.cx.authority.may_serve();
        for pending in self.cx.slots.select(Slot::is_forwarded) {
            if serves {
                self.outgoing.start_over(&mut self.cx, pending);
            } else {
                self.cx.slots[pending].stage = WorkStage::Forwarded { sent: false };
            }
        }
        if !serves && self.forwarding.link == ForwardLink::Up {
            self.forwarding.link = ForwardLink::Down;
            self.cx.notify(Event::OwnerMoved);
        }
    }

    /// Ends an admitted request: frees its addresses, wakes its waiters, answers.
    #[inline]
    pub(super) fn finish(&mut self, tag: RequestTag) {
        let Some(result) = self.answer_to(self.cx.slots[tag].result) else {
            self.cx.slots[tag].stage = WorkStage::Done;
            return self.cx.slots.push(&mut self.requests.done, tag);
        };
        self.requests.admitted -= 1;
        self.outgoing.leave(&mut self.cx, tag);
        self.answer(tag, result);
    }

    #[inline]
    fn answer(&mut self, tag: RequestTag, result: Result<(), RequestError>) {
        if let Some(source) = &mut self.outgoing.source
            && let Some(governor) = &mut source.governor
        {
            let slot = &self.cx.slots[tag];
            governor.answered(&Answer {
                bytes: Bytes(slot.extent.map_or(0, Extent::bytes)),
                latency: self.cx.now.since(slot.arrived),
                known_late: slot.late,
                writes: slot.is_write() && !slot.combined,
            });
        }
        if let Work::Request { origin, .. } = self.cx.slots[tag].work {
            self.forwarding.note_failure(origin, result);
        }
        self.cx.slots.release(tag);
        if let Some(source) = &mut self.outgoing.source {
            source.prune_watched(&self.cx.slots);
        }
        self.requests.unanswered -= 1;
        self.cx.act(Action::Complete { tag, result });
    }
}
