//! The outgoing migration: passes over the disk behind the locking window (Alg. 1 of the SmartNIC storage-migration
//! paper), then verification, then the freeze that leads to switchover.

pub(in crate::controller) mod change;
mod delta;
pub(in crate::controller) mod freeze;
pub(in crate::controller) mod holes;
mod layout;
mod promise;
mod pump;
pub(in crate::controller) mod stage;
mod verify;

use core::time::Duration;
use std::collections::VecDeque;

use crate::controller::governor::in_flight::idle_window::IdleWindow;
use crate::controller::governor::obstacles::Obstacles;
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::governor::{Governor, JudgedPeriods, governor};
use crate::controller::requests::slots::{Slot, Slots};
use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::double_write::delayed_writes::DelayedWrites;
use crate::controller::transfer::double_write::posted_writes::PostedWrites;
use crate::controller::transfer::outgoing::delta::Wanted;
use crate::controller::transfer::outgoing::freeze::FIRST_FREEZE;
use crate::controller::transfer::outgoing::holes::Holes;
use crate::controller::transfer::outgoing::layout::Layout;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::pause::{Pause, PauseCounts};
use crate::controller::transfer::policy::{Pass, Policy, Route};
use crate::controller::transfer::push_pull::PushPull;
use crate::controller::transfer::window::Window;
use crate::controller::{
    Controller, MigrationOptions, PolicyOptions, Progress, PushOptions, StartError, Switchover,
};
#[cfg(feature = "planted-bugs")]
use crate::controller::{OlderCopy, Written};
use crate::event::{AbortReason, Event, PauseReason, Phase};
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::request::RequestTag;
use crate::units::{Bytes, Extent, Generation, SECTOR_SIZE, Sectors, Time};
use crate::wire::{Message, TrafficClass};

/// Longest chunk: 16 MiB.
const MAX_CHUNK_SECTORS: u32 = (16 << 20) / SECTOR_SIZE as u32;

/// Longest block of pre-copy's dirty bitmap: 1 GiB.
const MAX_BLOCK_SECTORS: u32 = (1 << 30) / SECTOR_SIZE as u32;

/// Block of verification's dirty bitmap: 4 KiB.
const VERIFY_BLOCK_SECTORS: u32 = 8;

/// The largest disk that can be moved. The table of delayed writes of a larger disk, more than 2 GiB, may not fit into
/// memory.
pub const MAX_MOVED: Bytes = Bytes(1 << 50);

/// The largest disk that can be verified. The dirty bitmap of a larger disk, more than 2 GiB, may not fit into memory,
/// and the guest would wait for its scan.
pub const MAX_VERIFIED: Bytes = Bytes(64 << 40);

/// The largest disk that can be moved without a part. The block maps of a larger disk, more than 2 GiB at either node,
/// may not fit into memory.
pub const MAX_PULLED: Bytes = Bytes(64 << 40);

#[derive(Debug)]
pub(in crate::controller) struct Source {
    pub(in crate::controller) options: MigrationOptions,
    pub(in crate::controller) generation: Generation,
    pub(in crate::controller) window: Window,
    idle_window: IdleWindow,
    layout: Layout,
    pub(in crate::controller) holes: Holes,
    pub(in crate::controller) stage: Stage,
    policy: Policy,
    /// Options of push and pull, if the policy is to change once no chunk is in flight.
    switching: Option<PushOptions>,
    /// True while pushing waits for the destination to receive everything sent before this generation.
    pub(in crate::controller) awaits_generation: bool,
    pass: Pass,
    capacity: Sectors,
    /// Blocks of the disk that the destination lacks.
    wanted: Wanted,
    /// Bytes not sent because of the destination's copy.
    skipped: u64,
    /// Blocks written since they were compared; only with verification.
    dirty: Option<DirtyBitmap>,
    token_bucket: Option<TokenBucket>,
    paced_until: Option<Time>,
    pub(in crate::controller) delayed_paced_until: Option<Time>,
    /// Keeper of the promise to the guest, if there is a promise.
    pub(in crate::controller) governor: Option<Box<dyn Governor>>,
    pub(in crate::controller) pause: Option<Pause>,
    pub(in crate::controller) pauses: PauseCounts,
    pub(in crate::controller) delayed: DelayedWrites,
    pub(in crate::controller) posted: PostedWrites,
    /// Requests that wait for the migration, with their places in the order of arrival, oldest first. An entry whose
    /// wait has ended is removed at the front.
    watched: VecDeque<(RequestTag, u64)>,
    /// Requests that may exceed the promise, in the same form.
    tolerated: VecDeque<(RequestTag, u64)>,
    /// By tag: the turn of the last double write.
    turns: Box<[u16]>,
    obstacles: Obstacles,
    freeze_allowance: Duration,
    pass_done: u64,
    pass_total: u64,
    counters: Counters,
    mismatch: Option<Extent>,
    /// True if the destination has accepted before this node's disk is flushed.
    pub(in crate::controller) accepted: bool,
    /// True if only the guest's last writes hold the switchover back.
    pub(in crate::controller) may_switch_over: bool,
    /// True while the connection for forwarded I/O is up.
    pub(in crate::controller) sync_up: bool,
    started: Time,
    next_tick: Time,
    pub(in crate::controller) last_heard: Time,
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
    /// Returns true if the guest was stopped for the switchover.
    pub(in crate::controller) const fn is_ordered(&self) -> bool {
        self.may_switch_over && matches!(self.options.switchover, Switchover::WhenTold)
    }

