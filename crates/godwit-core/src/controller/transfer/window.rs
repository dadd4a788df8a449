//! The locking window: the four pointers of the double-write algorithm (Fig. 5 and Alg. 1 of the SmartNIC
//! storage-migration paper) and the chunks between them.

use std::collections::VecDeque;

use crate::action::{ChunkSlot, Digest};
use crate::controller::requests::slots::TagList;
use crate::units::{Extent, Lba, Sectors, Time};

/// State of a chunk in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum ChunkState {
    /// Locked; the read waits for guest writes that were under way before.
    Quiescing,
    /// A hole before the lock, being examined again.
    Looking,
    /// The local read is under way.
    Reading,
    /// Read; waits for its turn to be sent.
    Read(ChunkContent),
    /// Sent to the destination.
    Sent,
    /// Acknowledged: unlocked, and migrated as far as guest I/O is concerned.
    Done,
}

/// Knowledge about a chunk at the time of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum ChunkKind {
    /// May hold data.
    Data,
    /// A hole, to be examined again before the migration relies on the hole.
    Hole,
}

/// Result of the local read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum ChunkContent {
    Data,
    Zeroes,
    Digest(Digest),
}

#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct Chunk {
    pub(in crate::controller) slot: ChunkSlot,
    pub(in crate::controller) extent: Extent,
    pub(in crate::controller) kind: ChunkKind,
    pub(in crate::controller) state: ChunkState,
    /// Time of the lock.
    pub(in crate::controller) locked: Time,
    pub(in crate::controller) waiters: TagList,
}

/// The four pointers. They split the disk into *migrated* (below `write_tail`), *in flight* (the locking window, up to
/// `read_head`) and *to be migrated*. Within a pass they only move right, and `write_tail <= write_head <= read_tail <=
/// read_head`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::controller) struct Pointers {
    /// Local reads were submitted up to here.
    pub(in crate::controller) read_head: Lba,
    /// Local reads finished up to here.
    pub(in crate::controller) read_tail: Lba,
    /// Remote writes were submitted up to here.
    pub(in crate::controller) write_head: Lba,
    /// Remote writes were acknowledged up to here.
    pub(in crate::controller) write_tail: Lba,
}

impl Pointers {
    /// Returns the pointers of an empty window.
    const fn at(place: Lba) -> Self {
        Self {
            read_head: place,
            read_tail: place,
            write_head: place,
            write_tail: place,
        }
    }
}

/// The chunks of the window in address order, and their slots.
#[derive(Debug)]
pub(in crate::controller) struct Window {
    pub(in crate::controller) pointers: Pointers,
    chunks: VecDeque<Chunk>,
    free: Vec<ChunkSlot>,
    /// Slots of chunks that were given up while being read.
    orphans: Vec<ChunkSlot>,
    quiescing: u32,
}

impl Window {
    pub(in crate::controller) fn new(slots: u16) -> Self {
        Self {
            pointers: Pointers::default(),
            chunks: VecDeque::with_capacity(usize::from(slots)),
            free: (0..slots).rev().map(ChunkSlot).collect(),
            orphans: Vec::with_capacity(usize::from(slots)),
            quiescing: 0,
        }
    }

    /// Starts a pass from the beginning of the disk.
    pub(in crate::controller) fn restart(&mut self) {
        debug_assert!(self.chunks.is_empty(), "a pass ends with an empty window");
        self.pointers = Pointers::default();
    }

    /// Marks the rest of the disk behind the window as migrated: the last chunk reaches to the end of the disk as far
    /// as guest I/O is concerned.
    pub(in crate::controller) fn reach_end(&mut self, capacity: Sectors) {
        self.pointers.read_head = Lba(capacity.0);
        self.close_up();
    }

    /// Without a chunk in the window, everything before the window is migrated.
    fn close_up(&mut self) {
        if self.chunks.is_empty() {
            self.pointers = Pointers::at(self.pointers.read_head);
        }
    }

    /// Returns the end of the last unmigrated chunk, or the start of the next chunk.
    pub(in crate::controller) fn end(&self) -> Lba {
        let last = self.chunks.back();
        last.map_or(self.pointers.read_head, |chunk| chunk.extent.end())
    }

    pub(in crate::controller) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(in crate::controller) fn has_free_slot(&self) -> bool {
        !self.free.is_empty()
    }

    /// Locks the next chunk, at or right of the read head. Returns `None` if the window is full.
    pub(in crate::controller) fn lock(
        &mut self,
        extent: Extent,
        kind: ChunkKind,
        now: Time,
    ) -> Option<ChunkSlot> {
        debug_assert!(
            extent.start() >= self.pointers.read_head,
            "pointers only move right"
        );
        let slot = self.free.pop()?;
        let state = ChunkState::Quiescing;
        self.chunks.push_back(Chunk {
            slot,
            extent,
            kind,
            state,
            locked: now,
            waiters: TagList::EMPTY,
        });
        self.quiescing += 1;
        self.pointers.read_head = extent.end();
        Some(slot)
    }

    /// Returns true if a chunk waits for guest writes to finish.
    pub(in crate::controller) fn has_quiescing(&self) -> bool {
        self.quiescing > 0
    }

    /// Returns the number of chunks in the window.
    pub(in crate::controller) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Returns the sectors of the chunks in the window.
    pub(in crate::controller) fn sectors(&self) -> u64 {
        self.chunks
            .iter()
            .map(|chunk| u64::from(chunk.extent.sectors()))
            .sum()
    }

    /// Returns the chunk at this place in the window if the chunk waits for guest writes and overlaps the extent.
    pub(in crate::controller) fn quiescing_at(
        &self,
        at: usize,
        extent: Extent,
    ) -> Option<(ChunkSlot, Extent)> {
        let chunk = self.chunks.get(at)?;
        (chunk.state == ChunkState::Quiescing && chunk.extent.overlaps(extent))
            .then_some((chunk.slot, chunk.extent))
    }

