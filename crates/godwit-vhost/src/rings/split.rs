//! A split ring: available requests, and the publication of answers.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use crate::features::LARGEST_RING;
use crate::memory::dirty_log::{OutsideLog, WriteLog};
use crate::rings::inflight::InflightRing;

/// The reason for the end of a ring's service.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A part of the ring is not memory.
    #[error("a part of the ring is not guest memory")]
    Memory(#[from] GuestMemoryError),
    /// The ring's size, alignment or address is wrong.
    #[error("the ring's size, alignment or address is invalid")]
    Layout,
    /// The guest claims more available requests than the ring holds.
    #[error("the ring says that {0} requests are available, more than it has descriptors")]
    Available(u16),
    /// Writes to the ring's memory cannot be logged.
    #[error(transparent)]
    Log(#[from] OutsideLog),
    /// The queue's own checks failed.
    #[error("the ring is invalid: {0}")]
    Queue(virtio_queue::Error),
}

/// The addresses and size of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Descriptors: a power of two.
    pub size: u16,
    /// Guest-physical address of the descriptors.
    pub descriptors: GuestAddress,
    /// Guest-physical address of the guest's available ring.
    pub available: GuestAddress,
    /// Guest-physical address of the device's used ring.
    pub used: GuestAddress,
}

/// A ring being served.
pub struct SplitRing {
    queue: Queue,
    layout: RingLayout,
    /// Used index as the guest sees it.
    used: Wrapping<u16>,
    /// Unpublished answers: head and bytes written.
    answers: Vec<(u16, u32)>,
    /// Bit for each descriptor at the head of a request without a published answer.
    taken: [u64; LARGEST_RING as usize / 64],
    event_index: bool,
    /// True while the guest signals new requests.
    listens: bool,
    /// Guest-physical address of the used ring in the front end's log, if its pages are logged there.
    pub log: Option<u64>,
}

/// Bytes of a used ring before the elements, and of each element.
const USED_HEADER: u64 = 4;
const USED_ELEMENT: u64 = 8;

impl SplitRing {
    /// Opens the ring at `layout`. Requests up to `base` have been taken.
    pub fn new(
        memory: &impl GuestMemory,
        layout: RingLayout,
        base: u16,
        event_index: bool,
        log: Option<u64>,
    ) -> Result<Self, RingError> {
        let mut queue = Queue::new(layout.size).map_err(|_| RingError::Layout)?;
        queue
            .try_set_desc_table_address(layout.descriptors)
            .and_then(|()| queue.try_set_avail_ring_address(layout.available))
            .and_then(|()| queue.try_set_used_ring_address(layout.used))
            .map_err(|_| RingError::Layout)?;
        queue.set_event_idx(event_index);
        queue.set_next_avail(base);
        queue.set_ready(true);
        let mut ring = Self {
            queue,
            layout,
            used: Wrapping(0),
            answers: Vec::with_capacity(usize::from(layout.size)),
            taken: [0; LARGEST_RING as usize / 64],
            event_index,
            listens: true,
            log,
        };
        ring.check(memory)?;
        ring.used = ring
            .queue
            .used_idx(memory, Ordering::Acquire)
            .map_err(RingError::Queue)?;
        Ok(ring)
    }

    /// Returns an error unless all of the ring lies in memory.
    pub fn check(&self, memory: &impl GuestMemory) -> Result<(), RingError> {
        if self.queue.is_valid(memory) {
            Ok(())
        } else {
            Err(RingError::Layout)
        }
    }

    /// Returns the ring's addresses and size.
    pub const fn layout(&self) -> RingLayout {
        self.layout
    }

    /// Returns the number of answered requests, modulo 65536.
    pub const fn used(&self) -> u16 {
        self.used.0
    }

