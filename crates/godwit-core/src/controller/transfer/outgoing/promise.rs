//! The source's part in the promise to the guest: watched requests, delayed writes, reports.

use core::time::Duration;

use crate::controller::governor::obstacles::Achievement;
use crate::controller::policy::Policy;
use crate::controller::requests::slots::{Slots, TagList};
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::pass::Pass;
use crate::controller::{Controller, PromiseProgress};
use crate::event::Obstacle;
use crate::request::RequestTag;
use crate::units::{Extent, Lba, SECTOR_SIZE, Time};

/// Sectors at the end of a copy, 64 MiB, beside which kept back writes to hot places are sent. On a small disk, the
/// disk's sectors divided by [`HOT_WRITES_SHARE`].
const HOT_WRITES_SECTORS: u64 = (64 << 20) / SECTOR_SIZE;
const HOT_WRITES_SHARE: u64 = 16;

impl Source {
    /// Remembers that a request waits for the migration.
    #[inline]
    pub(in crate::controller) fn watch(&mut self, tag: RequestTag, slots: &Slots) {
        if self.waits.watched.len() == self.waits.watched.capacity() {
            self.waits
                .watched
                .retain(|&(tag, sequence)| slots.waits_for_migration(tag, sequence));
        }
        let entry = (tag, slots[tag].sequence);
        if self.waits.watched.back() != Some(&entry) {
            self.waits.watched.push_back(entry);
        }
    }

    /// Forgets requests at the front that have stopped waiting.
    #[inline]
    pub(in crate::controller) fn prune_watched(&mut self, slots: &Slots) {
        while let Some(&(tag, sequence)) = self.waits.watched.front()
            && !slots.waits_for_migration(tag, sequence)
        {
            self.waits.watched.pop_front();
        }
    }

    /// Returns the request that has waited longest for the migration, and the time at which the promise to the guest
    /// requires an action.
    pub(in crate::controller) fn oldest_watched(
        &mut self,
        slots: &Slots,
    ) -> Option<(RequestTag, Time)> {
        self.prune_watched(slots);
        let &(tag, _) = self.waits.watched.front()?;
        Some((tag, self.front_expiry(slots)?))
    }

    pub(super) fn front_expiry(&self, slots: &Slots) -> Option<Time> {
        let threshold = self.governor.as_ref()?.threshold()?;
        let &(tag, sequence) = self.waits.watched.front()?;
        slots
            .waits_for_migration(tag, sequence)
            .then(|| slots[tag].arrived.after(threshold))
    }

    /// Remembers that a request may be late for a time.
    pub(in crate::controller) fn tolerate(&mut self, tag: RequestTag, slots: &Slots) {
        if self.waits.tolerated.len() == self.waits.tolerated.capacity() {
            self.waits
                .tolerated
                .retain(|&(tag, sequence)| slots.is_late_still(tag, sequence));
        }
        self.waits.tolerated.push_back((tag, slots[tag].sequence));
    }

    /// Removes a request that has been late for longer than allowed. Returns true if there was one.
    pub(in crate::controller) fn take_intolerable(&mut self, slots: &Slots, now: Time) -> bool {
        while let Some(&(tag, sequence)) = self.waits.tolerated.front()
            && !slots.is_late_still(tag, sequence)
        {
            self.waits.tolerated.pop_front();
        }
        let expired = self
            .tolerance_expiry(slots)
            .is_some_and(|expiry| expiry <= now);
        if expired {
            self.waits.tolerated.pop_front();
        }
        expired
    }

    pub(super) fn tolerance_expiry(&self, slots: &Slots) -> Option<Time> {
        let threshold = self.governor.as_ref()?.threshold()?;
        let &(tag, sequence) = self.waits.tolerated.front()?;
        slots.is_late_still(tag, sequence).then(|| {
            slots[tag]
                .arrived
                .after(threshold * Controller::MOST_LATENESS)
        })
    }

    pub(in crate::controller) const fn may_pause(&self) -> bool {
        self.runs() || self.stage.is_freezing()
    }

    /// Returns true if writes are currently acknowledged without the destination.
    #[inline]
    pub(in crate::controller) fn delays(&self) -> bool {
        !self.peer.follower.is_awaited()
            && (self.policy.only_marks(self.pass)
                || self.pauses.current.is_some() && self.options.delayed_writes)
    }

    /// Remembers a write to the migrated region that the destination does not receive.
    pub(in crate::controller) fn delay(&mut self, extent: Extent) {
        if let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        if self.policy.mark(self.pass, extent) {
            return;
        }
        let reach = match self.pass {
            Pass::Copy => self.window.pointers.read_head,
            _ => Lba(self.capacity.0),
        };
        let end = extent.end().0.min(reach.0);
        let sectors = end.saturating_sub(extent.start().0) as u32;
        if let Some(part) = Extent::new(extent.start(), sectors) {
            self.delayed.remember(part);
        }
    }

    /// Returns true if a write is kept back because its place is hot and in the migrated region: the destination
    /// receives the write when the copy nears its end. `delays` is true if the write is delayed for another reason.
    #[inline]
    pub(in crate::controller) fn keeps_back(&mut self, extent: Extent, delays: bool) -> bool {
        if !self.policy.doubles()
            || !self.lets_writes_through()
            || self.nears_end()
            || self.peer.follower.is_awaited()
        {
            return false;
        }
        let copied = extent.end() <= self.window.pointers.read_head;
        let keeps = self.delayed.keep_back(extent, copied && !delays);
        if keeps && let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        keeps
    }

