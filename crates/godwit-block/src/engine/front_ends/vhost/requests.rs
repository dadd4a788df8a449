//! The traffic of a virtual machine's rings: requests in, answers out.

use std::sync::Arc;

use godwit_core::action::{DiskOperation, Inspect};
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::Extent;
use vm_memory::{Bytes, GuestAddress};

use crate::engine::connections::shares::Account;
use crate::engine::front_ends::vhost::{FrontEnd, table_of};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner, Waiter};
use crate::virtio_block::config_space::FLUSH;
use crate::virtio_block::request::{Asked, SERIAL, STATUS_ERROR, STATUS_OK, parse, serial_number};
use godwit_io::ring::GROUP;
use godwit_vhost::features::{LARGEST_RING, LOG_ALL};
use godwit_vhost::memory::dirty_log::OutsideLog;
use godwit_vhost::memory::{GuestRam, Segment};
use godwit_vhost::rings::chain::ChainError;
use godwit_vhost::rings::split::RingError;

/// Disk operations submitted together for ring requests: all of them are there already, so more can share a call.
const RING_GROUP: u32 = 4;

/// A request that came by a ring.
#[derive(Default)]
pub(in crate::engine) struct RingRequest {
    ring: u16,
    head: u16,
    /// Guest-physical address of the status byte.
    status: u64,
    /// Its data in guest memory.
    data: Vec<Segment>,
    /// Memory that holds the data.
    ram: Option<Arc<GuestRam>>,
    /// True once the data to write was copied to the slot's buffer, where later changes by the guest have no effect.
    gathered: bool,
    /// True if the disk reads straight into guest memory.
    direct: bool,
}

/// The outcome for the first request of a ring.
enum Step {
    /// The request was taken.
    Taken,
    /// No request is there, or none may be taken.
    Idle,
    /// The request needs a slot.
    Wait,
}

/// The reason for the end of a ring's service.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Log(#[from] OutsideLog),
    #[error("descriptor {0} starts a request, and does not exist or is in use")]
    Head(u16),
    #[error("the guest's memory at {0:#x} is gone")]
    Memory(u64),
}

impl Engine {
    /// Takes the requests of all rings that may have some.
    pub(in crate::engine) fn pump_rings(&mut self) {
        self.vhost.eager = false;
        if self.vhost.ready == 0 || !self.rings_may_go() {
            return;
        }
        let mut ready = std::mem::take(&mut self.vhost.ready);
        self.ring.set_group(RING_GROUP);
        while ready != 0 {
            let index = ready.trailing_zeros() as u16;
            ready &= ready - 1;
            self.pump_ring(index);
        }
        self.ring.set_group(GROUP);
        self.vhost.hopeless = false;
    }

    /// Returns true if requests may be taken from rings now. Requests that would only be held stay in the ring: a ring
    /// can be stopped before its requests are taken.
    fn rings_may_go(&mut self) -> bool {
        let refused = self.core.refuses_requests() && !self.vhost.hopeless;
        if !refused && !self.core.holds_requests() {
            return true;
        }
        let now = self.now;
        let mut ready = self.vhost.ready;
        while ready != 0 {
            let index = ready.trailing_zeros() as u16;
            ready &= ready - 1;
            self.vhost.stall(index, now);
        }
        self.ask_forward();
        false
    }

    fn pump_ring(&mut self, index: u16) {
        if self.vhost.ring(index).is_none_or(|ring| ring.waiting) {
            return;
        }
        for _ in 0..LARGEST_RING {
            match self.take_one(index, false) {
                Ok(Step::Taken) if self.core.holds_requests() => {
                    self.vhost.ready |= 1 << index;
                    return;
                }
                Ok(Step::Taken) => {}
                Ok(Step::Idle) => return,
                Ok(Step::Wait) => {
                    self.vhost.stall(index, self.now);
                    if let Some(ring) = self.vhost.ring(index) {
                        ring.waiting = true;
                        self.slots.wait(Class::Client, Waiter::Ring(index));
                    }
                    return;
                }
                Err(why) => return self.break_ring(index, &why),
            }
        }
        self.vhost.ready |= 1 << index;
        self.vhost.eager = true;
    }

