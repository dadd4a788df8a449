//! The outgoing migration: passes over the disk behind the locking window (Alg. 1 of the SmartNIC
//! storage-migration paper), then verification, then the freeze that leads to switchover.

use core::time::Duration;
use std::collections::VecDeque;

use super::convergence::{Achievement, Convergence};
use super::delayed_writes::DelayedWrites;
use super::dirty::DirtyBitmap;
use super::governor::Governor;
use super::pacer::Pacer;
use super::pause::{Pause, PauseCounts};
use super::slots::{REMOTE, Slots, TagList};
use super::window::{ChunkContent, ChunkState, Window};
use super::{Controller, MigrationOptions, Progress, PromiseProgress, StartError};
use crate::action::{Action, ChunkSlot, Content, DiskOperation, DiskTag, Inspect};
use crate::event::{AbortReason, Event, Obstacle, PauseReason, Phase};
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Generation, Lba, SECTOR_SIZE, Sectors, Time};
use crate::wire::{Message, TrafficClass};

/// Longest chunk: 16 MiB.
const MAX_CHUNK_SECTORS: u32 = (16 << 20) / SECTOR_SIZE as u32;

/// Verification remembers writes by blocks of 4 KiB.
const VERIFY_BLOCK_SECTORS: u32 = 8;

/// Verification passes are repeated over what was written meanwhile until no more than this many
/// 4 KiB blocks are left; those are compared while the guest is held.
const FREEZE_BLOCKS: u64 = 64;

/// A guest that has asked for nothing this long is idle.
const GUEST_IDLE_AFTER: Duration = Duration::from_millis(100);

/// Delayed writes that may be left when the guest is held; they are sent then.
const FREEZE_DELAYED_BYTES: u64 = 64 << 10;

/// How long the guest may be held before the destination is asked to accept, unless its promise
/// allows more. Doubled whenever that was not enough.
const FIRST_FREEZE: Duration = Duration::from_millis(20);

/// After this many passes the guest is held however many blocks are left.
const MAX_VERIFY_PASSES: u32 = 10;

/// The pass that the window makes over the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Every chunk goes to the destination.
    Copy,
    /// Both sides read every chunk and compare hashes.
    VerifyAll,
    /// As before, but only blocks that were written since they were compared.
    VerifyDirty { number: u32 },
}

#[derive(Debug)]
pub(super) struct Source {
    pub(super) options: MigrationOptions,
    pub(super) generation: Generation,
    pub(super) window: Window,
    phase: Phase,
    pass: Pass,
    capacity: Sectors,
    /// Blocks written since they were compared; only with verification.
    dirty: Option<DirtyBitmap>,
    pacer: Option<Pacer>,
    paced_until: Option<Time>,
    pub(super) delayed_paced_until: Option<Time>,
    /// What keeps the promise to the guest, if there is one to keep.
    pub(super) governor: Option<Governor>,
    pub(super) pause: Option<Pause>,
    pub(super) pauses: PauseCounts,
    pub(super) delayed: DelayedWrites,
    /// Requests that wait for the migration and where they stand in the order of arrival, oldest
    /// first. What has stopped waiting leaves when it comes to the front.
    watched: VecDeque<(RequestTag, u64)>,
    convergence: Convergence,
    freeze_allowance: Duration,
    pass_done: u64,
    pass_total: u64,
    counters: Counters,
    mismatch: Option<Extent>,
    /// The pass under way compares what was left when the guest was held.
    freeze_pass: bool,
    /// Whether the connection that will carry forwarded I/O is still there.
    pub(super) sync_up: bool,
    next_tick: Time,
    last_heard: Time,
    phase_since: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    copied: u64,
    copy_sent: u64,
    double_write_sent: u64,
    verified: u64,
    all_verified: bool,
}

impl Source {
    /// Whether new guest I/O has to wait.
    #[inline]
    pub(super) fn is_frozen(&self) -> bool {
        !matches!(self.phase, Phase::Copying | Phase::Verifying)
    }

    /// Whether a write to the extent, which no chunk locks, has to reach the destination too. One
    /// that begins in the migrated region goes there whole: what it writes past the read head is
    /// copied again later.
    #[inline]
    pub(super) fn has_copied(&self, extent: Extent) -> bool {
        self.pass != Pass::Copy || extent.start() < self.window.pointers.read_head
    }

