//! What the source does for the promise to the guest: whom it watches, which writes it delays, what
//! it reports.

use core::time::Duration;

use crate::controller::governor::Governor;
use crate::controller::governor::obstacles::Achievement;
use crate::controller::requests::slots::{Slots, TagList};
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::policy::{Pass, Policy};
use crate::controller::{Controller, PromiseProgress};
use crate::event::Obstacle;
use crate::request::RequestTag;
use crate::units::{Extent, Lba, SECTOR_SIZE, Time};

/// What was kept back of writes to hot places is sent beside the last so many sectors of a copy, 64 MiB,
/// or this part of a smaller disk.
const HOT_WRITES_SECTORS: u64 = (64 << 20) / SECTOR_SIZE;
const HOT_WRITES_SHARE: u64 = 16;

impl Source {
    /// Remembers that a request waits for the migration.
    #[inline]
    pub(in crate::controller) fn watch(&mut self, tag: RequestTag, slots: &Slots) {
        if self.watched.len() == self.watched.capacity() {
            self.watched
                .retain(|&(tag, sequence)| slots.waits_for_migration(tag, sequence));
        }
        let entry = (tag, slots[tag].sequence);
        if self.watched.back() != Some(&entry) {
            self.watched.push_back(entry);
        }
    }

    /// Forgets requests at the front that have stopped waiting.
    #[inline]
    pub(in crate::controller) fn prune_watched(&mut self, slots: &Slots) {
        while let Some(&(tag, sequence)) = self.watched.front()
            && !slots.waits_for_migration(tag, sequence)
        {
            self.watched.pop_front();
        }
    }

    /// The request that has waited for the migration longest, and when the promise to the guest
    /// wants something done about it.
    pub(in crate::controller) fn oldest_watched(
        &mut self,
        slots: &Slots,
    ) -> Option<(RequestTag, Time)> {
        self.prune_watched(slots);
        let &(tag, _) = self.watched.front()?;
        Some((tag, self.front_expiry(slots)?))
    }

    pub(super) fn front_expiry(&self, slots: &Slots) -> Option<Time> {
        let threshold = self.governor.as_ref()?.threshold()?;
        let &(tag, sequence) = self.watched.front()?;
        slots
            .waits_for_migration(tag, sequence)
            .then(|| slots[tag].arrived.after(threshold))
    }

    /// Remembers that a request is allowed to be late, for a time.
    pub(in crate::controller) fn tolerate(&mut self, tag: RequestTag, slots: &Slots) {
        if self.tolerated.len() == self.tolerated.capacity() {
            self.tolerated
                .retain(|&(tag, sequence)| slots.is_late_still(tag, sequence));
        }
        self.tolerated.push_back((tag, slots[tag].sequence));
    }

    /// Takes out a request that has been late for longer than any may be.
    pub(in crate::controller) fn take_intolerable(&mut self, slots: &Slots, now: Time) -> bool {
        while let Some(&(tag, sequence)) = self.tolerated.front()
            && !slots.is_late_still(tag, sequence)
        {
            self.tolerated.pop_front();
        }
        let expired = self
            .tolerance_expiry(slots)
            .is_some_and(|expiry| expiry <= now);
        if expired {
            self.tolerated.pop_front();
        }
        expired
    }

    pub(super) fn tolerance_expiry(&self, slots: &Slots) -> Option<Time> {
        let threshold = self.governor.as_ref()?.threshold()?;
        let &(tag, sequence) = self.tolerated.front()?;
        slots.is_late_still(tag, sequence).then(|| {
            slots[tag]
                .arrived
                .after(threshold * Controller::MOST_LATENESS)
        })
    }

    pub(in crate::controller) const fn may_pause(&self) -> bool {
        self.runs() || self.stage.is_freezing()
    }

    /// Whether writes are acknowledged without the destination for now.
    #[inline]
    pub(in crate::controller) const fn delays(&self) -> bool {
        self.policy.only_marks(self.pass) || self.pause.is_some() && self.options.delayed_writes
    }

    /// Remembers that the destination does not hear of a write to the migrated region.
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

