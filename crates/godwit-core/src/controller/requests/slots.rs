//! One slot a tag: the requests and received frames that have not finished, and who waits for whom.

use crate::action::{ChunkSlot, DelayedSlot, Digest, PULL_SLOTS, PullSlot};
use crate::request::{Operation, Origin, RequestError, RequestTag};
use crate::units::{Extent, Generation, Lba, Time};

const NONE: u32 = u32::MAX;

/// What a slot holds.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) enum Work {
    /// Nothing: the tag is free.
    Free,
    /// A guest's request, from here or forwarded by the peer.
    Request {
        operation: Operation,
        origin: Origin,
    },
    /// A copy that the source sent.
    Copy {
        slot: ChunkSlot,
        generation: Generation,
        zeroes: bool,
    },
    /// A double write that the source sent.
    DoubleWrite {
        tag: u32,
        generation: Generation,
        zeroes: bool,
        unmap: bool,
    },
    /// A delayed write that the source sent.
    DelayedWrite {
        slot: DelayedSlot,
        generation: Generation,
        zeroes: bool,
    },
    /// A comparison that the source asked for.
    Verify {
        slot: ChunkSlot,
        generation: Generation,
        digest: Digest,
    },
    /// A hole of the source's that is looked for here. `from` on it has not been.
    VerifyHole {
        slot: ChunkSlot,
        generation: Generation,
        from: Lba,
    },
    /// A part of the disk that this node has pulled.
    Pulled { slot: PullSlot, zeroes: bool },
}

/// How far the work in a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum WorkStage {
    /// Waits until it is known who serves.
    Held,
    /// Waits for an earlier overlapping write, or for its turn.
    Waiting,
    /// Waits for the chunk that locks its addresses.
    Locked,
    /// Waits for blocks that are not here.
    Lacking,
    /// Carried out here.
    Here {
        /// The local disk has not finished it.
        at_disk: bool,
        /// The destination has not acknowledged its double write, and it waits for that.
        at_destination: bool,
    },
    /// Waits for the owner.
    Forwarded {
        /// It was sent to the owner, which may have done it.
        sent: bool,
    },
    /// Waits until it is durable that blocks are here.
    Storing,
    /// Nothing of it is left to be done.
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

#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct Slot {
    pub(in crate::controller) work: Work,
    pub(in crate::controller) stage: WorkStage,
    /// Whether the request has passed the gate.
    pub(in crate::controller) admitted: bool,
    /// Whether the write table knows it.
    pub(in crate::controller) registered: bool,
    /// Whether the destination was told of this write.
    pub(in crate::controller) doubled: bool,
    /// Whether it does not wait for chunks, or no longer: the destination hears of it later.
    pub(in crate::controller) unlocked: bool,
    /// Whether it waited for the migration too long and nothing could be done about it.
    pub(in crate::controller) late: bool,
    /// Whether the write that it waits for carries it out too.
    pub(in crate::controller) combined: bool,
    /// Whether it is a double write of the source that was acknowledged before it is written.
    pub(in crate::controller) acknowledged: bool,
    /// Whether it is a frame that is dropped instead of carried out when its turn comes.
    pub(in crate::controller) stale: bool,
    /// Whether its client is gone.
    pub(in crate::controller) abandoned: bool,
    /// Which of the double writes with its tag it is.
    pub(in crate::controller) turn: u16,
    /// The generation in which it was sent to the destination, or its number among those that were
    /// forwarded.
    pub(in crate::controller) generation: Generation,
    /// When a request entered.
    pub(in crate::controller) arrived: Time,
    pub(in crate::controller) extent: Option<Extent>,
    pub(in crate::controller) sequence: u64,
    /// How many clients had attached when it entered.
    pub(in crate::controller) era: u32,
    pub(in crate::controller) issued: Time,
    pub(in crate::controller) result: Result<(), RequestError>,
    pub(in crate::controller) waiters: TagList,
    /// The write in whose list of waiters it is.
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

    /// Whether it is a part of the disk that this node has pulled.
    pub(in crate::controller) const fn is_pulled(&self) -> bool {
        matches!(self.work, Work::Pulled { .. })
    }

    /// Whether it was forwarded under this number and is not answered.
    pub(in crate::controller) fn awaits_reply(&self, number: u32) -> bool {
        self.stage == (WorkStage::Forwarded { sent: true }) && self.generation == Generation(number)
    }

    /// Whether the local disk has not finished it.
    #[inline]
    pub(in crate::controller) const fn is_at_disk(&self) -> bool {
        matches!(self.stage, WorkStage::Here { at_disk: true, .. })
    }

    /// Whether it waits for the destination's acknowledgement.
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

    /// It waits for the destination's acknowledgement no longer. Whether it waits for the disk.
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

    /// Whether it waits for the owner.
    #[inline]
    pub(in crate::controller) const fn is_forwarded(&self) -> bool {
        matches!(self.stage, WorkStage::Forwarded { .. })
    }

    /// Whether it waits here for its turn.
    #[inline]
    pub(in crate::controller) const fn is_waiting(&self) -> bool {
        matches!(
            self.stage,
            WorkStage::Waiting | WorkStage::Locked | WorkStage::Lacking
        )
    }

    /// Whether something is being done about it, here or elsewhere.
    #[inline]
    pub(in crate::controller) const fn is_in_flight(&self) -> bool {
        matches!(
            self.stage,
            WorkStage::Here { .. } | WorkStage::Forwarded { .. }
        )
    }

    /// Of a request that changes the disk's content: whether that has to be durable.
    pub(in crate::controller) const fn durable_write(&self) -> Option<bool> {
        match self.work {
            Work::Request {
                operation: Operation::Write { fua, .. } | Operation::WriteZeroes { fua, .. },
                ..
            } => Some(fua),
            _ => None,
        }
    }

    /// Of a request that writes data: whether it has to be durable.
    pub(in crate::controller) const fn plain_write(&self) -> Option<bool> {
        match self.work {
            Work::Request {
                operation: Operation::Write { fua, .. },
                ..
            } => Some(fua),
            _ => None,
        }
    }

    /// Whether it waits for an earlier write.
    pub(in crate::controller) const fn waits_for_another(&self) -> bool {
        self.blocker != NONE
    }

    /// Whether the work changes the disk's content.
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
    /// Those of the body's tags, and then those of what is pulled.
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

    /// Puts work into a free slot. False when the tag is out of range or busy.
    #[inline]
    pub(in crate::controller) fn occupy(
        &mut self,
        tag: RequestTag,
        work: Work,
        extent: Option<Extent>,
    ) -> bool {
        tag.0 < self.tags && self.fill(tag, work, extent)
    }

    /// The internal tag of what is pulled into this slot.
    pub(in crate::controller) const fn pull_tag(&self, slot: PullSlot) -> RequestTag {
        RequestTag(self.tags + slot.0 as u32)
    }

    /// Puts a part that was pulled into its own slot, which is free.
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

    /// A client attaches: it may have left others' places with requests unanswered, and what it asks for
    /// comes after those.
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

    /// Whether the request that had this place in the order of arrival waits for the destination
    /// or for a chunk, and is not known to be late.
    #[inline]
    pub(in crate::controller) fn waits_for_migration(
        &self,
        tag: RequestTag,
        sequence: u64,
    ) -> bool {
        self.waits(tag, sequence, false)
    }

    /// As [`Self::waits_for_migration`], for one that is known to be late.
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

    /// The occupied slots that `matches` accepts, oldest first. For rare events: it allocates.
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

    /// Takes `tag` out of the list of the write that it waits for.
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

    /// Two requests that are both under way change places in the order of arrival.
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
