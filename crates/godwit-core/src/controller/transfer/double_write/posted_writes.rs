//! Posted writes: double writes that the guest does not wait for.
//!
//! Until switchover only the source's disk has to survive, so a guest's write is safe once on the local disk. The
//! double write is then posted: the frame is in flight, the connection keeps its place in the order of writes, and the
//! migration instead of the guest waits for the acknowledgement. Without timely acknowledgements, or with too many
//! outstanding, the guest waits as in Alg. 1 of the SmartNIC storage-migration paper. The guest therefore cannot write
//! faster than the destination accepts.

use core::time::Duration;
use std::collections::VecDeque;

use crate::controller::Limits;
use crate::controller::cx::Cx;
use crate::controller::transfer::double_write::min_rtt::MinRtt;
use crate::controller::transfer::outgoing::Outgoing;
use crate::planted::PlantedBug;
use crate::request::RequestTag;
use crate::units::{Extent, Generation, Time};
use crate::wire::double_write_id;

/// Lower and upper bound on bytes posted and not acknowledged. Between the bounds the limit is the amount that a guest
/// writing 256 MiB/s writes within the minimum round-trip time.
const LEAST_BYTES: u64 = 512 << 10;
const MOST_BYTES: u64 = 4 << 20;
const BYTES_PER_SECOND: u64 = 256 << 20;

/// Age of the oldest posted write below which no request has to wait, whatever the promise: more than a round trip
/// between hosts of one site.
const YOUNG: Duration = Duration::from_millis(2);

/// Upper bound on the age allowed by a long round trip, which is twice the minimum round-trip time.
const OLD: Duration = Duration::from_millis(500);

/// A double write whose request was answered.
#[derive(Clone, Copy, Debug)]
struct Posted {
    id: u32,
    generation: Generation,
    extent: Extent,
    sent: Time,
}

/// Posted writes that the destination has not acknowledged, oldest first.
#[derive(Debug)]
pub(in crate::controller) struct PostedWrites {
    writes: VecDeque<Posted>,
    most: usize,
    bytes: u64,
    min_rtt: MinRtt,
    /// By tag: the turn of the last double write.
    turns: Box<[u16]>,
    #[cfg(feature = "planted-bugs")]
    hidden: bool,
}

impl PostedWrites {
    /// Creates an empty queue.
    pub(in crate::controller) fn new(limits: &Limits, now: Time) -> Self {
        let most = limits.posted_writes();
        Self {
            turns: vec![0; limits.requests as usize].into_boxed_slice(),
            writes: VecDeque::with_capacity(most),
            most,
            bytes: 0,
            min_rtt: MinRtt::new(now),
            #[cfg(feature = "planted-bugs")]
            hidden: false,
        }
    }

    /// Plants a defect: chunks are read without regard to posted writes.
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) fn hide_from_chunks(&mut self) {
        self.hidden = true;
    }

    /// Returns true if the destination has acknowledged all posted writes.
    #[inline]
    pub(in crate::controller) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Returns the time at which the oldest posted write was sent.
    pub(in crate::controller) fn waiting_since(&self) -> Option<Time> {
        self.writes.front().map(|posted| posted.sent)
    }

    /// Returns true if a posted write overlaps the extent: a chunk's copy or comparison, sent over another connection,
    /// must not overtake the posted write.
    pub(in crate::controller) fn overlaps(&self, extent: Extent) -> bool {
        #[cfg(feature = "planted-bugs")]
        if self.hidden {
            return false;
        }
        self.writes
            .iter()
            .any(|posted| posted.extent.overlaps(extent))
    }

    /// Returns a number that distinguishes the next double write with this tag from earlier ones.
    #[inline]
    pub(in crate::controller) fn next_turn(&mut self, tag: RequestTag) -> u16 {
        let turn = &mut self.turns[tag.0 as usize];
        *turn = turn.wrapping_add(1);
        *turn
    }

    /// Notes the destination's answer to a frame of the migration after `took`.
    #[inline]
    pub(in crate::controller) fn answered(&mut self, now: Time, took: Duration) {
        self.min_rtt.acknowledged(now, took);
    }

    /// Returns true if another write of `bytes` may be posted. `threshold` is the maximum wait of a request for the
    /// migration.
    #[inline]
    fn has_room(&self, bytes: u64, now: Time, threshold: Option<Duration>) -> bool {
        let path = self.min_rtt.least();
        let patience = threshold.map_or(Duration::MAX, |threshold| {
            YOUNG.max(threshold / 2).max((path * 2).min(OLD))
        });
        let micros = path.min(OLD).as_micros() as u64;
        let meanwhile = micros * BYTES_PER_SECOND / 1_000_000;
        self.writes.len() < self.most
            && self.bytes + bytes <= meanwhile.clamp(LEAST_BYTES, MOST_BYTES)
            && self
                .waiting_since()
                .is_none_or(|since| now.since(since) < patience)
    }

    #[inline]
    fn push(&mut self, posted: Posted) {
        self.bytes += posted.extent.bytes();
        self.writes.push_back(posted);
    }

    /// Removes the acknowledged write with this id and generation; returns the write's extent.
    #[inline]
    pub(in crate::controller) fn acknowledged(
        &mut self,
        now: Time,
        id: u32,
        generation: Generation,
    ) -> Option<Extent> {
        let is_it = |posted: &Posted| posted.id == id && posted.generation == generation;
        let at = self.writes.iter().position(is_it)?;
        let posted = self.writes.remove(at)?;
        self.bytes -= posted.extent.bytes();
        self.answered(now, now.since(posted.sent));
        Some(posted.extent)
    }

    /// Takes back the oldest posted write, which may never arrive.
    pub(in crate::controller) fn take_back(&mut self) -> Option<Extent> {
        let posted = self.writes.pop_front()?;
        self.bytes -= posted.extent.bytes();
        Some(posted.extent)
    }
}

impl Outgoing {
    /// Posts the double write of a write that is on the local disk. Returns true if the write then no longer waits for
    /// the destination.
    #[inline]
    pub(in crate::controller) fn post(&mut self, cx: &mut Cx, tag: RequestTag) -> bool {
        let now = cx.now;
        let slot = &cx.slots[tag];
        let (Some(extent), Some(source)) = (slot.extent, &mut self.source) else {
            return false;
        };
        if source.peer.follower.is_awaited() && !cx.has_bug(PlantedBug::PostFollowed) {
            return false;
        }
        let threshold = source
            .governor
            .as_ref()
            .and_then(|governor| governor.threshold());
        if !source.posted.has_room(extent.bytes(), now, threshold) {
            return false;
        }
        source.posted.push(Posted {
            id: double_write_id(tag, slot.turn),
            generation: slot.generation,
            extent,
            sent: slot.issued,
        });
        cx.slots[tag].forget_destination();
        true
    }

    /// Turns posted writes into delayed writes, because a pause begins and the frames may have been dropped.
    pub(in crate::controller) fn delay_posted_writes(&mut self, cx: &mut Cx) {
        let forgets = cx.has_bug(PlantedBug::ForgetPosted);
        let Some(source) = &mut self.source else {
            return;
        };
        while let Some(extent) = source.posted.take_back() {
            if !forgets {
                source.delay(extent);
            }
        }
    }
}