    /// Decides on a guest's write with no chunk to wait for, or let through a chunk being copied. A write with its
    /// start in the migrated region goes to the destination whole: the part past the read head is copied again later.
    #[inline]
    pub(in crate::controller) fn route(
        &mut self,
        extent: Extent,
        zeroes: bool,
        let_through: bool,
    ) -> Route {
        if self.pass == Pass::Compare {
            return Route::Local;
        }
        let delays = self.delays() || let_through;
        if !zeroes && self.keeps_back(extent, delays) {
            return Route::Later;
        }
        let behind = extent.start() < self.window.pointers.read_head;
        if !self.policy.reaches(self.pass, behind) {
            return Route::Local;
        }
        if delays {
            self.delay(extent);
            return Route::Later;
        }
        Route::Both
    }

    #[inline]
    pub(in crate::controller) fn double_written(&mut self, extent: Extent, zeroes: bool) {
        self.holes.sends(extent);
        self.delayed.overtaken(extent);
        if let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        if !zeroes {
            self.counters.double_write_sent += extent.bytes();
            if let Some(token_bucket) = &mut self.token_bucket {
                token_bucket.spend(extent.bytes());
            }
        }
    }

    /// Returns the time at which the timer has to run next.
    pub(in crate::controller) fn next_deadline(&self, slots: &Slots) -> Time {
        let governed = self.governor.as_ref().map(|it| it.next_sample());
        let pause = self.pause.as_ref().and_then(Pause::deadline);
        [
            self.paced_until,
            self.delayed_paced_until,
            governed,
            pause,
            self.front_expiry(slots),
            self.tolerance_expiry(slots),
            self.freeze_deadline(),
            self.policy.leaves_at(),
            self.holes.deadline(),
        ]
        .into_iter()
        .flatten()
        .fold(self.next_tick, Time::min)
    }

    /// Returns the bytes still to be sent by the current pass and by delayed writes.
    pub(in crate::controller) fn bytes_left(&self) -> u64 {
        self.pass_total.saturating_sub(self.pass_done) + self.delayed.pending_bytes()
    }

    pub(in crate::controller) fn progress(&self, now: Time) -> Progress {
        Progress {
            migration: self.options.migration,
            phase: self.phase(),
            bytes_done: self.pass_done,
            bytes_total: self.pass_total.max(self.pass_done),
            bytes_copied: self.counters.copied,
            copy_bytes_sent: self.counters.copy_sent,
            double_write_bytes_sent: self.counters.double_write_sent,
            bytes_verified: self.counters.verified,
            bytes_owed: (self.policy.remainder()).map_or(0, PushPull::remaining_bytes),
            verified: self.counters.all_verified,
            delta: self.delta(),
            promise: self.promise(now),
        }
    }

