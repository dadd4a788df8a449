//! The unfinished requests and received frames, one slot per tag, and the waits between them.

use crate::action::{ChunkSlot, DelayedSlot, Digest, PULL_SLOTS, PullSlot};
use crate::request::{Operation, Origin, RequestError, RequestTag};
use crate::units::{Extent, Generation, Lba, Time};

const NONE: u32 = u32::MAX;

/// Content of a slot.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) enum Work {
    /// Nothing: the tag is free.
    Free,
    /// A guest's request, from here or forwarded by the peer.
    Request {
        operation: Operation,
        origin: Origin,
    },
    /// A copy from the source.
    Copy {
        slot: ChunkSlot,
        generation: Generation,
        zeroes: bool,
    },
    /// A double write from the source.
    DoubleWrite {
        tag: u32,
        generation: Generation,
        zeroes: bool,
        unmap: bool,
    },
    /// A delayed write from the source.
    DelayedWrite {
        slot: DelayedSlot,
        generation: Generation,
        zeroes: bool,
    },
    /// A comparison requested by the source.
    Verify {
        slot: ChunkSlot,
        generation: Generation,
        digest: Digest,
    },
    /// A hole of the source that is looked for here, not yet from `from` on.
    VerifyHole {
        slot: ChunkSlot,
        generation: Generation,
        from: Lba,
    },
    /// A part of the disk that this node has pulled.
    Pulled { slot: PullSlot, zeroes: bool },
}

/// Progress of the work in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum WorkStage {
    /// Waits until the owner is known.
    Held,
    /// Waits for an earlier overlapping write, or for its turn.
    Waiting,
    /// Waits for the chunk that locks its addresses.
    Locked,
    /// Waits for missing blocks.
    Lacking,
    /// Waits until the activity log has its area.
    Logging,
    /// Carried out here.
    Here {
        /// True until the local disk has finished the work.
        at_disk: bool,
        /// True while the work waits for the destination's acknowledgement of its double write.
        at_destination: bool,
    },
    /// Waits for the owner.
    Forwarded {
        /// True if the request was sent to the owner, which may have carried it out.
        sent: bool,
    },
    /// Waits for the stored fact that blocks are no longer missing.
    Storing,
    /// Finished.
    Done,
}

/// A first-in first-out list of tags, linked through the slots.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct TagList {
    head: u32,
    tail: u32,
}

impl TagList {
    pub(in crate::controller) const EMPTY: Self = Self {
        head: NONE,
        tail: NONE,
    };

    pub(in crate::controller) const fn is_empty(&self) -> bool {
        self.head == NONE
    }
}

impl Default for TagList {
    fn default() -> Self {
        Self::EMPTY
    }
}

#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct Slot {
    pub(in crate::controller) work: Work,
    pub(in crate::controller) stage: WorkStage,
    /// True if the request has passed the gate.
    pub(in crate::controller) admitted: bool,
    /// True if the write table has an entry of this slot.
    pub(in crate::controller) registered: bool,
    /// True if the destination was told of this write.
    pub(in crate::controller) doubled: bool,
    /// True if the write does not wait for chunks, or no longer: the write reaches the destination later.
    pub(in crate::controller) unlocked: bool,
    /// True if the request waited too long for the migration and nothing could be done.
    pub(in crate::controller) late: bool,
    /// True if the write in front also carries out this write.
    pub(in crate::controller) combined: bool,
    /// True for a double write from the source that was acknowledged before being written.
    pub(in crate::controller) acknowledged: bool,
    /// True for a frame that is dropped when its turn comes.
    pub(in crate::controller) stale: bool,
    /// True if the request's client is gone.
    pub(in crate::controller) abandoned: bool,
    /// Number of the double write among the double writes with this tag.
    pub(in crate::controller) turn: u16,
    /// Generation in which the write was sent to the destination, or number of a forwarded request.
    pub(in crate::controller) generation: Generation,
    /// Arrival of the request.
    pub(in crate::controller) arrived: Time,
    pub(in crate::controller) extent: Option<Extent>,
    pub(in crate::controller) sequence: u64,
    /// Number of client attachments before the request's arrival.
    pub(in crate::controller) era: u32,
    pub(in crate::controller) issued: Time,
    pub(in crate::controller) result: Result<(), RequestError>,
    pub(in crate::controller) waiters: TagList,
    /// The write whose list of waiters contains this slot.
    blocker: u32,
    next: u32,
}

impl Slot {
    const FREE: Self = Self {
        work: Work::Free,
        stage: WorkStage::Held,
        admitted: false,
        registered: false,
        doubled: false,
        unlocked: false,
        late: false,
        combined: false,
        acknowledged: false,
        stale: false,
        abandoned: false,
        turn: 0,
        generation: Generation(0),
        arrived: Time(0),
        extent: None,
        sequence: 0,
        era: 0,
        issued: Time(0),
        result: Ok(()),
        waiters: TagList::EMPTY,
        blocker: NONE,
        next: NONE,
    };

    pub(in crate::controller) const fn is_free(&self) -> bool {
        matches!(self.work, Work::Free)
    }