    /// Takes the request for which the ring waited. Returns false if there is still no slot for it.
    pub(in crate::engine) fn admit_waiting_ring(&mut self, index: u16) -> bool {
        let waits = self.vhost.ring(index).is_some_and(|ring| ring.waiting);
        if waits && !self.core.holds_requests() {
            match self.take_one(index, true) {
                Ok(Step::Wait) => return false,
                Ok(Step::Taken | Step::Idle) => {}
                Err(why) => self.break_ring(index, &why),
            }
        }
        if let Some(ring) = self.vhost.ring(index) {
            ring.waiting = false;
            self.vhost.ready |= 1 << index;
        }
        true
    }

    /// Takes a ring's first request.
    fn take_one(&mut self, index: u16, waited: bool) -> Result<Step, Broken> {
        let capacity = self.disk.capacity();
        let vhost = &mut self.vhost;
        let Some(front_end) = &mut vhost.front_end else {
            return Ok(Step::Idle);
        };
        let log = front_end.log.as_deref();
        let log = log.filter(|_| front_end.features & LOG_ALL != 0);
        let (Some(ram), Some(ring)) = (
            front_end.ram.as_ref(),
            front_end.rings[usize::from(index)].as_deref_mut(),
        ) else {
            return Ok(Step::Idle);
        };
        if ring.broken || front_end.still || ram.is_lost() {
            return Ok(Step::Idle);
        }
        let memory = ram.memory();
        let again = ring.again.front().copied();
        let head = match again {
            _ if !ring.enabled && ring.stopping.is_none() => return Ok(Step::Idle),
            Some(head) => head,
            None if ring.stopping.is_some() => return Ok(Step::Idle),
            None => loop {
                if let Some(head) = ring.split.peek(memory)? {
                    ring.split.ignore(memory, log)?;
                    break head;
                }
                if !ring.split.listen(memory, log)? {
                    return Ok(Step::Idle);
                }
            },
        };
        if !ring.split.may_start_at(head) {
            return Err(Broken::Head(head));
        }
        let (chain, data) = (&mut vhost.chain, &mut vhost.data);
        let layout = ring.split.layout();
        chain.follow(memory, table_of(&ring.split), layout.size, head)?;
        let parsed = parse(memory, chain, capacity, data)?;
        if ram.is_lost() {
            return Ok(Step::Idle);
        }
        // A guest that never flushes counts on every write.
        let fua = front_end.features & FLUSH == 0;
        let operation = match parsed.asked {
            Asked::Read(extent) => Some(Operation::Read(extent)),
            Asked::Write(extent) => Some(Operation::Write { extent, fua }),
            Asked::Zero { extent, unmap } => Some(Operation::WriteZeroes { extent, fua, unmap }),
            Asked::Flush => Some(Operation::Flush),
            Asked::Identify | Asked::Refused(_) => None,
        };
        let mut slot = None;
        if let Some(operation) = operation {
            let length = data_of(&operation).map_or(0, Extent::bytes) as u32;
            let owner = Owner::Ring { operation };
            let account = Some(Account::RINGS);
            slot = self
                .slots
                .take(Class::Client, length, owner, account, waited);
            if slot.is_none() {
                return Ok(Step::Wait);
            }
        }
        let arrived = ring.since.map_or(self.now, |(since, _)| since);
        if again.is_some() {
            ring.again.pop_front();
        } else {
            ring.split.take();
            let base = ring.split.base();
            ring.since = ring
                .since
                .filter(|&(_, end)| end.wrapping_sub(base).cast_signed() > 0);
            if let Some(inflight) = &mut ring.inflight {
                inflight.taken(head);
            }
        }
        ring.split.begin(head);
        let (Some(operation), Some(tag)) = (operation, slot) else {
            let (status, written) = match parsed.asked {
                Asked::Identify if ram.scatter(&serial_number(&self.config.disk), data) => {
                    (STATUS_OK, SERIAL)
                }
                Asked::Refused(status) => (status, 0),
                _ => (STATUS_ERROR, 0),
            };
            if let Some(log) = log.filter(|_| written > 0) {
                log.mark_all(data)?;
            }
            self.stats.counters.errors += u64::from(status != STATUS_OK);
            let written = written.min(data.iter().map(|s| s.length as usize).sum());
            self.finish_ring_request(index, head, parsed.status, status, written as u32)?;
            return Ok(Step::Taken);
        };
        let request = &mut vhost.requests[tag.0 as usize];
        std::mem::swap(&mut request.data, data);
        request.ring = index;
        request.head = head;
        request.status = parsed.status;
        request.ram = Some(Arc::clone(ram));
        request.gathered = false;
        request.direct = false;
        ring.in_flight += 1;
        front_end.in_flight += 1;
        self.slots.set_arrived(tag, arrived);
        let ram = Arc::clone(ram);
        if ram.arrival().is_under_way() {
            // Only data that has been touched here is known to be the guest's.
            if let Operation::Write { .. } = operation {
                self.gather(tag);
            }
            if ram.is_lost() {
                self.answer_ring(tag, operation, Err(RequestError::Io));
                return Ok(Step::Idle);
            }
        }
        let request = Request {
            tag,
            origin: Origin::Client,
            operation,
        };
        self.take_request(request);
        self.drain();
        Ok(Step::Taken)
    }