    pub(in crate::controller) fn get(&mut self, slot: ChunkSlot) -> Option<&mut Chunk> {
        self.chunks.iter_mut().find(|chunk| chunk.slot == slot)
    }

    /// Starts to read a chunk whose writes have finished, or to examine a chunk that was a hole.
    pub(in crate::controller) fn start_reading(&mut self, slot: ChunkSlot) -> Option<ChunkKind> {
        let chunk = self.get(slot)?;
        let kind = chunk.kind;
        chunk.state = match kind {
            ChunkKind::Data => ChunkState::Reading,
            ChunkKind::Hole => ChunkState::Looking,
        };
        self.quiescing -= 1;
        Some(kind)
    }

    /// Returns true if the last chunk may turn out to be shorter, so that no chunk can follow yet.
    pub(in crate::controller) fn ends_uncertain(&self) -> bool {
        self.chunks.back().is_some_and(|chunk| {
            let looked = !matches!(chunk.state, ChunkState::Quiescing | ChunkState::Looking);
            chunk.kind == ChunkKind::Hole && !looked
        })
    }

    /// Shortens the last chunk to the `sectors` that still are a hole. The read head goes back to the hole's end; a
    /// chunk without a hole leaves the window. Returns the chunk's waiters.
    pub(in crate::controller) fn looked(&mut self, slot: ChunkSlot, sectors: u32) -> TagList {
        let Some(mut chunk) = self
            .chunks
            .pop_back_if(|chunk| chunk.slot == slot && chunk.state == ChunkState::Looking)
        else {
            return TagList::EMPTY;
        };
        let whole = sectors >= chunk.extent.sectors();
        let start = chunk.extent.start();
        let Some(hole) = Extent::new(start, sectors.min(chunk.extent.sectors())) else {
            self.pointers.read_head = start;
            self.free.push(slot);
            return chunk.waiters;
        };
        chunk.extent = hole;
        chunk.state = ChunkState::Read(ChunkContent::Zeroes);
        self.pointers.read_head = hole.end();
        // Waiters for the unlocked part cannot be told from the others.
        let woken = if whole {
            TagList::EMPTY
        } else {
            core::mem::replace(&mut chunk.waiters, TagList::EMPTY)
        };
        self.chunks.push_back(chunk);
        woken
    }

    /// Returns the chunk whose lock delays a write to the extent.
    #[inline]
    pub(in crate::controller) fn lock_over(&mut self, extent: Extent) -> Option<&mut Chunk> {
        if extent.start() >= self.pointers.read_head || extent.end() <= self.pointers.write_tail {
            return None;
        }
        self.chunks
            .iter_mut()
            .find(|chunk| chunk.state != ChunkState::Done && chunk.extent.overlaps(extent))
    }

    /// Returns the next chunk to send: chunks leave in address order, each once it is read.
    pub(in crate::controller) fn next_to_send(
        &mut self,
    ) -> Option<(ChunkSlot, Extent, ChunkContent)> {
        let unsent = self
            .chunks
            .iter_mut()
            .find(|chunk| !matches!(chunk.state, ChunkState::Sent | ChunkState::Done))?;
        let ChunkState::Read(content) = unsent.state else {
            return None;
        };
        unsent.state = ChunkState::Sent;
        self.pointers.write_head = unsent.extent.end();
        self.pointers.read_tail = self.pointers.read_tail.max(unsent.extent.end());
        Some((unsent.slot, unsent.extent, content))
    }

    /// Marks a sent chunk as acknowledged and returns its former state; `None` if no such chunk was sent.
    pub(in crate::controller) fn acknowledge(&mut self, slot: ChunkSlot) -> Option<Chunk> {
        let chunk = self
            .get(slot)
            .filter(|chunk| chunk.state == ChunkState::Sent)?;
        let acknowledged = *chunk;
        chunk.state = ChunkState::Done;
        chunk.waiters = TagList::EMPTY;
        while let Some(chunk) = self
            .chunks
            .pop_front_if(|chunk| chunk.state == ChunkState::Done)
        {
            self.pointers.write_tail = chunk.extent.end();
            self.free.push(chunk.slot);
        }
        self.close_up();
        Some(acknowledged)
    }

    /// Gives up every chunk that is not migrated (`LM_head := LM_tail`) and returns these chunks. Chunks being read
    /// keep their slots until [`Self::orphan_read`].
    pub(in crate::controller) fn retreat(&mut self) -> Vec<Chunk> {
        let given_up: Vec<_> = self.chunks.drain(..).collect();
        for chunk in &given_up {
            match chunk.state {
                ChunkState::Reading | ChunkState::Looking => self.orphans.push(chunk.slot),
                _ => self.free.push(chunk.slot),
            }
        }
        self.quiescing = 0;
        self.pointers = Pointers::at(self.pointers.write_tail);
        given_up
    }

    /// Notes the end of the read of a chunk that was given up. Returns false if the slot is not such a chunk's.
    pub(in crate::controller) fn orphan_read(&mut self, slot: ChunkSlot) -> bool {
        let Some(at) = self.orphans.iter().position(|orphan| *orphan == slot) else {
            return false;
        };
        self.orphans.swap_remove(at);
        self.free.push(slot);
        true
    }

    /// Returns the local reads under way, including reads of chunks given up.
    pub(in crate::controller) fn reads(&self) -> u32 {
        let reading =
            |chunk: &&Chunk| matches!(chunk.state, ChunkState::Reading | ChunkState::Looking);
        (self.orphans.len() + self.chunks.iter().filter(reading).count()) as u32
    }
}