    #[inline]
    pub(super) fn double_written(&mut self, extent: Extent, zeroes: bool) {
        self.delayed.overtaken(extent);
        if let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        if !zeroes {
            self.counters.double_write_sent += extent.bytes();
            if let Some(pacer) = &mut self.pacer {
                pacer.spend(extent.bytes());
            }
        }
    }

    /// When the timer has to run next.
    pub(super) fn next_deadline(&self, slots: &Slots) -> Time {
        let governed = self.governor.as_ref().map(Governor::next_sample);
        let pause = self.pause.as_ref().and_then(Pause::deadline);
        [
            self.paced_until,
            self.delayed_paced_until,
            governed,
            pause,
            self.front_expiry(slots),
            self.freeze_deadline(),
        ]
        .into_iter()
        .flatten()
        .fold(self.next_tick, Time::min)
    }

    fn freeze_deadline(&self) -> Option<Time> {
        (self.phase == Phase::Draining && self.governor.is_some())
            .then(|| self.phase_since.after(self.freeze_allowance))
    }

    /// Remembers that a request waits for the migration.
    #[inline]
    pub(super) fn watch(&mut self, tag: RequestTag, slots: &Slots) {
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
    pub(super) fn prune_watched(&mut self, slots: &Slots) {
        while let Some(&(tag, sequence)) = self.watched.front()
            && !slots.waits_for_migration(tag, sequence)
        {
            self.watched.pop_front();
        }
    }

    /// The request that has waited for the migration longest, and when the promise to the guest
    /// wants something done about it.
    pub(super) fn oldest_watched(&mut self, slots: &Slots) -> Option<(RequestTag, Time)> {
        self.prune_watched(slots);
        let &(tag, _) = self.watched.front()?;
        Some((tag, self.front_expiry(slots)?))
    }

    fn front_expiry(&self, slots: &Slots) -> Option<Time> {
        let threshold = self.governor.as_ref()?.threshold()?;
        let &(tag, sequence) = self.watched.front()?;
        slots
            .waits_for_migration(tag, sequence)
            .then(|| slots[tag].arrived.after(threshold))
    }

    /// Up to where the destination has the disk: delayed writes beyond it are copied anyway.
    pub(super) fn migrated(&self) -> Lba {
        match self.pass {
            Pass::Copy => self.window.pointers.write_tail,
            _ => Lba(self.capacity.0),
        }
    }

    pub(super) const fn phase(&self) -> Phase {
        self.phase
    }

    pub(super) fn is_copying(&self) -> bool {
        self.next_extent().is_some()
    }

    pub(super) const fn may_pause(&self) -> bool {
        matches!(
            self.phase,
            Phase::Copying | Phase::Verifying | Phase::Draining
        )
    }

    /// Whether writes are acknowledged without the destination for now.
    #[inline]
    pub(super) const fn delays(&self) -> bool {
        self.pause.is_some() && self.options.delayed_writes
    }

    /// Remembers that the destination does not hear of a write to the migrated region.
    pub(super) fn delay(&mut self, extent: Extent) {
        if let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        let end = extent.end().0.min(self.migrated().0);
        let sectors = end.saturating_sub(extent.start().0) as u32;
        if let Some(part) = Extent::new(extent.start(), sectors) {
            self.delayed.remember(part);
        }
    }

    /// Whether a copy (or a delayed write) may be sent; otherwise when to ask again.
    pub(super) fn may_send(&mut self, now: Time, delayed: bool) -> Result<(), Time> {
        if let Some(pacer) = &mut self.pacer {
            pacer.ready(now)?;
        }
        match &mut self.governor {
            Some(governor) => governor.ready(now, delayed),
            None => Ok(()),
        }
    }

    pub(super) fn spend(&mut self, bytes: u64, delayed: bool) {
        if let Some(pacer) = &mut self.pacer {
            pacer.spend(bytes);
        }
        if let Some(governor) = &mut self.governor {
            governor.spend(bytes, delayed);
        }
    }

    pub(super) const fn heard(&mut self, now: Time) {
        self.last_heard = now;
    }

    /// Bytes that the current pass and delayed writes still have to send.
    pub(super) fn bytes_left(&self) -> u64 {
        self.pass_total.saturating_sub(self.pass_done) + self.delayed.pending_bytes()
    }

    /// Gives up the window, so that the pass goes on from where the destination has everything.
    /// Returns who waited for its chunks.
    pub(super) fn retreat(&mut self) -> Vec<TagList> {
        let given_up = self.window.retreat();
        if let (Pass::VerifyAll | Pass::VerifyDirty { .. }, Some(dirty)) =
            (self.pass, &mut self.dirty)
        {
            // What was about to be compared has not been.
            for chunk in &given_up {
                dirty.set(chunk.extent);
            }
        }
        for chunk in &given_up {
            if chunk.state == ChunkState::Done {
                let bytes = chunk.extent.bytes();
                self.pass_done -= bytes;
                match self.pass {
                    Pass::Copy => self.counters.copied -= bytes,
                    _ => self.counters.verified -= bytes,
                }
            }
        }
        given_up.into_iter().map(|chunk| chunk.waiters).collect()
    }

    /// What keeps the migration from its end, when that has changed.
    pub(super) fn look_for_obstacle(&mut self, now: Time) -> Option<Option<Obstacle>> {
        let current = Achievement {
            left: self.bytes_left(),
            delayed: self.delayed.pending_bytes(),
            paused: self.paused_for(now),
        };
        let reason = self.pause.as_ref().map(|pause| pause.reason);
        let deadline = self.governor.as_ref().and_then(Governor::deadline);
        self.convergence.judge(now, current, reason, deadline)
    }

    fn paused_for(&self, now: Time) -> Duration {
        let current = self.pause.as_ref().map(|pause| pause.lasted(now));
        self.pauses.total + current.unwrap_or_default()
    }

    fn promise(&self, now: Time) -> PromiseProgress {
        let mut promise = PromiseProgress {
            paused: self.pause.as_ref().map(|pause| pause.reason),
            pauses: self.pauses.by_reason,
            paused_for: self.paused_for(now),
            delayed_bytes: self.delayed.pending_bytes(),
            delayed_bytes_sent: self.delayed.sent_bytes,
            delayed_bytes_cancelled: self.delayed.cancelled_bytes,
            obstacle: self.convergence.obstacle(),
            ..PromiseProgress::default()
        };
        if let Some(governor) = &self.governor {
            governor.report(&mut promise);
        }
        promise
    }

    pub(super) fn progress(&self, now: Time) -> Progress {
        Progress {
            migration: self.options.migration,
            phase: self.phase,
            bytes_done: self.pass_done,
            bytes_total: self.pass_total,
            bytes_copied: self.counters.copied,
            copy_bytes_sent: self.counters.copy_sent,
            double_write_bytes_sent: self.counters.double_write_sent,
            bytes_verified: self.counters.verified,
            verified: self.counters.all_verified,
            promise: self.promise(now),
        }
    }

    /// What the pass locks next, if it has not come to its end.
    fn next_extent(&self) -> Option<Extent> {
        let head = self.window.pointers.read_head;
        match (self.pass, &self.dirty) {
            (Pass::VerifyDirty { .. }, Some(dirty)) => dirty.next_run(head, self.chunk_sectors()),
            _ => {
                let left = self.capacity.0.saturating_sub(head.0);
                let sectors = left.min(u64::from(self.chunk_sectors())) as u32;
                Extent::new(head, sectors)
            }
        }
    }

    fn chunk_sectors(&self) -> u32 {
        self.governor
            .as_ref()
            .map_or(self.options.chunk_sectors, Governor::chunk_sectors)
    }

    /// Chunks that may be in flight while the guest does I/O.
    fn busy_window(&self) -> u16 {
        self.governor
            .as_ref()
            .map_or(self.options.busy_window_chunks, Governor::window)
    }

    fn start_pass(&mut self, pass: Pass, now: Time) {
        self.convergence.restart(now);
        self.pass = pass;
        self.pass_done = 0;
        self.pass_total = match (pass, &self.dirty) {
            (Pass::VerifyDirty { .. }, Some(dirty)) => dirty.sectors() * SECTOR_SIZE,
            _ => self.capacity.bytes().0,
        };
        self.window.restart();
    }

    fn dirty_blocks(&self) -> u64 {
        self.dirty.as_ref().map_or(0, DirtyBitmap::count)
    }

    /// Whether another chunk may be locked; otherwise when to ask again. The guest's promise holds
    /// nothing back while the guest is idle.
    fn may_start_chunk(&mut self, now: Time, guest_is_idle: bool) -> Result<(), Time> {
        if self.pass == Pass::Copy
            && let Some(pacer) = &mut self.pacer
        {
            pacer.ready(now)?;
        }
        match &mut self.governor {
            Some(governor) if !guest_is_idle => governor.ready(now, false),
            _ => Ok(()),
        }
    }

    fn chunk_started(&mut self, bytes: u64) {
        if self.pass == Pass::Copy
            && let Some(pacer) = &mut self.pacer
        {
            pacer.spend(bytes);
        }
        if let Some(governor) = &mut self.governor {
            governor.spend(bytes, false);
        }
    }

    /// How often the source looks at the time: heartbeats and timeouts.
    fn tick(&self) -> core::time::Duration {
        self.options.peer_timeout / 4
    }
}

impl Controller {
    /// Starts to move the disk away. The connections are up and the destination accepted the offer.
    ///
    /// # Errors
    /// [`StartError`]; nothing has changed then.
    pub fn start_source(&mut self, now: Time, options: MigrationOptions) -> Result<(), StartError> {
        let chunk = options.chunk_sectors;
        if chunk == 0 || !chunk.is_multiple_of(8) || chunk > MAX_CHUNK_SECTORS {
            return Err(StartError::Option("chunk size"));
        }
        if options.window_chunks == 0 || options.window_chunks > self.limits.window_chunks {
            return Err(StartError::Option("window"));
        }
        if options.busy_window_chunks == 0 || options.busy_window_chunks > options.window_chunks {
            return Err(StartError::Option("window for a busy guest"));
        }
        if options.peer_timeout.is_zero() {
            return Err(StartError::Option("peer timeout"));
        }
        if !self.authority.may_serve() {
            return Err(StartError::NotServing);
        }
        if self.source.is_some() || self.orphaned_reads > 0 {
            return Err(StartError::Busy);
        }
        self.now = now;
        self.control_up = true;
        self.forward_link = super::ForwardLink::Absent;
        let mut source = Source {
            generation: Generation(0),
            window: Window::new(options.window_chunks),
            phase: Phase::Copying,
            pass: Pass::Copy,
            capacity: self.capacity,
            dirty: options
                .verify
                .then(|| DirtyBitmap::new(self.capacity, VERIFY_BLOCK_SECTORS)),
            pacer: options.max_bandwidth.map(|limit| Pacer::new(limit, now)),
            paced_until: None,
            delayed_paced_until: None,
            governor: Governor::new(&options, now),
            pause: None,
            pauses: PauseCounts::default(),
            delayed: DelayedWrites::new(self.limits, self.capacity),
            watched: VecDeque::with_capacity(self.limits.requests as usize * 4),
            convergence: Convergence::new(now),
            freeze_allowance: options
                .sla
                .map_or(FIRST_FREEZE, |target| target.limit.max(FIRST_FREEZE)),
            pass_done: 0,
            pass_total: 0,
            counters: Counters::default(),
            mismatch: None,
            freeze_pass: false,
            sync_up: true,
            next_tick: now,
            last_heard: now,
            phase_since: now,
            options,
        };
        source.start_pass(Pass::Copy, now);
        #[cfg(feature = "planted-bugs")]
        if self.has_bug(PlantedBug::DropDelayedOnOverflow) {
            source.delayed.drop_on_overflow();
        }
        self.source = Some(Box::new(source));
        self.enter_phase(Phase::Copying);
        self.pump();
        Ok(())
    }

