//! The buffers of chunks and delayed writes at the source.

use std::io;
use std::rc::Rc;

use godwit_core::action::{
    ChunkSlot, DelayedSlot, DiskOperation, PULL_SECTORS, PULL_SLOTS, PullSlot, SourceSlot,
};
use godwit_core::units::Bytes;
use godwit_core::{Limits, MigrationOptions};

use godwit_io::page_buffers::Mapping;
use godwit_io::stream::{Keep, Payload};

/// Bytes of the first chunks that are committed before a migration starts, at most.
const COMMITTED_FIRST: usize = 4 << 20;

/// Longest delayed write: longer ones are sent in pieces.
const DELAYED_BYTES: usize = 64 << 10;

/// The memory of one migration's chunks at the source.
#[derive(Debug)]
pub struct ChunkMemory {
    memory: Mapping,
    /// Slots of the locking window.
    window: usize,
    chunk_bytes: usize,
    delayed: usize,
}

impl ChunkMemory {
    /// Maps the memory for a migration with these options and commits the part for the first chunks and the delayed
    /// writes. On the engine's thread, the guest's requests would wait: 2 MiB can take milliseconds. [`Chunks::new`]
    /// commits the rest on a new thread. Here the connections would wait for the rest, although few chunks need it at
    /// first.
    pub(in crate::engine) fn new(limits: &Limits, options: &MigrationOptions) -> io::Result<Self> {
        let window = usize::from(options.window_chunks);
        let chunk_bytes = (options.chunk_sectors as usize * 512).next_multiple_of(4096);
        let delayed = usize::from(limits.delayed_chunks.max(1));
        let memory = Mapping::new(window * chunk_bytes + delayed * DELAYED_BYTES)?;
        memory.commit(window * chunk_bytes, delayed * DELAYED_BYTES);
        memory.commit(0, COMMITTED_FIRST.min(window * chunk_bytes));
        Ok(Self {
            memory,
            window,
            chunk_bytes,
            delayed,
        })
    }

    /// Returns true if the memory is enough for a migration with these options.
    pub(in crate::engine) fn suffices(&self, options: &MigrationOptions) -> bool {
        self.window >= usize::from(options.window_chunks)
            && self.chunk_bytes / 512 >= options.chunk_sectors as usize
    }
}

/// A buffer per slot, in a mapping per migration: first the locking window, then the delayed writes. The pieces that an
/// owner pulls have a mapping of their own. Operations and frames hold a reference to the mapping they use, so the next
/// migration can have a new mapping at any time.
///
/// A pause may hand a slot out again while a frame of the slot waits to be sent. Frames take holds on their slot, and a
/// read into a slot with holds waits until the holds have ended.
#[derive(Default)]
pub(in crate::engine) struct Chunks {
    memory: Option<Rc<Mapping>>,
    /// Slots of the locking window that this migration uses.
    window: usize,
    chunk_bytes: usize,
    /// First slot of a delayed write.
    first_delayed: usize,
    slots: Box<[Slot]>,
    /// Slots whose deferred read may start.
    ready: Vec<SourceSlot>,
    /// Reads that the disk has not finished, deferred ones included.
    reading: u32,
}

#[derive(Clone, Default)]
struct Slot {
    /// Frames that have not left the buffer.
    holds: u32,
    /// Read that waits for the frames.
    deferred: Option<DiskOperation>,
}

impl Chunks {
    /// Divides this memory into buffers for a disk of `capacity` bytes, and commits the rest in the background.
    pub(in crate::engine) fn new(limits: &Limits, memory: ChunkMemory, capacity: Bytes) -> Self {
        let ChunkMemory {
            mut memory,
            window,
            chunk_bytes,
            delayed,
        } = memory;
        let copied = usize::try_from(capacity.0).unwrap_or(usize::MAX);
        memory.commit_in_background(copied.min(window * chunk_bytes));
        let first_delayed = usize::from(limits.window_chunks);
        let slots = vec![Slot::default(); first_delayed + delayed];
        Self {
            memory: Some(Rc::new(memory)),
            window,
            chunk_bytes,
            first_delayed,
            ready: Vec::with_capacity(slots.len()),
            slots: slots.into_boxed_slice(),
            reading: 0,
        }
    }

    /// Maps buffers for the pieces that an owner pulls of a disk given away.
    pub(in crate::engine) fn for_pulls() -> io::Result<Self> {
        let window = usize::from(PULL_SLOTS);
        let chunk_bytes = PULL_SECTORS as usize * 512;
        Ok(Self {
            memory: Some(Rc::new(Mapping::new(window * chunk_bytes)?)),
            window,
            chunk_bytes,
            first_delayed: window,
            ready: Vec::with_capacity(window),
            slots: vec![Slot::default(); window].into_boxed_slice(),
            reading: 0,
        })
    }