    /// Prepares the disk to transfer a ring request's data from or to guest memory directly. Returns the guest memory,
    /// or `None` if the slot's buffer is to be used; the buffer then holds the data to write.
    ///
    /// Data that is also sent to another node must be the same in both places, and the guest may change its memory at
    /// any time.
    pub(in crate::engine) fn guest_memory_for(
        &mut self,
        tag: RequestTag,
        operation: DiskOperation,
    ) -> Option<Arc<GuestRam>> {
        let request = &mut self.vhost.requests[tag.0 as usize];
        let (extent, reads, may) = match operation {
            DiskOperation::Read {
                extent,
                inspect: Inspect::Nothing,
            } => (extent, true, true),
            DiskOperation::Write { extent, .. } => {
                let alone = self.link_watch.is_none() && !request.gathered;
                (extent, false, alone)
            }
            _ => return None,
        };
        let places = &mut self.pieces;
        if may
            && let Some(ram) = &request.ram
            && ram.locate(&request.data, places)
            && self.disk.can_transfer(extent, places)
        {
            request.direct = reads;
            return Some(Arc::clone(ram));
        }
        self.pieces.clear();
        request.direct = false;
        if !reads {
            self.gather(tag);
        }
        None
    }

    /// Returns true if the data of this write may differ from the guest's.
    pub(in crate::engine) fn has_lost_data(
        &self,
        tag: RequestTag,
        operation: DiskOperation,
    ) -> bool {
        let ram = self.vhost.requests[tag.0 as usize].ram.as_ref();
        matches!(operation, DiskOperation::Write { .. }) && ram.is_some_and(|ram| ram.is_lost())
    }

    /// Prepares a frame about a ring's request: the data must be in the slot's buffer, or must arrive there.
    pub(in crate::engine) fn leave_guest_memory(&mut self, tag: RequestTag, operation: Operation) {
        self.vhost.requests[tag.0 as usize].direct = false;
        if let Operation::Write { .. } = operation {
            self.gather(tag);
        }
    }

    /// Copies a request's data from guest memory to its slot, once.
    fn gather(&mut self, tag: RequestTag) {
        let request = &mut self.vhost.requests[tag.0 as usize];
        if std::mem::replace(&mut request.gathered, true) {
            return;
        }
        let buffer = self.slots.bytes_mut(tag, 0..usize::MAX);
        if let Some(ram) = &request.ram {
            let copied = ram.gather(&request.data, buffer);
            debug_assert!(copied, "the data was memory when it was taken");
        }
    }