    pub(in crate::controller) const fn is_request(&self) -> bool {
        matches!(self.work, Work::Request { .. })
    }

    pub(in crate::controller) const fn is_pulled(&self) -> bool {
        matches!(self.work, Work::Pulled { .. })
    }

    /// Returns true if the request was forwarded under this number and is unanswered.
    pub(in crate::controller) fn awaits_reply(&self, number: u32) -> bool {
        self.stage == (WorkStage::Forwarded { sent: true }) && self.generation == Generation(number)
    }

    /// Returns true until the local disk has finished the work.
    #[inline]
    pub(in crate::controller) const fn is_at_disk(&self) -> bool {
        matches!(self.stage, WorkStage::Here { at_disk: true, .. })
    }

    /// Returns true while the work waits for the destination's acknowledgement.
    #[inline]
    pub(in crate::controller) const fn is_at_destination(&self) -> bool {
        matches!(
            self.stage,
            WorkStage::Here {
                at_destination: true,
                ..
            }
        )
    }

    /// Stops waiting for the destination's acknowledgement. Returns true if the work still waits for the disk.
    #[inline]
    pub(in crate::controller) const fn forget_destination(&mut self) -> bool {
        match &mut self.stage {
            WorkStage::Here {
                at_disk,
                at_destination,
            } => {
                *at_destination = false;
                *at_disk
            }
            _ => false,
        }
    }

    /// Returns true if the request waits for the owner.
    #[inline]
    pub(in crate::controller) const fn is_forwarded(&self) -> bool {
        matches!(self.stage, WorkStage::Forwarded { .. })
    }

    /// Returns true if the work waits here for its turn.
    #[inline]
    pub(in crate::controller) const fn is_waiting(&self) -> bool {
        matches!(
            self.stage,
            WorkStage::Waiting | WorkStage::Locked | WorkStage::Lacking | WorkStage::Logging
        )
    }

    /// Returns true if the work is being carried out, here or elsewhere.
    #[inline]
    pub(in crate::controller) const fn is_in_flight(&self) -> bool {
        matches!(
            self.stage,
            WorkStage::Here { .. } | WorkStage::Forwarded { .. }
        )
    }

    /// Returns the durability flag of a request that changes the disk's content.
    pub(in crate::controller) const fn durable_write(&self) -> Option<bool> {
        match self.work {
            Work::Request {
                operation: Operation::Write { fua, .. } | Operation::WriteZeroes { fua, .. },
                ..
            } => Some(fua),
            _ => None,
        }
    }

    /// Returns the durability flag of a request that writes data.
    pub(in crate::controller) const fn plain_write(&self) -> Option<bool> {
        match self.work {
            Work::Request {
                operation: Operation::Write { fua, .. },
                ..
            } => Some(fua),
            _ => None,
        }
    }

    /// Returns true if the slot waits for an earlier write.
    pub(in crate::controller) const fn waits_for_another(&self) -> bool {
        self.blocker != NONE
    }

    /// Returns true if the work changes the disk's content.
    pub(in crate::controller) const fn is_write(&self) -> bool {
        match &self.work {
            Work::Request { operation, .. } => operation.is_write(),
            Work::Copy { .. }
            | Work::DoubleWrite { .. }
            | Work::DelayedWrite { .. }
            | Work::Pulled { .. } => true,
            Work::Free | Work::Verify { .. } | Work::VerifyHole { .. } => false,
        }
    }
}

/// All slots of a controller.
#[derive(Debug)]
pub(in crate::controller) struct Slots {
    /// Slots of the body's tags, followed by the slots of pulled parts.
    slots: Box<[Slot]>,
    tags: u32,
    next_sequence: u64,
    era: u32,
}

impl Slots {
    pub(in crate::controller) fn new(count: u32) -> Self {
        Self {
            slots: vec![Slot::FREE; count as usize + usize::from(PULL_SLOTS)].into_boxed_slice(),
            tags: count,
            next_sequence: 0,
            era: 0,
        }
    }

    /// Puts work into a free slot. Returns false if the tag is out of range or busy.
    #[inline]
    pub(in crate::controller) fn occupy(
        &mut self,
        tag: RequestTag,
        work: Work,
        extent: Option<Extent>,
    ) -> bool {
        tag.0 < self.tags && self.fill(tag, work, extent)
    }

    /// Returns the internal tag of a part pulled into this slot.
    pub(in crate::controller) const fn pull_tag(&self, slot: PullSlot) -> RequestTag {
        RequestTag(self.tags + slot.0 as u32)
    }

    /// Puts a pulled part into its own slot, which is free.
    pub(in crate::controller) fn occupy_pull(
        &mut self,
        slot: PullSlot,
        work: Work,
        extent: Extent,
    ) -> RequestTag {
        let tag = self.pull_tag(slot);
        let free = self.fill(tag, work, Some(extent));
        debug_assert!(free, "a slot is pulled into once at a time");
        tag
    }

