//! The requests of a virtual machine's rings.

use std::sync::Arc;

use godwit_core::action::{DiskOperation, Inspect};
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Extent, Sectors, Time};

use crate::engine::connections::shares::Account;
use crate::engine::context::Context;
use crate::engine::disk::Disk;
use crate::engine::front_ends::vhost::{Presence, Vhost};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner, Slots, Waiter};
use crate::virtio_block::config_space::FLUSH;
use crate::virtio_block::request::{Asked, parse};
use godwit_io::ring::GROUP;
use godwit_vhost::features::LARGEST_RING;
use godwit_vhost::memory::dirty_log::OutsideLog;
use godwit_vhost::memory::{GuestRam, Segment};
use godwit_vhost::rings::chain::ChainError;
use godwit_vhost::rings::split::RingError;

/// Disk operations submitted together for ring requests: all of them are there already, so more can share a call.
const RING_GROUP: u32 = 4;

/// A request that came by a ring.
#[derive(Default)]
pub(in crate::engine) struct RingRequest {
    pub(super) ring: u16,
    pub(super) head: u16,
    /// Guest-physical address of the status byte.
    pub(super) status: u64,
    /// Its data in guest memory.
    pub(super) data: Vec<Segment>,
    /// Memory that holds the data.
    pub(super) ram: Option<Arc<GuestRam>>,
    /// True once the data to write was copied to the slot's buffer, where later changes by the guest have no effect.
    gathered: bool,
    /// True if the disk reads straight into guest memory.
    pub(super) direct: bool,
}

impl RingRequest {
    /// Takes the place of an earlier request, and exchanges the data.
    fn begin(
        &mut self,
        (ring, head): (u16, u16),
        status: u64,
        data: &mut Vec<Segment>,
        ram: &Arc<GuestRam>,
    ) {
        std::mem::swap(&mut self.data, data);
        self.ring = ring;
        self.head = head;
        self.status = status;
        self.ram = Some(Arc::clone(ram));
        self.gathered = false;
        self.direct = false;
    }

    /// Copies the data from guest memory to the request's slot, once.
    fn gather(&mut self, tag: RequestTag, slots: &mut Slots) {
        if std::mem::replace(&mut self.gathered, true) {
            return;
        }
        let buffer = slots.bytes_mut(tag, 0..usize::MAX);
        if let Some(ram) = &self.ram {
            let copied = ram.gather(&self.data, buffer);
            debug_assert!(copied, "the data was memory when it was taken");
        }
    }
}

/// The error of a write whose data may differ from the guest's: pages of its memory are lost.
pub(in crate::engine) struct LostData;

/// The outcome for the first request of a ring.
enum Step {
    /// The request was taken and answered.
    Answered,
    /// The request was taken, and is the controller's.
    Request(Request),
    /// The request was taken, and the memory of its data is lost.
    Lost(RequestTag, Operation),
    /// No request is there, or none may be taken.
    Idle,
    /// The request needs a slot.
    Wait,
}

/// The reason for the end of a ring's service.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
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

impl Vhost {
    /// Records that the requests of no ring can be taken now.
    fn stall_all(&mut self, now: Time) {
        let mut ready = self.ready;
        while ready != 0 {
            let index = ready.trailing_zeros() as u16;
            ready &= ready - 1;
            self.stall(index, now);
        }
    }

    /// Takes a ring's first request.
    fn take_one(
        &mut self,
        index: u16,
        waited: bool,
        capacity: Sectors,
        cx: &mut Context,
        slots: &mut Slots,
    ) -> Result<Step, Broken> {
        let Some(front_end) = &mut self.front_end else {
            return Ok(Step::Idle);
        };
        let shared = &front_end.shared;
        let (Some(ram), Some(ring)) = (
            shared.ram.as_ref(),
            front_end.rings[usize::from(index)].as_deref_mut(),
        ) else {
            return Ok(Step::Idle);
        };
        if ring.broken || !matches!(front_end.presence, Presence::Served) || ram.is_lost() {
            return Ok(Step::Idle);
        }
        let memory = ram.memory();
        let log = shared.log_of(ram, self.written.as_deref());
        let Some(head) = ring.first(memory, log)? else {
            return Ok(Step::Idle);
        };
        if !ring.split.may_start_at(head) {
            return Err(Broken::Head(head));
        }
        let (chain, data) = (&mut self.chain, &mut self.data);
        let layout = ring.split.layout();
        chain.follow(memory, layout.descriptors, layout.size, head)?;
        let parsed = parse(memory, chain, capacity, data)?;
        if ram.is_lost() {
            return Ok(Step::Idle);
        }
        // A guest that never flushes counts on every write.
        let fua = shared.features & FLUSH == 0;
        let Some(operation) = operation_of(parsed.asked, fua) else {
            ring.take(head);
            self.answer_at_once(index, head, &parsed, cx)?;
            return Ok(Step::Answered);
        };
        let length = data_of(&operation).map_or(0, Extent::bytes) as u32;
        let owner = Owner::Ring { operation };
        let account = Some(Account::RINGS);
        let Some(tag) = slots.take(Class::Client, length, owner, account, waited) else {
            return Ok(Step::Wait);
        };
        let arrived = ring.take(head).unwrap_or(cx.now);
        slots.set_arrived(tag, arrived);
        ring.in_flight += 1;
        front_end.in_flight += 1;
        let request = &mut self.requests[tag.0 as usize];
        request.begin((index, head), parsed.status, data, ram);
        if ram.arrival().is_under_way() {
            // Only data that has been touched here is known to be the guest's.
            if let Operation::Write { .. } = operation {
                request.gather(tag, slots);
            }
            if ram.is_lost() {
                return Ok(Step::Lost(tag, operation));
            }
        }
        Ok(Step::Request(Request {
            tag,
            origin: Origin::Client,
            operation,
        }))
    }