    /// Returns true if there is memory.
    pub(in crate::engine) const fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Drops the memory, unless reads into it are pending. Memory of queued frames goes with the frames.
    pub(in crate::engine) fn let_go(&mut self) {
        if !self.is_reading() {
            *self = Self::default();
        }
    }

    /// Returns the slot's index in `slots`: the locking window comes first.
    fn index(&self, slot: SourceSlot) -> usize {
        match slot {
            SourceSlot::Chunk(ChunkSlot(slot)) | SourceSlot::Pull(PullSlot(slot)) => slot.into(),
            SourceSlot::Delayed(slot) => self.first_delayed + usize::from(slot.0),
        }
    }

    /// Returns the address of a slot's buffer and the mapping that holds it; `None` if the slot has no buffer of at
    /// least `length` bytes.
    pub(in crate::engine) fn buffer(
        &self,
        slot: SourceSlot,
        length: usize,
    ) -> Option<(*mut u8, Rc<Mapping>)> {
        let memory = self.memory.as_ref()?;
        let (start, room) = match slot {
            SourceSlot::Chunk(ChunkSlot(chunk)) | SourceSlot::Pull(PullSlot(chunk))
                if usize::from(chunk) < self.window =>
            {
                (usize::from(chunk) * self.chunk_bytes, self.chunk_bytes)
            }
            SourceSlot::Delayed(DelayedSlot(delayed)) if self.index(slot) < self.slots.len() => {
                let before = usize::from(delayed) * DELAYED_BYTES;
                (self.window * self.chunk_bytes + before, DELAYED_BYTES)
            }
            _ => return None,
        };
        (length <= room).then(|| (memory.at(start), Rc::clone(memory)))
    }

    /// Takes a hold. Returns the first `length` bytes of a slot's buffer as the payload of a frame.
    pub(in crate::engine) fn payload(
        &mut self,
        slot: SourceSlot,
        length: usize,
    ) -> Option<Payload> {
        let (pointer, memory) = self.buffer(slot, length)?;
        let index = self.index(slot);
        self.slots.get_mut(index)?.holds += 1;
        // SAFETY: the reference keeps the memory mapped until the payload is released. The memory was read from the
        // disk before the controller had it sent. The hold keeps later reads of the slot away meanwhile.
        Some(unsafe { Payload::new(pointer, length, Keep::Chunk { slot, memory }) })
    }

    /// Ends the hold of a payload of this or an earlier migration.
    pub(in crate::engine) fn release(&mut self, slot: SourceSlot, memory: &Rc<Mapping>) {
        let current = self
            .memory
            .as_ref()
            .is_some_and(|current| Rc::ptr_eq(current, memory));
        let index = self.index(slot);
        if let Some(state) = self.slots.get_mut(index)
            && current
        {
            state.holds -= 1;
            if state.holds == 0 && state.deferred.is_some() {
                self.ready.push(slot);
            }
        }
    }

    /// Defers a read if frames of the slot wait to be sent. Returns false if the read may start now.
    pub(in crate::engine) fn defer(&mut self, slot: SourceSlot, read: DiskOperation) -> bool {
        let index = self.index(slot);
        match self.slots.get_mut(index) {
            Some(state) if state.holds > 0 => {
                state.deferred = Some(read);
                true
            }
            _ => false,
        }
    }

    /// Returns a deferred read that may start.
    pub(in crate::engine) fn next_ready(&mut self) -> Option<(SourceSlot, DiskOperation)> {
        while let Some(slot) = self.ready.pop() {
            let index = self.index(slot);
            if let Some(read) = self.slots[index].deferred.take() {
                return Some((slot, read));
            }
        }
        None
    }

    /// Cancels a deferred read.
    pub(in crate::engine) fn cancel_deferred(&mut self) -> Option<SourceSlot> {
        let at = self.slots.iter().position(|slot| slot.deferred.is_some())?;
        self.slots[at].deferred = None;
        let number = |at: usize| at as u16;
        Some(match at.checked_sub(self.first_delayed) {
            None => SourceSlot::Chunk(ChunkSlot(number(at))),
            Some(delayed) => SourceSlot::Delayed(DelayedSlot(number(delayed))),
        })
    }

    /// Counts a read as requested.
    pub(in crate::engine) const fn begin(&mut self) {
        self.reading += 1;
    }

    /// Counts a read as ended.
    pub(in crate::engine) const fn end(&mut self) {
        self.reading -= 1;
    }