    /// Fills the locking window and sends what has been read.
    pub(super) fn pump(&mut self) {
        let long_ago = |last: Time| self.now.since(last) > GUEST_IDLE_AFTER;
        let guest_is_idle = self.requests == 0 && self.last_request.is_none_or(long_ago);
        loop {
            let Some(source) = &mut self.source else {
                return;
            };
            source.paced_until = None;
            let comparing = source.pass != Pass::Copy;
            if source.pause.is_some() || (comparing && !source.delayed.is_settled()) {
                return;
            }
            let most = if guest_is_idle {
                source.options.window_chunks
            } else {
                source.busy_window()
            };
            while source.window.len() < usize::from(most) && source.window.has_free_slot() {
                let Some(extent) = source.next_extent() else {
                    break;
                };
                let frozen = source.phase == Phase::Draining;
                if !frozen && let Err(next) = source.may_start_chunk(self.now, guest_is_idle) {
                    source.paced_until = Some(next);
                    break;
                }
                let Some(slot) = source.window.lock(extent, self.now) else {
                    break;
                };
                source.chunk_started(extent.bytes());
                read_when_quiet(
                    source,
                    &self.table,
                    &self.slots,
                    &mut self.actions,
                    slot,
                    extent,
                );
            }
            if source.window.is_empty() && source.next_extent().is_none() {
                if self.finish_pass() {
                    continue;
                }
                return;
            }
            return;
        }
    }