    /// Whether a write, which is delayed for another reason or not, is kept back because its place is in
    /// the migrated region and hot: the destination hears of it when the copy nears its end.
    #[inline]
    pub(in crate::controller) fn keeps_back(&mut self, extent: Extent, delays: bool) -> bool {
        if !self.policy.doubles() || !self.lets_writes_through() || self.nears_end() {
            return false;
        }
        let copied = extent.end() <= self.window.pointers.read_head;
        let keeps = self.delayed.keep_back(extent, copied && !delays);
        if keeps && let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        keeps
    }

    /// Whether so little is left to copy that what was kept back has to be sent beside it.
    #[inline]
    pub(in crate::controller) fn nears_end(&self) -> bool {
        let left = self
            .capacity
            .0
            .saturating_sub(self.window.pointers.read_head.0);
        left <= (self.capacity.0 / HOT_WRITES_SHARE).min(HOT_WRITES_SECTORS)
    }

    /// What keeps the migration from its end, when that has changed.
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
        let reason = self.pause.as_ref().map(|pause| pause.reason);
        let deadline = self.governor.as_ref().and_then(Governor::deadline);
        self.obstacles.judge(now, current, reason, deadline)
    }

    pub(super) fn paused_for(&self, now: Time) -> Duration {
        let current = self.pause.as_ref().map(|pause| pause.lasted(now));
        self.pauses.total + current.unwrap_or_default()
    }

    pub(super) fn promise(&self, now: Time) -> PromiseProgress {
        let mut promise = PromiseProgress {
            paused: self.pause.as_ref().map(|pause| pause.reason),
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

    /// Up to where the destination has the disk: delayed writes beyond it are copied anyway.
    pub(in crate::controller) fn migrated(&self) -> Lba {
        match self.pass {
            Pass::Copy => self.window.pointers.write_tail,
            // A copy may overtake what is on its way to any place.
            Pass::Compare | Pass::Resend { .. } => Lba(0),
            Pass::VerifyAll | Pass::VerifyDirty { .. } => Lba(self.capacity.0),
        }
    }

    /// Whether the destination has all of the extent, or will once its double write arrives, and no
    /// chunk that is being compared waits for that.
    pub(in crate::controller) fn is_migrated(&mut self, extent: Extent) -> bool {
        extent.end() <= self.migrated() && self.window.lock_over(extent).is_none()
    }

    /// Tells the next double write with this tag from those before.
    #[inline]
    pub(in crate::controller) fn next_turn(&mut self, tag: RequestTag) -> u16 {
        let turn = &mut self.turns[tag.0 as usize];
        *turn = turn.wrapping_add(1);
        *turn
    }

    /// Whether writes to a chunk that is on its way are carried out at once, and sent behind it as
    /// delayed writes.
    #[inline]
    pub(in crate::controller) fn lets_writes_through(&self) -> bool {
        self.policy
            .lets_writes_through(self.pass)
            .unwrap_or_else(|| {
                self.options.delayed_writes && self.governor.is_some() && self.is_copying_pass()
            })
    }

    /// Whether every write goes to both nodes.
    #[inline]
    pub(in crate::controller) const fn mirrors(&self) -> bool {
        matches!(self.policy, Policy::Mirror)
    }

    /// Whether chunks are copied, not compared.
    #[inline]
    pub(in crate::controller) fn is_copying_pass(&self) -> bool {
        self.pass.copies()
    }

    /// Lets go of those who wait for a chunk that is being copied to the extent. Their writes reach
    /// the destination after it, as delayed writes. Nobody is let go while chunks are compared.
    pub(in crate::controller) fn unlock(&mut self, extent: Extent) -> Option<TagList> {
        if !self.pass.copies() {
            return None;
        }
        let chunk = self.window.lock_over(extent)?;
        Some(core::mem::replace(&mut chunk.waiters, TagList::EMPTY))
    }

    /// Whether the destination owes an answer about posted or delayed writes or a pause for too long.
    pub(in crate::controller) fn is_kept_waiting(&self, now: Time) -> bool {
        let unheard = self.pause.as_ref().filter(|pause| pause.is_unheard());
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