    /// Returns true if a requested read has not ended.
    pub(in crate::engine) const fn is_reading(&self) -> bool {
        self.reading > 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use godwit_core::action::Inspect;
    use godwit_core::units::{Extent, Lba, MigrationId};

    use super::*;

    const LIMITS: Limits = Limits {
        requests: 64,
        window_chunks: 8,
        delayed_chunks: 2,
        delayed_ranges: 64,
        hot_places: 16,
        area_sectors: godwit_core::AREA_SECTORS,
        active_areas: 64,
    };

    /// Returns the buffers of three chunks of `sectors` sectors.
    fn chunks(sectors: u32) -> Chunks {
        let options = MigrationOptions {
            window_chunks: 3,
            chunk_sectors: sectors,
            ..MigrationOptions::new(MigrationId([1; 16]))
        };
        let memory = ChunkMemory::new(&LIMITS, &options).expect("memory");
        assert!(memory.suffices(&options));
        Chunks::new(&LIMITS, memory, Bytes(64 << 20))
    }

    fn chunk(slot: u16) -> SourceSlot {
        SourceSlot::Chunk(ChunkSlot(slot))
    }

    fn delayed(slot: u16) -> SourceSlot {
        SourceSlot::Delayed(DelayedSlot(slot))
    }

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
        let buffers = chunks(12);
        let slots = (0..3)
            .map(|slot| (chunk(slot), 8192))
            .chain((0..2).map(|slot| (delayed(slot), 65_536)));
        let mut places: Vec<_> = slots
            .map(|(slot, length)| {
                let (start, memory) = buffers.buffer(slot, length).expect("a buffer");
                assert!(buffers.buffer(slot, length + 1).is_none());
                let offset = start.addr() - memory.at(0).addr();
                assert!(offset + length <= memory.length(), "{slot:?}");
                offset..offset + length
            })
            .collect();
        places.sort_by_key(|place| place.start);
        assert!(places.is_sorted_by(|one, other| one.end <= other.start));
        let window = [3, 7, 8, u16::MAX].map(chunk);
        for slot in window.into_iter().chain([2, u16::MAX].map(delayed)) {
            assert!(buffers.buffer(slot, 1).is_none(), "{slot:?}");
        }
    }

    #[test]
    fn what_the_first_chunks_need_is_committed_at_once_and_the_rest_of_what_a_disk_needs_soon() {
        let options = MigrationOptions::new(MigrationId([1; 16]));
        let ready = ChunkMemory::new(&LIMITS, &options).expect("memory");
        let first = COMMITTED_FIRST + 2 * DELAYED_BYTES;
        // Slightly more with huge pages.
        let committed = ready.memory.committed();
        assert!((first..2 * first).contains(&committed), "{committed}");
        let chunks = Chunks::new(&LIMITS, ready, Bytes(16 << 20));
        let memory = chunks.memory.as_ref().expect("memory");
        let deadline = Instant::now() + Duration::from_secs(10);
        while memory.committed() < (16 << 20) + 2 * DELAYED_BYTES {
            assert!(Instant::now() < deadline, "it was not committed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(memory.committed() < memory.length(), "the disk is shorter");
    }

    #[test]
    fn a_read_waits_until_every_frame_of_its_buffer_has_left() {
        let mut buffers = chunks(8);
        for slot in [chunk(1), delayed(1)] {
            assert!(!buffers.defer(slot, read(0)), "nothing is sent yet");
            let first = buffers.payload(slot, 4096).expect("a payload");
            let second = buffers.payload(slot, 4096).expect("a payload");
            assert!(buffers.defer(slot, read(8)));
            assert!(!buffers.defer(chunk(2), read(8)), "another slot");
            released(&mut buffers, first);
            assert!(buffers.next_ready().is_none());
            released(&mut buffers, second);
            assert_eq!(buffers.next_ready(), Some((slot, read(8))));
            assert!(buffers.next_ready().is_none());
            assert!(!buffers.defer(slot, read(16)), "nothing is sent any more");
        }
    }

    #[test]
    fn a_read_that_was_taken_back_does_not_start() {
        let mut buffers = chunks(8);
        let frame = buffers.payload(chunk(0), 4096).expect("a payload");
        assert!(buffers.defer(chunk(0), read(0)));
        released(&mut buffers, frame);
        assert_eq!(buffers.cancel_deferred(), Some(chunk(0)));
        assert_eq!(buffers.cancel_deferred(), None);
        assert!(buffers.next_ready().is_none());
    }

    #[test]
    fn frames_of_an_earlier_migration_hold_nothing_of_the_next() {
        let mut buffers = chunks(8);
        let old = buffers.payload(chunk(0), 4096).expect("a payload");
        buffers = chunks(8);
        assert!(!buffers.defer(chunk(0), read(0)));
        let new = buffers.payload(chunk(0), 4096).expect("a payload");
        assert!(buffers.defer(chunk(0), read(0)));
        released(&mut buffers, old);
        assert!(
            buffers.next_ready().is_none(),
            "the new frame is still sent"
        );
        released(&mut buffers, new);
        assert!(buffers.next_ready().is_some());
    }
}