    #[inline]
    fn fill(&mut self, tag: RequestTag, work: Work, extent: Option<Extent>) -> bool {
        let (sequence, era) = (self.next_sequence, self.era);
        match self.slots.get_mut(tag.0 as usize) {
            Some(slot) if slot.is_free() => {
                *slot = Slot {
                    work,
                    extent,
                    sequence,
                    era,
                    ..Slot::FREE
                };
                self.next_sequence += 1;
                true
            }
            _ => false,
        }
    }

    /// Begins a new era because a client attaches: the client may have left other nodes with requests unanswered, and
    /// its new requests come after them.
    pub(in crate::controller) const fn begin_era(&mut self) {
        self.era = self.era.wrapping_add(1);
    }

    #[inline]
    pub(in crate::controller) fn release(&mut self, tag: RequestTag) {
        self.slots[tag.0 as usize].work = Work::Free;
    }

    #[inline]
    pub(in crate::controller) fn get(&self, tag: RequestTag) -> Option<&Slot> {
        self.slots
            .get(tag.0 as usize)
            .filter(|slot| !slot.is_free())
    }

    #[inline]
    pub(in crate::controller) fn get_mut(&mut self, tag: RequestTag) -> Option<&mut Slot> {
        self.slots
            .get_mut(tag.0 as usize)
            .filter(|slot| !slot.is_free())
    }

    /// Returns true if the request with this place in the order of arrival waits for the destination or for a chunk,
    /// and is not known to be late.
    #[inline]
    pub(in crate::controller) fn waits_for_migration(
        &self,
        tag: RequestTag,
        sequence: u64,
    ) -> bool {
        self.waits(tag, sequence, false)
    }

    /// Like [`Self::waits_for_migration`], for a request known to be late.
    pub(in crate::controller) fn is_late_still(&self, tag: RequestTag, sequence: u64) -> bool {
        self.waits(tag, sequence, true)
    }

    #[inline]
    fn waits(&self, tag: RequestTag, sequence: u64, late: bool) -> bool {
        self.get(tag).is_some_and(|slot| {
            slot.sequence == sequence
                && slot.late == late
                && (slot.stage == WorkStage::Locked || slot.is_at_destination())
        })
    }

    /// Returns the occupied slots accepted by `matches`, oldest first. For rare events: the result is allocated.
    pub(in crate::controller) fn select(&self, matches: impl Fn(&Slot) -> bool) -> Vec<RequestTag> {
        let mut found: Vec<_> = (0u32..)
            .zip(&*self.slots)
            .filter(|(_, slot)| !slot.is_free() && matches(slot))
            .map(|(tag, slot)| (slot.sequence, RequestTag(tag)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, tag)| tag).collect()
    }

    pub(in crate::controller) fn push(&mut self, list: &mut TagList, tag: RequestTag) {
        self.slots[tag.0 as usize].next = NONE;
        if list.tail == NONE {
            list.head = tag.0;
        } else {
            self.slots[list.tail as usize].next = tag.0;
        }
        list.tail = tag.0;
    }

    pub(in crate::controller) fn pop(&mut self, list: &mut TagList) -> Option<RequestTag> {
        if list.head == NONE {
            return None;
        }
        let tag = list.head;
        self.slots[tag as usize].blocker = NONE;
        list.head = self.slots[tag as usize].next;
        if list.head == NONE {
            list.tail = NONE;
        }
        Some(RequestTag(tag))
    }

    /// Makes `tag` wait until `blocker` finishes.
    pub(in crate::controller) fn wait_for(&mut self, blocker: RequestTag, tag: RequestTag) {
        let mut list = self.slots[blocker.0 as usize].waiters;
        self.push(&mut list, tag);
        self.slots[blocker.0 as usize].waiters = list;
        self.slots[tag.0 as usize].blocker = blocker.0;
    }

    /// Removes `tag` from the list of the write in front.
    pub(in crate::controller) fn stop_waiting(&mut self, tag: RequestTag) {
        let blocker = self.slots[tag.0 as usize].blocker;
        if blocker == NONE {
            return;
        }
        let blocker = RequestTag(blocker);
        let mut waiters = core::mem::replace(&mut self[blocker].waiters, TagList::EMPTY);
        while let Some(waiter) = self.pop(&mut waiters) {
            if waiter != tag {
                self.wait_for(blocker, waiter);
            }
        }
    }

    /// Swaps the places of two requests under way in the order of arrival.
    pub(in crate::controller) fn change_places(&mut self, one: RequestTag, other: RequestTag) {
        let (first, second) = (self[one], self[other]);
        for (tag, place) in [(one, second), (other, first)] {
            let slot = &mut self[tag];
            slot.sequence = place.sequence;
            slot.arrived = place.arrived;
            slot.unlocked = place.unlocked;
        }
    }
}

impl core::ops::Index<RequestTag> for Slots {
    type Output = Slot;

    #[inline]
    fn index(&self, tag: RequestTag) -> &Slot {
        &self.slots[tag.0 as usize]
    }
}

impl core::ops::IndexMut<RequestTag> for Slots {
    #[inline]
    fn index_mut(&mut self, tag: RequestTag) -> &mut Slot {
        &mut self.slots[tag.0 as usize]
    }
}
