//! The buffers of chunks and delayed writes at the source.

use std::io;
use std::rc::Rc;

use godwit_core::Limits;
use godwit_core::action::{ChunkSlot, DiskOperation};

use crate::memory::Mapping;
use crate::stream::{Keep, Payload};

/// Longest delayed write: longer ones are sent in pieces.
const DELAYED_BYTES: usize = 64 << 10;

/// One buffer per slot, in one mapping per migration: those of the locking window, then those of
/// delayed writes. Operations and frames that use it hold a reference, so the next migration can
/// have a new one at any time.
///
/// A pause may hand a slot out again while a frame of it waits to be sent. Frames take holds on
/// their slot, and a read into a slot with holds waits until they have ended.
#[derive(Default)]
pub(super) struct Chunks {
    memory: Option<Rc<Mapping>>,
    /// Slots of the locking window that this migration uses.
    window: usize,
    chunk_bytes: usize,
    /// The first slot of a delayed write.
    first_delayed: usize,
    slots: Box<[Slot]>,
    /// Slots whose deferred read may start.
    ready: Vec<ChunkSlot>,
    /// Reads that the disk has not finished, deferred ones included.
    reading: u32,
}

#[derive(Clone, Default)]
struct Slot {
    /// Frames that have not left the buffer.
    holds: u32,
    /// The read that waits for them.
    deferred: Option<DiskOperation>,
}

impl Chunks {
    /// Buffers for `window` chunks of `chunk_bytes` bytes, and for delayed writes.
    pub(super) fn new(limits: &Limits, window: u16, chunk_bytes: usize) -> io::Result<Self> {
        let chunk_bytes = chunk_bytes.next_multiple_of(4096);
        let (window, delayed) = (
            usize::from(window),
            usize::from(limits.delayed_chunks.max(1)),
        );
        let first_delayed = usize::from(limits.window_chunks);
        let memory = Mapping::new(window * chunk_bytes + delayed * DELAYED_BYTES)?;
        let slots = vec![Slot::default(); first_delayed + delayed];
        Ok(Self {
            memory: Some(Rc::new(memory)),
            window,
            chunk_bytes,
            first_delayed,
            ready: Vec::with_capacity(slots.len()),
            slots: slots.into_boxed_slice(),
            reading: 0,
        })
    }

    /// The address of a slot's buffer and what keeps it mapped; `None` when there is none of at
    /// least `length` bytes.
    pub(super) fn buffer(&self, slot: ChunkSlot, length: usize) -> Option<(*mut u8, Rc<Mapping>)> {
        let memory = self.memory.as_ref()?;
        let slot = usize::from(slot.0);
        let (start, room) = if slot < self.window {
            (slot * self.chunk_bytes, self.chunk_bytes)
        } else if (self.first_delayed..self.slots.len()).contains(&slot) {
            let before = (slot - self.first_delayed) * DELAYED_BYTES;
            (self.window * self.chunk_bytes + before, DELAYED_BYTES)
        } else {
            return None;
        };
        (length <= room).then(|| (memory.at(start), Rc::clone(memory)))
    }

    /// The first `length` bytes of a slot's buffer as the payload of a frame; takes a hold.
    pub(super) fn payload(&mut self, slot: ChunkSlot, length: usize) -> Option<Payload> {
        let (pointer, memory) = self.buffer(slot, length)?;
        self.slots.get_mut(usize::from(slot.0))?.holds += 1;
        // SAFETY: the reference keeps the memory mapped until the payload is released, and it was
        // read from the disk before the controller had it sent. The hold keeps later reads of the
        // slot away meanwhile.
        Some(unsafe { Payload::new(pointer, length, Keep::Chunk { slot, memory }) })
    }

    /// Ends the hold of a payload of this or an earlier migration.
    pub(super) fn release(&mut self, slot: ChunkSlot, memory: &Rc<Mapping>) {
        let current = self
            .memory
            .as_ref()
            .is_some_and(|current| Rc::ptr_eq(current, memory));
        if let Some(state) = self.slots.get_mut(usize::from(slot.0))
            && current
        {
            state.holds -= 1;
            if state.holds == 0 && state.deferred.is_some() {
                self.ready.push(slot);
            }
        }
    }

    /// Keeps a read for later if frames of the slot wait to be sent. False when it may start now.
    pub(super) fn defer(&mut self, slot: ChunkSlot, read: DiskOperation) -> bool {
        match self.slots.get_mut(usize::from(slot.0)) {
            Some(state) if state.holds > 0 => {
                state.deferred = Some(read);
                true
            }
            _ => false,
        }
    }

    /// A deferred read that may start.
    pub(super) fn next_ready(&mut self) -> Option<(ChunkSlot, DiskOperation)> {
        while let Some(slot) = self.ready.pop() {
            if let Some(read) = self.slots[usize::from(slot.0)].deferred.take() {
                return Some((slot, read));
            }
        }
        None
    }