    /// A guest write left these addresses: chunks that waited for it may be read now.
    #[inline]
    pub(super) fn writes_left(&mut self, extent: Extent) {
        let Some(source) = &mut self.source else {
            return;
        };
        if !source.window.has_quiescing() {
            return;
        }
        for at in 0..source.window.len() {
            let Some((slot, extent)) = source.window.quiescing_at(at, extent) else {
                continue;
            };
            read_when_quiet(
                source,
                &self.table,
                &self.slots,
                &mut self.actions,
                slot,
                extent,
            );
        }
    }

    /// The local read of a chunk finished.
    pub(super) fn chunk_read(&mut self, slot: ChunkSlot, result: Result<Content, RequestError>) {
        let Some(source) = &mut self.source else {
            return;
        };
        if source.window.orphan_read(slot) {
            return self.pump();
        }
        let pass = source.pass;
        let Some(chunk) = source
            .window
            .get(slot)
            .filter(|c| c.state == ChunkState::Reading)
        else {
            return;
        };
        chunk.state = ChunkState::Read(match result {
            Ok(Content::Digest(digest)) if pass != Pass::Copy => ChunkContent::Digest(digest),
            Ok(Content::Data) if pass == Pass::Copy => ChunkContent::Data,
            Ok(Content::Zeroes) if pass == Pass::Copy => ChunkContent::Zeroes,
            _ => {
                // The slot is idle again: it must not be counted as a read under way.
                chunk.state = ChunkState::Sent;
                self.abort_source(AbortReason::SourceDisk);
                return;
            }
        });
        self.send_read_chunks();
    }