    /// Returns true if so little is left to copy that kept back writes have to be sent beside the copy.
    #[inline]
    pub(in crate::controller) fn nears_end(&self) -> bool {
        let left = self
            .capacity
            .0
            .saturating_sub(self.window.pointers.read_head.0);
        left <= (self.capacity.0 / HOT_WRITES_SHARE).min(HOT_WRITES_SECTORS)
    }

    /// Returns the target end of the first pass.
    fn deadline(&self) -> Option<Time> {
        let within = self.options.deadline?;
        Some(self.started.after(within))
    }

    /// Returns the bytes per second needed for the deadline; 0 without a deadline.
    pub(in crate::controller) fn required_rate(&self, now: Time) -> u64 {
        let Some(deadline) = self.deadline() else {
            return 0;
        };
        let time = deadline.since(now).as_millis().max(100) as u64;
        self.bytes_left().saturating_mul(1000) / time
    }

    /// Returns the obstacle between the migration and its end, if the obstacle has changed.
    pub(in crate::controller) fn look_for_obstacle(
        &mut self,
        now: Time,
    ) -> Option<Option<Obstacle>> {
        if self.stage == Stage::Converged && self.bytes_left() == 0 {
            return self.obstacles.arrive(now);
        }
        let current = Achievement {
            left: self.bytes_left(),
            delayed: self.delayed.owed_bytes(),
            double_writes: self.counters.double_write_sent,
            paused: self.paused_for(now),
        };
        let reason = self.pauses.current.as_ref().map(|pause| pause.reason);
        let deadline = self.governor.as_ref().and_then(|_| self.deadline());
        self.obstacles.judge(now, current, reason, deadline)
    }

    pub(super) fn paused_for(&self, now: Time) -> Duration {
        let current = self.pauses.current.as_ref().map(|pause| pause.lasted(now));
        self.pauses.total + current.unwrap_or_default()
    }

    pub(super) fn promise(&self, now: Time) -> PromiseProgress {
        let mut promise = PromiseProgress {
            paused: self.pauses.current.as_ref().map(|pause| pause.reason),
            pauses: self.pauses.by_reason,
            paused_for: self.paused_for(now),
            delayed_bytes: self.delayed.pending_bytes(),
            delayed_bytes_sent: self.delayed.sent_bytes,
            delayed_bytes_cancelled: self.delayed.cancelled_bytes,
            obstacle: self.obstacles.obstacle(),
            ..PromiseProgress::default()
        };
        if let Some(governor) = &self.governor {
            governor.report(&mut promise);
        }
        promise
    }

    /// Returns the end of the region that the destination has: delayed writes beyond this region are copied anyway.
    pub(in crate::controller) fn migrated(&self) -> Lba {
        match self.pass {
            Pass::Copy => self.window.pointers.write_tail,
            // A copy to any place may overtake frames in flight.
            Pass::Compare | Pass::Resend { .. } => Lba(0),
            Pass::VerifyAll | Pass::VerifyDirty { .. } => Lba(self.capacity.0),
        }
    }

    /// Returns true if the destination has the whole extent, or will have the extent once the double write arrives, and
    /// no chunk under comparison waits for the double write.
    pub(in crate::controller) fn is_migrated(&mut self, extent: Extent) -> bool {
        extent.end() <= self.migrated() && self.window.lock_over(extent).is_none()
    }

    /// Returns true if writes to a chunk in flight are carried out at once and follow the chunk as delayed writes.
    #[inline]
    pub(in crate::controller) fn lets_writes_through(&self) -> bool {
        self.policy
            .lets_writes_through(self.pass)
            .unwrap_or_else(|| {
                self.options.delayed_writes && self.governor.is_some() && self.is_copying_pass()
            })
    }

    /// Returns true if a write of the guest need not wait for a chunk that is being read, or is on its way. A block
    /// written during the comparison of its chunk counts as different, or is compared again.
    #[inline]
    pub(in crate::controller) fn passes_chunks(&self) -> bool {
        !self.pass.copies() || self.lets_writes_through()
    }

    /// Returns true if every write goes to both nodes.
    #[inline]
    pub(in crate::controller) fn mirrors(&self) -> bool {
        self.policy.mirrors()
    }

    /// Returns true if chunks are copied, not compared.
    #[inline]
    pub(in crate::controller) fn is_copying_pass(&self) -> bool {
        self.pass.copies()
    }

    /// Releases the requests that wait for the chunk over the extent.
    pub(in crate::controller) fn unlock(&mut self, extent: Extent) -> Option<TagList> {
        let chunk = self.window.lock_over(extent)?;
        Some(core::mem::replace(&mut chunk.waiters, TagList::EMPTY))
    }

    /// Returns true if the destination's answer about posted writes, delayed writes or a pause is overdue.
    pub(in crate::controller) fn is_kept_waiting(&self, now: Time) -> bool {
        let unheard = self
            .pauses
            .current
            .as_ref()
            .filter(|pause| pause.is_unheard());
        let written = self.delayed.waiting_since().map(|since| now.since(since));
        let posted = self.posted.waiting_since().map(|since| now.since(since));
        unheard
            .map(|pause| pause.lasted(now))
            .into_iter()
            .chain(written)
            .chain(posted)
            .any(|waited| waited > self.options.peer_timeout)
    }
}