    /// Passes the controller's answer to the guest.
    pub(in crate::engine) fn answer_ring(
        &mut self,
        tag: RequestTag,
        operation: Operation,
        result: Result<(), RequestError>,
    ) {
        let arrived = self.slots.arrived(tag);
        let mut waits = false;
        if let Some(front_end) = &mut self.vhost.front_end {
            front_end.in_flight -= 1;
        }
        let request = &self.vhost.requests[tag.0 as usize];
        let (index, head, status) = (request.ring, request.head, request.status);
        // A front end that left gets no answers: the next front end repeats the request.
        if let Some(ring) = self.vhost.ring(index) {
            ring.in_flight -= 1;
            let broken = ring.broken;
            waits = !broken && self.waits_for_room(index, head, &operation, result);
            if !broken && !waits {
                let answered = self.deliver(tag, operation, result).and_then(|written| {
                    let code = if result.is_ok() {
                        STATUS_OK
                    } else {
                        STATUS_ERROR
                    };
                    self.finish_ring_request(index, head, status, code, written)
                });
                if let Err(why) = answered {
                    self.break_ring(index, &why);
                }
            }
        }
        if !waits {
            self.stats
                .answered(&operation, result.is_ok(), arrived, self.now);
        }
        self.vhost.answered |= 1 << index;
        self.vhost.requests[tag.0 as usize].ram = None;
        self.slots.finish(tag);
    }

    /// Puts the data of a read into guest memory, and returns its length.
    fn deliver(
        &mut self,
        tag: RequestTag,
        operation: Operation,
        result: Result<(), RequestError>,
    ) -> Result<u32, Broken> {
        let (Operation::Read(extent), Ok(())) = (operation, result) else {
            return Ok(0);
        };
        let request = &self.vhost.requests[tag.0 as usize];
        if !request.direct {
            let bytes = self.slots.bytes_mut(tag, 0..extent.bytes() as usize);
            let scattered = request
                .ram
                .as_ref()
                .is_some_and(|ram| ram.scatter(bytes, &request.data));
            debug_assert!(scattered, "the data was memory when it was taken");
        }
        if let Some(log) = self.vhost.front_end.as_ref().and_then(FrontEnd::log) {
            log.mark_all(&request.data)?;
        }
        Ok(extent.bytes() as u32)
    }

    /// Writes a request's status and counts the request among its ring's answers.
    fn finish_ring_request(
        &mut self,
        index: u16,
        head: u16,
        status: u64,
        code: u8,
        written: u32,
    ) -> Result<(), Broken> {
        let Some(front_end) = &mut self.vhost.front_end else {
            return Ok(());
        };
        let log = front_end.log.as_deref();
        let log = log.filter(|_| front_end.features & LOG_ALL != 0);
        if let (Some(ram), Some(ring)) = (&front_end.ram, &mut front_end.rings[usize::from(index)])
        {
            let place = GuestAddress(status);
            ram.memory()
                .write_obj(code, place)
                .map_err(|_| Broken::Memory(status))?;
            if let Some(log) = log {
                log.mark(status, 1)?;
            }
            ring.split.answer(head, written + 1);
            self.vhost.answered |= 1 << index;
        }
        Ok(())
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
            let Some(front_end) = &mut self.vhost.front_end else {
                break;
            };
            let log = front_end.log.as_deref();
            let log = log.filter(|_| front_end.features & LOG_ALL != 0);
            let (Some(ram), Some(ring)) =
                (&front_end.ram, &mut front_end.rings[usize::from(index)])
            else {
                continue;
            };
            if ring.broken {
                continue;
            }
            let published = ring
                .split
                .publish(ram.memory(), log, ring.inflight.as_ref());
            match (published, ring.call) {
                (Ok(true), Some(call)) => self.vhost.events.signal(&mut self.ring, call),
                (Ok(_), _) => {}
                (Err(why), _) => self.break_ring(index, &why),
            }
        }
        self.settle_front_end();
    }
}

/// Returns the extent whose data a request carries.
const fn data_of(operation: &Operation) -> Option<Extent> {
    match *operation {
        Operation::Read(extent) | Operation::Write { extent, .. } => Some(extent),
        Operation::WriteZeroes { .. } | Operation::Flush => None,
    }
}