    fn send_read_chunks(&mut self) {
        let Some(source) = &mut self.source else {
            return;
        };
        let generation = source.generation;
        while let Some((slot, extent, content)) = source.window.next_to_send() {
            let message = match content {
                ChunkContent::Digest(digest) => Message::Verify {
                    slot,
                    generation,
                    extent,
                    digest,
                },
                content => {
                    let zeroes = content == ChunkContent::Zeroes;
                    if !zeroes {
                        source.counters.copy_sent += extent.bytes();
                    }
                    Message::Copy {
                        slot,
                        generation,
                        extent,
                        zeroes,
                    }
                }
            };
            self.actions.push_back(Action::Send {
                class: TrafficClass::Copy,
                message,
            });
        }
    }

    /// The destination acknowledged a copy or a double write.
    pub(super) fn acknowledged(
        &mut self,
        class: TrafficClass,
        tag: u32,
        generation: Generation,
        result: Result<(), RequestError>,
    ) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.last_heard = self.now;
        if class == TrafficClass::Sync {
            self.double_write_acknowledged(RequestTag(tag), generation);
        } else if source.generation == generation
            && source.pass == Pass::Copy
            && result.is_ok()
            && let Ok(slot) = u16::try_from(tag)
        {
            self.chunk_done(ChunkSlot(slot));
        }
        if let Err(error) = result {
            self.abort_source(AbortReason::of_destination(error));
        }
    }