    /// Returns the interval of heartbeats and timeout checks.
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
        let is_chunk =
            |sectors: u32, most| sectors > 0 && sectors.is_multiple_of(8) && sectors <= most;
        if !is_chunk(options.chunk_sectors, MAX_CHUNK_SECTORS) {
            return Err(StartError::Option("chunk size"));
        }
        if !is_chunk(options.busy_chunk_sectors, options.chunk_sectors) {
            return Err(StartError::Option("chunk size for a busy guest"));
        }
        if options.window_chunks == 0 || options.window_chunks > self.limits.window_chunks {
            return Err(StartError::Option("window"));
        }
        if options.idle_window_chunks == 0 || options.idle_window_chunks > options.window_chunks {
            return Err(StartError::Option("window for an idle guest"));
        }
        if options.busy_window_chunks == 0 || options.busy_window_chunks > options.window_chunks {
            return Err(StartError::Option("window for a busy guest"));
        }
        if options.peer_timeout.is_zero() {
            return Err(StartError::Option("peer timeout"));
        }
        if let PolicyOptions::PreCopy(rounds) = options.policy
            && (!is_chunk(rounds.block_sectors, MAX_BLOCK_SECTORS) || rounds.most_rounds == 0)
        {
            return Err(StartError::Option("block or number of rounds of pre-copy"));
        }
        if let PolicyOptions::PreCopy(rounds) = options.policy
            && self.capacity.bytes() > rounds.largest_disk()
        {
            return Err(StartError::Option("size of the disk for blocks as short"));
        }
        let pulls = matches!(options.policy, PolicyOptions::PushPull(_));
        if pulls && options.verify {
            return Err(StartError::Option("verification of a disk that is pulled"));
        }
        if pulls && self.capacity.bytes() > MAX_PULLED {
            return Err(StartError::Option("size of a disk that is pulled"));
        }
        if self.capacity.bytes() > MAX_MOVED {
            return Err(StartError::Option("size of the disk"));
        }
        if options.verify && self.capacity.bytes() > MAX_VERIFIED {
            return Err(StartError::Option("disk that is to be verified"));
        }
        self.check_on_image(&options)?;
        let leaves_image = self.leaves_image();
        let may_leave =
            self.authority.is_settled() || (leaves_image && self.authority.may_leave_rest());
        if !may_leave {
            return Err(match self.needs_source() {
                true => StartError::NeedsSource,
                false => StartError::NotServing,
            });
        }
        if self.source.is_some() || self.orphaned_reads > 0 || self.flushing_owed {
            return Err(StartError::Busy);
        }
        self.now = now;
        self.control_up = true;
        self.forward_link = crate::controller::requests::forwarding::ForwardLink::Absent;
        #[cfg(feature = "planted-bugs")]
        if let (true, None, OlderCopy::Since(migration)) = (
            self.has_bug(PlantedBug::StaleWritten),
            &self.written,
            options.older_copy,
        ) {
            self.written = Some(Written::nothing(migration, self.capacity));
        }
        let on_image = self.on_image.as_deref().filter(|_| leaves_image);
        let (policy, (wanted, first_pass)) = match (on_image, options.policy) {
            (Some(on_image), PolicyOptions::PreCopy(rounds)) => {
                let policy = Policy::copying(rounds, on_image.different());
                (policy, (Wanted::All, Pass::Resend { round: 1 }))
            }
            (Some(on_image), _) => {
                let mut policy = Policy::new(&options, self.capacity, now);
                policy.lacks_only(on_image.different());
                (policy, (Wanted::All, Pass::Resend { round: 1 }))
            }
            _ => {
                let wanted = Wanted::new(
                    &mut self.written,
                    options.older_copy,
                    options.policy,
                    self.capacity,
                );
                (Policy::new(&options, self.capacity, now), wanted)
            }
        };
        let mut source = Source {
            generation: Generation(0),
            window: Window::new(options.window_chunks),
            idle_window: IdleWindow::new(&options),
            layout: Layout::new(&options),
            holes: Holes::new(&options, self.capacity),
            stage: Stage::Moving,
            policy,
            switching: None,
            awaits_generation: false,
            pass: first_pass,
            capacity: self.capacity,
            wanted,
            skipped: 0,
            dirty: options
                .verify
                .then(|| DirtyBitmap::new(self.capacity, VERIFY_BLOCK_SECTORS)),
            token_bucket: options
                .max_bandwidth
                .map(|limit| TokenBucket::new(limit, now)),
            paced_until: None,
            delayed_paced_until: None,
            governor: governor(&options, JudgedPeriods::default(), now),
            pause: None,
            pauses: PauseCounts::default(),
            delayed: DelayedWrites::new(self.limits, self.capacity),
            posted: PostedWrites::new(self.limits.posted_writes(), now),
            watched: VecDeque::with_capacity(self.limits.requests as usize * 4),
            tolerated: VecDeque::with_capacity(self.limits.requests as usize),
            turns: vec![0; self.limits.requests as usize].into_boxed_slice(),
            obstacles: Obstacles::new(now, options.max_bandwidth),
            freeze_allowance: options
                .sla
                .map_or(FIRST_FREEZE, |target| target.limit.max(FIRST_FREEZE)),
            pass_done: 0,
            pass_total: 0,
            counters: Counters::default(),
            mismatch: None,
            accepted: false,
            may_switch_over: options.switchover == Switchover::WhenConverged,
            sync_up: true,
            started: now,
            next_tick: now,
            last_heard: now,
            options,
        };
        if let Some(wanted) = source.wanted.blocks()
            && first_pass == Pass::Copy
        {
            source.policy.lacks_only(wanted);
            source.count_skipped();
        }
        source.start_pass(first_pass, now);
        if pulls {
            source.holes.begin(now);
        }
        #[cfg(feature = "planted-bugs")]
        if self.has_bug(PlantedBug::DropDelayedOnOverflow) {
            source.delayed.drop_on_overflow();
        }
        #[cfg(feature = "planted-bugs")]
        if self.has_bug(PlantedBug::ForgetHot) {
            source.delayed.forget_hot();
        }
        #[cfg(feature = "planted-bugs")]
        if let (true, Policy::PreCopy(rounds)) = (
            self.has_bug(PlantedBug::ForgetRoundWrites),
            &mut source.policy,
        ) {
            rounds.forget_writes();
        }
        #[cfg(feature = "planted-bugs")]
        if self.has_bug(PlantedBug::ReadOverPosted) {
            source.posted.hide_from_chunks();
        }
        let migration = source.options.migration;
        self.source = Some(Box::new(source));
        self.notify(Event::PhaseEntered {
            migration,
            phase: Phase::Copying,
        });
        self.pump();
        // There may be nothing to copy.
        self.run_ready();
        Ok(())
    }

    /// Aborts the migration: the guest goes on here, and operations under way with the destination no longer matter.
    /// Returns false past the point of no return.
    pub(in crate::controller) fn abort_source(&mut self, reason: AbortReason) -> bool {
        if self.source.is_none() || !self.authority.cancel() {
            return false;
        }
        let Some(mut source) = self.source.take() else {
            return false;
        };
        let migration = source.options.migration;
        source.stage = Stage::Decided(Phase::Aborted);
        self.last_progress = Some(source.progress(self.now));
        self.orphaned_reads += source.window.reads() + source.delayed.reads();
        if let Some(written) = source.take_written() {
            self.written = Some(written);
        }
        let given_up = source.window.retreat();
        self.send(TrafficClass::Control, Message::Abort { migration, reason });
        let mismatch = source.mismatch;
        self.notify(Event::MigrationAborted {
            migration,
            reason,
            mismatch,
        });
        for tag in self.slots.select(Slot::is_at_destination) {
            self.give_up_double_write(tag);
        }
        for chunk in given_up {
            self.wake(chunk.waiters);
        }
        self.control_up = false;
        self.on_image = None;
        self.store_that_it_is_whole();
        self.release_held();
        true
    }

    /// Ends the source's part: the destination serves, and only forwarding remains.
    pub(in crate::controller) fn complete_source(&mut self) {
        if let Some(mut source) = self.source.take() {
            source.stage = Stage::Decided(Phase::Completed);
            // A pause or a later write may have given up reads that the disk has not finished.
            self.orphaned_reads += source.window.reads() + source.delayed.reads();
            self.last_progress = Some(source.progress(self.now));
        }
    }

    /// Notes an answer of the other node.
    pub(in crate::controller) fn heard(&mut self) {
        if let Some(source) = &mut self.source {
            source.last_heard = self.now;
        }
        self.destination_heard();
    }

    pub(in crate::controller) fn source_timer(&mut self) {
        let now = self.now;
        let Some(source) = &mut self.source else {
            return;
        };
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        if source.policy.pass_time(now)
            || due(source.holes.deadline())
            || due(source.paced_until)
            || due(source.delayed_paced_until)
        {
            self.flush_delayed();
            self.pump();
        }
        self.watch_expired();
        self.tolerance_expired();
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
            .map(|it| it.next_sample());
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
        let late = now.since(source.last_heard) > timeout
            || source
                .stage
                .held_since()
                .is_some_and(|since| now.since(since) > timeout)
            || source.is_kept_waiting(now)
            || !self
                .slots
                .select(|slot| slot.is_at_destination() && now.since(slot.issued) > timeout)
                .is_empty();
        if late && self.abort_source(AbortReason::PeerTimeout) {
            self.run_ready();
            return;
        }
        self.send(TrafficClass::Control, Message::Ping);
    }
}