    /// Returns the number of taken requests, modulo 65536.
    pub fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Sets the number of taken requests, modulo 65536.
    pub fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
    }

    /// Returns the number of requests that the guest has made available, modulo 65536.
    pub fn available(&self, memory: &impl GuestMemory) -> Result<u16, RingError> {
        let index = self.queue.avail_idx(memory, Ordering::Acquire);
        index.map(|index| index.0).map_err(RingError::Queue)
    }

    /// Returns the head of the next request, which stays available.
    pub fn peek(&self, memory: &impl GuestMemory) -> Result<Option<u16>, RingError> {
        let next = Wrapping(self.queue.next_avail());
        match (Wrapping(self.available(memory)?) - next).0 {
            0 => return Ok(None),
            waiting if waiting > self.layout.size => return Err(RingError::Available(waiting)),
            _ => {}
        }
        // The ring's memory was checked: the addition cannot overflow.
        let offset = 4 + 2 * u64::from(next.0 % self.layout.size);
        let address = GuestAddress(self.layout.available.0 + offset);
        let head: u16 = memory.load(address, Ordering::Acquire)?;
        Ok(Some(u16::from_le(head)))
    }

    /// Returns true if a request may start at `head`: a descriptor of the ring, and not the head of a taken, unanswered
    /// request.
    pub const fn may_start_at(&self, head: u16) -> bool {
        head < self.layout.size && self.taken[head as usize / 64] & (1 << (head % 64)) == 0
    }

    /// Marks the request at `head` as in progress.
    pub const fn begin(&mut self, head: u16) {
        self.taken[head as usize / 64] |= 1 << (head % 64);
    }

    /// Drops the request at `head` without an answer.
    pub const fn put_back(&mut self, head: u16) {
        self.taken[head as usize / 64] &= !(1 << (head % 64));
    }

    /// Counts the request found by [`Self::peek`] as taken.
    pub fn take(&mut self) {
        let next = Wrapping(self.queue.next_avail()) + Wrapping(1);
        self.queue.set_next_avail(next.0);
    }

    /// Asks the guest to signal new requests. Returns true if some came meanwhile.
    pub fn listen(
        &mut self,
        memory: &impl GuestMemory,
        log: WriteLog<'_>,
    ) -> Result<bool, RingError> {
        let more = self
            .queue
            .enable_notification(memory)
            .map_err(RingError::Queue)?;
        self.listens = true;
        if self.event_index {
            let offset = USED_HEADER + USED_ELEMENT * u64::from(self.layout.size);
            self.mark(log, offset, 2)?;
        } else {
            self.mark(log, 0, 2)?;
        }
        Ok(more)
    }

    /// Asks the guest not to signal new requests for now.
    pub fn ignore(
        &mut self,
        memory: &impl GuestMemory,
        log: WriteLog<'_>,
    ) -> Result<(), RingError> {
        if self.event_index || !self.listens {
            return Ok(());
        }
        self.listens = false;
        self.queue
            .disable_notification(memory)
            .map_err(RingError::Queue)?;
        self.mark(log, 0, 2)
    }

    /// Queues the answer to the request at `head`, with `written` bytes in its memory. The next [`Self::publish`] shows
    /// the answer to the guest.
    pub fn answer(&mut self, head: u16, written: u32) {
        self.answers.push((head, written));
    }

    /// Returns true if answers wait to be published.
    pub const fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Shows the guest all answers at once. Returns true if the guest wants a signal.
    pub fn publish(
        &mut self,
        memory: &impl GuestMemory,
        log: WriteLog<'_>,
        inflight: Option<&InflightRing>,
    ) -> Result<bool, RingError> {
        if self.answers.is_empty() {
            return Ok(false);
        }
        let old = self.used;
        for (place, &(head, written)) in self.answers.iter().enumerate() {
            if let Some(inflight) = inflight {
                inflight.link(head);
            }
            let slot = (old + Wrapping(place as u16)).0 % self.layout.size;
            let offset = USED_HEADER + USED_ELEMENT * u64::from(slot);
            let element = [u32::from(head).to_le(), written.to_le()];
            memory.write_obj(element, GuestAddress(self.layout.used.0 + offset))?;
            self.mark(log, offset, USED_ELEMENT)?;
        }
        self.used += Wrapping(self.answers.len() as u16);
        let index = GuestAddress(self.layout.used.0 + 2);
        memory.store(u16::to_le(self.used.0), index, Ordering::Release)?;
        self.mark(log, 2, 2)?;
        if let Some(inflight) = inflight {
            inflight.answered(self.answers.iter().map(|&(head, _)| head), self.used.0);
        }
        for (head, _) in self.answers.drain(..) {
            self.taken[usize::from(head) / 64] &= !(1 << (head % 64));
        }
        fence(Ordering::SeqCst);
        if self.event_index {
            let wanted = self.used_event(memory)?;
            // True if the index awaited by the guest is among the indices just passed.
            return Ok(self.used - wanted - Wrapping(1) < self.used - old);
        }
        let flags: u16 = memory.load(self.layout.available, Ordering::Relaxed)?;
        Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Returns true if the guest has handled all answers and waits for the next. Always false without an event index:
    /// only then can the guest tell.
    pub fn is_all_seen(&self, memory: &impl GuestMemory) -> Result<bool, RingError> {
        let can_tell = self.event_index && self.answers.is_empty();
        Ok(can_tell && self.used_event(memory)? == self.used)
    }

    /// Returns the used index, modulo 65536, after which the guest wants a signal.
    fn used_event(&self, memory: &impl GuestMemory) -> Result<Wrapping<u16>, RingError> {
        let offset = 4 + 2 * u64::from(self.layout.size);
        let address = GuestAddress(self.layout.available.0 + offset);
        let wanted: u16 = memory.load(address, Ordering::Acquire)?;
        Ok(Wrapping(u16::from_le(wanted)))
    }

    /// Marks bytes of the used ring as written.
    fn mark(&self, log: WriteLog<'_>, offset: u64, length: u64) -> Result<(), RingError> {
        let for_front_end = self.log.map(|start| start.saturating_add(offset));
        // The ring's memory was checked: the addition cannot overflow.
        log.mark_as(self.layout.used.0 + offset, for_front_end, length)?;
        Ok(())
    }
}
