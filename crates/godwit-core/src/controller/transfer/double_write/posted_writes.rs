//! Double writes that the guest does not wait for.
//!
//! Until switchover the source's disk alone has to survive, so a guest's write is as safe as it can be
//! once the local disk has it. Its double write is posted: it is on its way, the connection keeps its
//! place in the order of writes, and who waits for its acknowledgement is the migration, not the guest.
//! Without acknowledgements in time, or with too many outstanding, the guest waits as in Alg. 1 of the
//! SmartNIC storage-migration paper: so it cannot write faster than the destination takes it.

use core::time::Duration;
use std::collections::VecDeque;

use crate::controller::Controller;
use crate::controller::transfer::double_write::min_rtt::MinRtt;
use crate::planted::PlantedBug;
use crate::request::RequestTag;
use crate::units::{Extent, Generation, Time};
use crate::wire::double_write_id;

/// Bytes that may be posted and not acknowledged whatever the path, and at most. Between them, what a
/// guest that writes 256 MiB/s writes while the quickest acknowledgement is on its way.
const LEAST_BYTES: u64 = 512 << 10;
const MOST_BYTES: u64 = 4 << 20;
const BYTES_PER_SECOND: u64 = 256 << 20;

/// As long as the oldest has been on its way for less, nobody has to wait, whatever was promised: more
/// than one way there and back takes between hosts of one site.
const YOUNG: Duration = Duration::from_millis(2);

/// Where acknowledgements take long at best, one may take twice as long before somebody has to wait,
/// but no longer than this.
const OLD: Duration = Duration::from_millis(500);

/// A double write whose request was answered.
#[derive(Clone, Copy, Debug)]
struct Posted {
    id: u32,
    generation: Generation,
    extent: Extent,
    sent: Time,
}

/// Those that the destination has not acknowledged, oldest first.
#[derive(Debug)]
pub(in crate::controller) struct PostedWrites {
    writes: VecDeque<Posted>,
    most: usize,
    bytes: u64,
    min_rtt: MinRtt,
    #[cfg(feature = "planted-bugs")]
    hidden: bool,
}

impl PostedWrites {
    /// None yet; up to `most` at once.
    pub(in crate::controller) fn new(most: usize, now: Time) -> Self {
        Self {
            writes: VecDeque::with_capacity(most),
            most,
            bytes: 0,
            min_rtt: MinRtt::new(now),
            #[cfg(feature = "planted-bugs")]
            hidden: false,
        }
    }

    /// Plants a defect: chunks are read without regard to what is on its way.
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) fn hide_from_chunks(&mut self) {
        self.hidden = true;
    }

    /// Whether the destination has acknowledged all.
    #[inline]
    pub(in crate::controller) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// When the oldest was sent.
    pub(in crate::controller) fn waiting_since(&self) -> Option<Time> {
        self.writes.front().map(|posted| posted.sent)
    }

    /// Whether one to the extent is on its way: a chunk's copy or comparison, which comes by another
    /// connection, must not overtake it.
    pub(in crate::controller) fn overlaps(&self, extent: Extent) -> bool {
        #[cfg(feature = "planted-bugs")]
        if self.hidden {
            return false;
        }
        self.writes
            .iter()
            .any(|posted| posted.extent.overlaps(extent))
    }

    /// The destination has answered what was sent for the migration after `took`.
    #[inline]
    pub(in crate::controller) fn answered(&mut self, now: Time, took: Duration) {
        self.min_rtt.acknowledged(now, took);
    }

    /// Whether one more of `bytes` may be posted, when one that waits for the migration may wait for
    /// `threshold`.
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

    /// The acknowledgement of the one of this name in this generation: where it wrote.
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

    /// The oldest, which may never arrive.
    pub(in crate::controller) fn take_back(&mut self) -> Option<Extent> {
        let posted = self.writes.pop_front()?;
        self.bytes -= posted.extent.bytes();
        Some(posted.extent)
    }
}

impl Controller {
    /// Whether a write that is on the local disk waits for the destination no longer: its double write
    /// is posted.
    #[inline]
    pub(in crate::controller) fn post(&mut self, tag: RequestTag) -> bool {
        let now = self.now;
        let slot = &self.slots[tag];
        let (Some(extent), Some(source)) = (slot.extent, &mut self.source) else {
            return false;
        };
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
        self.slots[tag].forget_destination();
        true
    }

    /// A pause begins: what was posted may have been dropped, and reaches the destination as delayed
    /// writes.
    pub(in crate::controller) fn delay_posted_writes(&mut self) {
        let forgets = self.has_bug(PlantedBug::ForgetPosted);
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