    /// Prepares the disk to transfer a ring request's data from or to guest memory directly, in `pieces`. Returns the
    /// guest memory, or `None` if the slot's buffer is to be used; the buffer then holds the data to write. `alone` is
    /// false while the data to write may also be sent to another node: the guest may change its memory at any time, and
    /// the data must be the same in both places.
    pub(in crate::engine) fn guest_memory_for(
        &mut self,
        tag: RequestTag,
        operation: DiskOperation,
        alone: bool,
        disk: &Disk,
        slots: &mut Slots,
    ) -> Result<Option<Arc<GuestRam>>, LostData> {
        let request = &mut self.requests[tag.0 as usize];
        let (extent, reads, may) = match operation {
            DiskOperation::Read {
                extent,
                inspect: Inspect::Nothing,
            } => (extent, true, true),
            DiskOperation::Write { extent, .. } => (extent, false, alone && !request.gathered),
            _ => return Ok(None),
        };
        let places = &mut self.pieces;
        let mut used = None;
        if may
            && let Some(ram) = &request.ram
            && ram.locate(&request.data, places)
            && disk.can_transfer(extent, places)
        {
            request.direct = reads;
            used = Some(Arc::clone(ram));
        } else {
            places.clear();
            request.direct = false;
            if !reads {
                request.gather(tag, slots);
            }
        }
        if !reads && request.ram.as_ref().is_some_and(|ram| ram.is_lost()) {
            places.clear();
            return Err(LostData);
        }
        Ok(used)
    }

    /// Prepares a frame about a ring's request: the data must be in the slot's buffer, or must arrive there.
    pub(in crate::engine) fn leave_guest_memory(
        &mut self,
        tag: RequestTag,
        operation: Operation,
        slots: &mut Slots,
    ) {
        let request = &mut self.requests[tag.0 as usize];
        request.direct = false;
        if let Operation::Write { .. } = operation {
            request.gather(tag, slots);
        }
    }
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
        let refused = self.cx.core.refuses_requests() && !self.vhost.hopeless;
        if !refused && !self.cx.core.holds_requests() {
            return true;
        }
        self.vhost.stall_all(self.cx.now);
        self.ask_forward();
        false
    }

    fn pump_ring(&mut self, index: u16) {
        if self.vhost.ring(index).is_none_or(|ring| ring.waiting) {
            return;
        }
        for _ in 0..LARGEST_RING {
            match self.take_one(index, false) {
                Ok(Step::Answered | Step::Request(_)) if self.cx.core.holds_requests() => {
                    self.vhost.ready |= 1 << index;
                    return;
                }
                Ok(Step::Answered | Step::Request(_)) => {}
                Ok(Step::Idle | Step::Lost(..)) => return,
                Ok(Step::Wait) => {
                    self.vhost.stall(index, self.cx.now);
                    if let Some(ring) = self.vhost.ring(index) {
                        ring.waiting = true;
                        self.memory.slots.wait(Class::Client, Waiter::Ring(index));
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
        if waits && !self.cx.core.holds_requests() {
            match self.take_one(index, true) {
                Ok(Step::Wait) => return false,
                Ok(_) => {}
                Err(why) => self.break_ring(index, &why),
            }
        }
        if let Some(ring) = self.vhost.ring(index) {
            ring.waiting = false;
            self.vhost.ready |= 1 << index;
        }
        true
    }

    /// Takes a ring's first request, and passes it to the controller.
    fn take_one(&mut self, index: u16, waited: bool) -> Result<Step, Broken> {
        let (capacity, slots) = (self.disk.capacity(), &mut self.memory.slots);
        let cx = &mut self.cx;
        let step = self.vhost.take_one(index, waited, capacity, cx, slots)?;
        match step {
            Step::Request(request) => {
                self.cx.take_request(request);
                self.drain();
            }
            Step::Lost(tag, operation) => {
                self.answer_ring(tag, operation, Err(RequestError::Io));
            }
            Step::Answered | Step::Idle | Step::Wait => {}
        }
        Ok(step)
    }
}

/// Returns the controller's operation for a request, unless the request can be answered at once.
const fn operation_of(asked: Asked, fua: bool) -> Option<Operation> {
    match asked {
        Asked::Read(extent) => Some(Operation::Read(extent)),
        Asked::Write(extent) => Some(Operation::Write { extent, fua }),
        Asked::Zero { extent, unmap } => Some(Operation::WriteZeroes { extent, fua, unmap }),
        Asked::Flush => Some(Operation::Flush),
        Asked::Identify | Asked::Refused(_) => None,
    }
}

/// Returns the extent whose data a request carries.
const fn data_of(operation: &Operation) -> Option<Extent> {
    match *operation {
        Operation::Read(extent) | Operation::Write { extent, .. } => Some(extent),
        Operation::WriteZeroes { .. } | Operation::Flush => None,
    }
}