    /// Takes back a read that waits.
    pub(super) fn cancel_deferred(&mut self) -> Option<ChunkSlot> {
        let at = self.slots.iter().position(|slot| slot.deferred.is_some())?;
        self.slots[at].deferred = None;
        Some(ChunkSlot(at as u16))
    }

    /// A read was asked for.
    pub(super) const fn begin(&mut self) {
        self.reading += 1;
    }

    /// A read is over.
    pub(super) const fn end(&mut self) {
        self.reading -= 1;
    }

    /// Whether a read that was asked for is not over.
    pub(super) const fn is_reading(&self) -> bool {
        self.reading > 0
    }
}

#[cfg(test)]
mod tests {
    use godwit_core::action::Inspect;
    use godwit_core::units::{Extent, Lba};

    use super::*;

    const LIMITS: Limits = Limits {
        requests: 64,
        window_chunks: 8,
        delayed_chunks: 2,
        delayed_ranges: 64,
    };

    fn read(start: u64) -> DiskOperation {
        let extent = Extent::new(Lba(start), 8).expect("an extent");
        let inspect = Inspect::Zeroes;
        DiskOperation::Read { extent, inspect }
    }

    fn released(chunks: &mut Chunks, payload: Payload) {
        let Keep::Chunk { slot, memory } = payload.keep else {
            panic!("the payload of something else")
        };
        chunks.release(slot, &memory);
    }

    #[test]
    fn no_two_slots_share_memory_and_delayed_writes_follow_the_whole_window() {
        let chunks = Chunks::new(&LIMITS, 3, 6000).expect("memory");
        let mut places: Vec<_> = [(0, 8192), (1, 8192), (2, 8192), (8, 65_536), (9, 65_536)]
            .into_iter()
            .map(|(slot, length)| {
                let (start, memory) = chunks.buffer(ChunkSlot(slot), length).expect("a buffer");
                assert!(chunks.buffer(ChunkSlot(slot), length + 1).is_none());
                let offset = start.addr() - memory.at(0).addr();
                assert!(offset + length <= memory.length(), "slot {slot}");
                offset..offset + length
            })
            .collect();
        places.sort_by_key(|place| place.start);
        assert!(places.is_sorted_by(|one, other| one.end <= other.start));
        for slot in [3, 7, 10, u16::MAX] {
            assert!(chunks.buffer(ChunkSlot(slot), 1).is_none(), "slot {slot}");
        }
    }

    #[test]
    fn a_read_waits_until_every_frame_of_its_buffer_has_left() {
        let mut chunks = Chunks::new(&LIMITS, 3, 4096).expect("memory");
        for slot in [ChunkSlot(1), ChunkSlot(9)] {
            assert!(!chunks.defer(slot, read(0)), "nothing is sent yet");
            let first = chunks.payload(slot, 4096).expect("a payload");
            let second = chunks.payload(slot, 4096).expect("a payload");
            assert!(chunks.defer(slot, read(8)));
            assert!(!chunks.defer(ChunkSlot(2), read(8)), "another slot");
            released(&mut chunks, first);
            assert!(chunks.next_ready().is_none());
            released(&mut chunks, second);
            assert_eq!(chunks.next_ready(), Some((slot, read(8))));
            assert!(chunks.next_ready().is_none());
            assert!(!chunks.defer(slot, read(16)), "nothing is sent any more");
        }
    }

    #[test]
    fn a_read_that_was_taken_back_does_not_start() {
        let mut chunks = Chunks::new(&LIMITS, 3, 4096).expect("memory");
        let frame = chunks.payload(ChunkSlot(0), 4096).expect("a payload");
        assert!(chunks.defer(ChunkSlot(0), read(0)));
        released(&mut chunks, frame);
        assert_eq!(chunks.cancel_deferred(), Some(ChunkSlot(0)));
        assert_eq!(chunks.cancel_deferred(), None);
        assert!(chunks.next_ready().is_none());
    }

    #[test]
    fn frames_of_an_earlier_migration_hold_nothing_of_the_next() {
        let mut chunks = Chunks::new(&LIMITS, 3, 4096).expect("memory");
        let old = chunks.payload(ChunkSlot(0), 4096).expect("a payload");
        chunks = Chunks::new(&LIMITS, 3, 4096).expect("memory");
        assert!(!chunks.defer(ChunkSlot(0), read(0)));
        let new = chunks.payload(ChunkSlot(0), 4096).expect("a payload");
        assert!(chunks.defer(ChunkSlot(0), read(0)));
        released(&mut chunks, old);
        assert!(chunks.next_ready().is_none(), "the new frame is still sent");
        released(&mut chunks, new);
        assert!(chunks.next_ready().is_some());
    }
}
