//! The answers to the requests of a virtual machine's rings.

use godwit_core::request::{Operation, RequestError, RequestTag};
use vm_memory::{Bytes, GuestAddress};

use crate::engine::config::EngineEvent;
use crate::engine::context::Context;
use crate::engine::front_ends::vhost::Vhost;
use crate::engine::front_ends::vhost::requests::{Broken, RingRequest};
use crate::engine::run::Engine;
use crate::engine::slots::Slots;
use crate::virtio_block::request::{Asked, Parsed, SERIAL, STATUS_ERROR, STATUS_OK, serial_number};
use godwit_io::ring::Ring;
use godwit_vhost::memory::dirty_log::WriteLog;

/// The end of a ring's request for the controller.
pub(super) enum Answered {
    /// The guest gets the answer, or is gone.
    Done,
    /// The request waits for its ring's next life, or for room in the image.
    Waits,
    /// The request is the first that waits for room in the image.
    FirstWaits,
    /// The answer has no place.
    Broken(Broken),
}

impl Vhost {
    /// Answers a request that has no operation for the controller.
    pub(super) fn answer_at_once(
        &mut self,
        index: u16,
        head: u16,
        parsed: &Parsed,
        cx: &mut Context,
    ) -> Result<(), Broken> {
        let Some(front_end) = &self.front_end else {
            return Ok(());
        };
        let (data, shared) = (&self.data, &front_end.shared);
        let identifies = |number: &[u8]| {
            let ram = shared.ram.as_ref();
            ram.is_some_and(|ram| ram.scatter(number, data))
        };
        let (status, written) = match parsed.asked {
            Asked::Identify if identifies(&serial_number(&cx.config.disk)) => (STATUS_OK, SERIAL),
            Asked::Refused(status) => (status, 0),
            _ => (STATUS_ERROR, 0),
        };
        if let Some(ram) = shared.ram.as_ref().filter(|_| written > 0) {
            let log = shared.log_of(ram, self.written.as_deref());
            log.mark_all(data)?;
        }
        cx.stats.counters.errors += u64::from(status != STATUS_OK);
        let written = written.min(data.iter().map(|s| s.length as usize).sum());
        self.finish(index, head, parsed.status, status, written as u32)
    }

    /// Ends a request, and answers the guest unless the request waits.
    fn answer(
        &mut self,
        tag: RequestTag,
        operation: Operation,
        result: Result<(), RequestError>,
        cx: &Context,
        slots: &mut Slots,
    ) -> (u16, Answered) {
        if let Some(front_end) = &mut self.front_end {
            front_end.in_flight -= 1;
        }
        let request = &self.requests[tag.0 as usize];
        let (index, head) = (request.ring, request.head);
        self.log_direct(request);
        // A front end that left gets no answers: the next front end repeats the request.
        let gets = self.ring(index).is_some_and(|ring| {
            ring.in_flight -= 1;
            !ring.broken
        });
        let answered = if !gets {
            Answered::Done
        } else if let Some(waits) = self.wait_for_room(index, head, &operation, result, cx) {
            waits
        } else {
            self.deliver(tag, operation, result, slots)
                .map_or_else(Answered::Broken, |()| Answered::Done)
        };
        self.answered |= 1 << index;
        self.requests[tag.0 as usize].ram = None;
        (index, answered)
    }

    /// Logs the data of a read straight into guest memory, for the node alone: the disk may have written there even if
    /// the read failed, or its front end has left.
    fn log_direct(&self, request: &RingRequest) {
        if let (Some(own), Some(ram), true) = (&self.written, &request.ram, request.direct) {
            let log = WriteLog::new(ram, None, Some(own));
            // Only the front end's log can be too short.
            let _ = log.mark_all(&request.data);
        }
    }