    /// The destination compared a chunk.
    pub(super) fn chunk_compared(
        &mut self,
        slot: ChunkSlot,
        generation: Generation,
        result: Result<bool, RequestError>,
    ) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.last_heard = self.now;
        if source.generation != generation || source.pass == Pass::Copy {
            return;
        }
        match result {
            Ok(true) => self.chunk_done(slot),
            Ok(false) => {
                source.mismatch = source.window.get(slot).map(|chunk| chunk.extent);
                self.abort_source(AbortReason::VerifyMismatch);
            }
            Err(_) => {
                self.abort_source(AbortReason::DestinationDisk);
            }
        }
    }

    fn chunk_done(&mut self, slot: ChunkSlot) {
        let Some(source) = &mut self.source else {
            return;
        };
        let Some(chunk) = source.window.acknowledge(slot) else {
            return;
        };
        let bytes = chunk.extent.bytes();
        source.pass_done += bytes;
        match source.pass {
            Pass::Copy => source.counters.copied += bytes,
            _ => source.counters.verified += bytes,
        }
        if let Some(governor) = &mut source.governor {
            governor.chunk_done(self.now.since(chunk.locked));
        }
        self.wake(chunk.waiters);
        self.pump();
    }

    pub(super) fn wake(&mut self, mut waiters: TagList) {
        while let Some(tag) = self.slots.pop(&mut waiters) {
            self.ready.push_back(tag);
        }
    }

    /// The pass came to its end: starts the next one (true) or the way to switchover.
    fn finish_pass(&mut self) -> bool {
        let forgets_delayed = self.has_bug(PlantedBug::SwitchoverWithDelayed);
        let Some(source) = &mut self.source else {
            return false;
        };
        if !matches!(source.phase, Phase::Copying | Phase::Verifying) {
            if source.phase == Phase::Draining && source.freeze_pass {
                source.counters.all_verified = true;
                self.prepare();
            }
            return false;
        }
        if !forgets_delayed && source.delayed.pending_bytes() > FREEZE_DELAYED_BYTES {
            // They are being sent; the pass goes on when they are.
            return false;
        }
        let next = match source.pass {
            _ if !source.options.verify => None,
            Pass::Copy => Some(Pass::VerifyAll),
            Pass::VerifyAll => Some(Pass::VerifyDirty { number: 2 }),
            Pass::VerifyDirty { number } => {
                (number < MAX_VERIFY_PASSES).then_some(Pass::VerifyDirty { number: number + 1 })
            }
        };
        let small = source.pass != Pass::Copy && source.dirty_blocks() <= FREEZE_BLOCKS;
        match next {
            Some(pass) if !small => {
                source.start_pass(pass, self.now);
                if source.phase == Phase::Copying {
                    self.enter_phase(Phase::Verifying);
                }
                true
            }
            _ => {
                self.enter_phase(Phase::Draining);
                false
            }
        }
    }

    /// When the guest is held and everything it had in flight is done: compares what was written
    /// since the last pass, then asks the destination to accept.
    pub(super) fn check_drained(&mut self) {
        let forgets_delayed = self.has_bug(PlantedBug::SwitchoverWithDelayed);
        let Some(source) = &mut self.source else {
            return;
        };
        if source.phase != Phase::Draining || self.admitted > 0 || !source.window.is_empty() {
            return;
        }
        if !forgets_delayed && !source.delayed.is_settled() {
            return self.flush_delayed();
        }
        if source.options.verify && source.dirty_blocks() > 0 {
            source.freeze_pass = true;
            let number = MAX_VERIFY_PASSES;
            source.start_pass(Pass::VerifyDirty { number }, self.now);
            self.pump();
        } else {
            source.counters.all_verified = source.options.verify;
            self.prepare();
        }
    }

    /// A freeze that took too long is over: the migration goes on as before it.
    pub(super) fn enter_running_phase(&mut self) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.freeze_allowance *= 2;
        source.freeze_pass = false;
        let phase = if source.pass == Pass::Copy {
            Phase::Copying
        } else {
            source.start_pass(Pass::VerifyDirty { number: 2 }, self.now);
            Phase::Verifying
        };
        self.enter_phase(phase);
    }

    fn prepare(&mut self) {
        let Some(source) = &self.source else { return };
        debug_assert!(
            source.delayed.is_settled() || self.has_bug(PlantedBug::SwitchoverWithDelayed),
            "the destination lacks delayed writes"
        );
        let migration = source.options.migration;
        self.enter_phase(Phase::Preparing);
        let effects = self.authority.prepare(migration);
        self.apply(effects);
    }

    pub(super) fn enter_phase(&mut self, phase: Phase) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.phase = phase;
        source.phase_since = self.now;
        let migration = source.options.migration;
        self.notify(Event::PhaseEntered { migration, phase });
    }

    /// Gives the migration up: the guest goes on here, and nothing that was under way with the
    /// destination matters any more. False when it is too late.
    pub(super) fn abort_source(&mut self, reason: AbortReason) -> bool {
        if self.source.is_none() || !self.authority.cancel() {
            return false;
        }
        let Some(mut source) = self.source.take() else {
            return false;
        };
        let migration = source.options.migration;
        source.phase = Phase::Aborted;
        self.last_progress = Some(source.progress(self.now));
        self.orphaned_reads += source.window.reads() + source.delayed.reads();
        let given_up = source.window.retreat();
        self.send(TrafficClass::Control, Message::Abort { migration, reason });
        let mismatch = source.mismatch;
        self.notify(Event::MigrationAborted {
            migration,
            reason,
            mismatch,
        });
        for tag in self.slots.select(|slot| slot.pending & REMOTE != 0) {
            self.give_up_double_write(tag);
        }
        for chunk in given_up {
            self.wake(chunk.waiters);
        }
        self.control_up = false;
        self.release_held();
        true
    }

    /// The destination serves: nothing is left to do but to forward.
    pub(super) fn complete_source(&mut self) {
        if let Some(mut source) = self.source.take() {
            source.phase = Phase::Completed;
            self.last_progress = Some(source.progress(self.now));
        }
    }

    /// The other node answered something.
    pub(super) fn heard(&mut self) {
        if let Some(source) = &mut self.source {
            source.last_heard = self.now;
        }
        self.destination_heard();
    }

    pub(super) fn source_timer(&mut self) {
        let now = self.now;
        let Some(source) = &mut self.source else {
            return;
        };
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        if due(source.paced_until) || due(source.delayed_paced_until) {
            self.flush_delayed();
            self.pump();
        }
        self.watch_expired();
        self.pause_timer();
        if let Some(source) = &self.source
            && due(source.freeze_deadline())
            && !self.pause(PauseReason::GuestLatency)
            && let Some(source) = &mut self.source
        {
            source.freeze_allowance *= 2;
        }
        let next_sample = self
            .source
            .as_ref()
            .and_then(|source| source.governor.as_ref())
            .map(Governor::next_sample);
        if due(next_sample) {
            self.sample();
        }
        let Some(source) = &mut self.source else {
            return;
        };
        if source.next_tick > now {
            return;
        }
        let timeout = source.options.peer_timeout;
        source.next_tick = now.after(source.tick());
        let deciding = matches!(source.phase, Phase::Draining | Phase::Preparing);
        let late = now.since(source.last_heard) > timeout
            || (deciding && now.since(source.phase_since) > timeout)
            || !self
                .slots
                .select(|slot| slot.pending & REMOTE != 0 && now.since(slot.issued) > timeout)
                .is_empty();
        if late && self.abort_source(AbortReason::PeerTimeout) {
            self.run_ready();
            return;
        }
        self.send(TrafficClass::Control, Message::Ping);
    }
}

/// Reads a locked chunk unless guest writes to it are under way; no new ones start, because the
/// chunk is locked.
fn read_when_quiet(
    source: &mut Source,
    table: &crate::write_table::WriteTable,
    slots: &super::slots::Slots,
    actions: &mut std::collections::VecDeque<Action>,
    slot: ChunkSlot,
    extent: Extent,
) {
    let busy = table.find(extent, |entry| {
        slots
            .get(entry.tag)
            .is_some_and(|slot| slot.stage == super::slots::Stage::InFlight)
    });
    if busy.is_some() {
        return;
    }
    source.window.start_reading(slot);
    let inspect = match source.pass {
        Pass::Copy => Inspect::Zeroes,
        Pass::VerifyAll | Pass::VerifyDirty { .. } => Inspect::Digest,
    };
    if let (Inspect::Digest, Some(dirty)) = (inspect, &mut source.dirty) {
        dirty.clear(extent);
    }
    actions.push_back(Action::Disk {
        tag: DiskTag::Chunk(slot),
        operation: DiskOperation::Read { extent, inspect },
    });
}