    /// Puts the data of a read into guest memory, and the status after it.
    fn deliver(
        &mut self,
        tag: RequestTag,
        operation: Operation,
        result: Result<(), RequestError>,
        slots: &mut Slots,
    ) -> Result<(), Broken> {
        let request = &self.requests[tag.0 as usize];
        let (index, head, status) = (request.ring, request.head, request.status);
        let mut written = 0;
        if let (Operation::Read(extent), Ok(())) = (operation, result) {
            written = extent.bytes() as u32;
            if !request.direct {
                let bytes = slots.bytes_mut(tag, 0..written as usize);
                let ram = request.ram.as_ref();
                let scattered = ram.is_some_and(|ram| ram.scatter(bytes, &request.data));
                debug_assert!(scattered, "the data was memory when it was taken");
            }
            if let (Some(front_end), Some(ram)) = (&self.front_end, &request.ram) {
                let own = self.written.as_deref().filter(|_| !request.direct);
                let log = front_end.shared.log_of(ram, own);
                log.mark_all(&request.data)?;
            }
        }
        let code = if result.is_ok() {
            STATUS_OK
        } else {
            STATUS_ERROR
        };
        self.finish(index, head, status, code, written)
    }

    /// Writes a request's status and counts the request among its ring's answers.
    fn finish(
        &mut self,
        index: u16,
        head: u16,
        status: u64,
        code: u8,
        written: u32,
    ) -> Result<(), Broken> {
        let Some(front_end) = &mut self.front_end else {
            return Ok(());
        };
        let shared = &front_end.shared;
        if let Some(ram) = &shared.ram
            && let Some(ring) = &mut front_end.rings[usize::from(index)]
        {
            let place = GuestAddress(status);
            ram.memory()
                .write_obj(code, place)
                .map_err(|_| Broken::Memory(status))?;
            let log = shared.log_of(ram, self.written.as_deref());
            log.mark(status, 1)?;
            ring.split.answer(head, written + 1);
            self.answered |= 1 << index;
        }
        Ok(())
    }

    /// Shows the guest the answers of a ring, and signals the guest if wanted.
    fn publish(&mut self, index: u16, uring: &mut Ring) -> Result<(), Broken> {
        let Some(front_end) = &mut self.front_end else {
            return Ok(());
        };
        let shared = &front_end.shared;
        if let Some(ram) = &shared.ram
            && let Some(ring) = &mut front_end.rings[usize::from(index)]
            && !ring.broken
        {
            let inflight = ring.inflight.as_ref();
            let log = shared.log_of(ram, self.written.as_deref());
            let signal = ring.split.publish(ram.memory(), log, inflight)?;
            if let Some(call) = ring.call.filter(|_| signal) {
                self.events.signal(uring, call);
            }
        }
        Ok(())
    }
}

impl Engine {
    /// Passes the controller's answer to the guest.
    pub(in crate::engine) fn answer_ring(
        &mut self,
        tag: RequestTag,
        operation: Operation,
        result: Result<(), RequestError>,
    ) {
        let (cx, slots) = (&self.cx, &mut self.memory.slots);
        let (index, answered) = self.vhost.answer(tag, operation, result, cx, slots);
        match answered {
            Answered::Done => {}
            Answered::Waits => return self.memory.slots.finish(tag),
            Answered::FirstWaits => {
                self.publish();
                self.cx.tell(EngineEvent::OutOfSpace(true));
                return self.memory.slots.finish(tag);
            }
            Answered::Broken(why) => self.break_ring(index, &why),
        }
        let arrived = self.memory.slots.arrived(tag);
        let (ok, now) = (result.is_ok(), self.cx.now);
        self.cx.stats.answered(&operation, ok, arrived, now);
        self.memory.slots.finish(tag);
    }

    /// Shows the guest the answers of this turn, and signals the guest if wanted.
    pub(in crate::engine) fn publish_rings(&mut self) {
        let mut answered = std::mem::take(&mut self.vhost.answered);
        if answered == 0 {
            return;
        }
        while answered != 0 {
            let index = answered.trailing_zeros() as u16;
            answered &= answered - 1;
            if let Err(why) = self.vhost.publish(index, &mut self.ring) {
                self.break_ring(index, &why);
            }
        }
        self.settle_front_end();
    }
}
