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

use crate::controller::block_set::BlockSet;
use crate::controller::cx::Cx;
use crate::controller::governor::in_flight::idle_window::IdleWindow;
use crate::controller::governor::obstacles::Obstacles;
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::governor::{Governor, JudgedPeriods, governor};
use crate::controller::policy::{AnyPolicy, Policy, Route};
use crate::controller::requests::slots::{Slot, Slots};
use crate::controller::transfer::differences::on_image::OnImage;
use crate::controller::transfer::double_write::delayed_writes::DelayedWrites;
use crate::controller::transfer::double_write::posted_writes::PostedWrites;
use crate::controller::transfer::follow::source::Follower;
use crate::controller::transfer::outgoing::delta::Wanted;
use crate::controller::transfer::outgoing::freeze::FIRST_FREEZE;
use crate::controller::transfer::outgoing::holes::Holes;
use crate::controller::transfer::outgoing::layout::Layout;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::pass::Pass;
use crate::controller::transfer::pause::{Pause, Pauses};
use crate::controller::transfer::window::Window;
use crate::controller::{
    Controller, MigrationOptions, Progress, PushOptions, StartError, Switchover,
};
#[cfg(feature = "planted-bugs")]
use crate::controller::{OlderCopy, Written};
use crate::event::{AbortReason, Event, PauseReason, Phase};
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::request::RequestTag;
use crate::units::{Bytes, Extent, Generation, Sectors, Time};
use crate::wire::{Message, TrafficClass};

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

/// The way of the disk out of this node.
#[derive(Debug, Default)]
pub(in crate::controller) struct Outgoing {
    pub(in crate::controller) source: Option<Box<Source>>,
    /// Final progress of the last migration.
    pub(in crate::controller) last_progress: Option<Progress>,
    /// Unfinished chunk reads of an abandoned migration.
    pub(in crate::controller) orphaned_reads: u32,
    /// Extent of the open [`DiskTag::Layout`](crate::action::DiskTag::Layout) query to the body.
    pub(in crate::controller) looking_at: Option<Extent>,
    /// True while a [`DiskTag::Holes`](crate::action::DiskTag::Holes) query to the body is open.
    pub(in crate::controller) looking_for_holes: bool,
    /// True while the disk is being flushed before a part is owed.
    pub(in crate::controller) flushing_owed: bool,
}

/// A migration under way at its source.
#[derive(Debug)]
pub(in crate::controller) struct Source {
    pub(in crate::controller) options: MigrationOptions,
    pub(in crate::controller) generation: Generation,
    pub(in crate::controller) window: Window,
    idle_window: IdleWindow,
    layout: Layout,
    pub(in crate::controller) holes: Holes,
    pub(in crate::controller) stage: Stage,
    policy: AnyPolicy,
    pub(in crate::controller) change: PolicyChange,
    pass: Pass,
    capacity: Sectors,
    /// Blocks of the disk that the destination lacks.
    wanted: Wanted,
    /// Blocks written since they were compared; only with verification.
    dirty: Option<BlockSet>,
    pub(in crate::controller) rate: Rate,
    /// Keeper of the promise to the guest, if there is a promise.
    pub(in crate::controller) governor: Option<Box<dyn Governor>>,
    pub(in crate::controller) pauses: Pauses,
    pub(in crate::controller) delayed: DelayedWrites,
    pub(in crate::controller) posted: PostedWrites,
    waits: Waits,
    obstacles: Obstacles,
    counters: Counters,
    mismatch: Option<Extent>,
    pub(in crate::controller) handover: Handover,
    pub(in crate::controller) peer: Peer,
    started: Time,
}

/// A change of the policy.
#[derive(Debug, Default)]
pub(in crate::controller) struct PolicyChange {
    /// Options of push and pull, if the policy is to change once no chunk is in flight.
    to: Option<PushOptions>,
    /// True while pushing waits for the destination to receive everything sent before this generation.
    pub(in crate::controller) awaits_generation: bool,
}

/// The bound on the migration's bandwidth, and the times until which it holds frames back.
#[derive(Debug, Default)]
pub(in crate::controller) struct Rate {
    bucket: Option<TokenBucket>,
    copies_wait: Option<Time>,
    pub(in crate::controller) delayed_wait: Option<Time>,
}

/// Requests that wait for the migration, with their places in the order of arrival, oldest first. An entry whose wait
/// has ended is removed at the front.
#[derive(Debug)]
struct Waits {
    watched: VecDeque<(RequestTag, u64)>,
    /// Requests that may exceed the promise.
    tolerated: VecDeque<(RequestTag, u64)>,
}

/// State of the switchover.
#[derive(Debug)]
pub(in crate::controller) struct Handover {
    /// True if only the guest's last writes hold the switchover back.
    pub(in crate::controller) may_switch_over: bool,
    /// True if the destination has accepted before this node's disk is flushed.
    pub(in crate::controller) accepted: bool,
    /// Maximum hold of the guest.
    allowance: Duration,
}

/// The destination as seen from the source.
#[derive(Debug)]
pub(in crate::controller) struct Peer {
    /// True while the connection for forwarded I/O is up.
    pub(in crate::controller) sync_up: bool,
    next_tick: Time,
    pub(in crate::controller) last_heard: Time,
    pub(in crate::controller) follower: Follower,
}

/// Bytes of the current pass and of the migration.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    pass_done: u64,
    pass_total: u64,
    copied: u64,
    copy_sent: u64,
    double_write_sent: u64,
    verified: u64,
    all_verified: bool,
    /// Bytes not sent because of the destination's copy.
    skipped: u64,
}

impl Source {
    fn new(
        cx: &Cx,
        options: MigrationOptions,
        policy: AnyPolicy,
        wanted: Wanted,
        pass: Pass,
    ) -> Self {
        let (now, capacity, limits) = (cx.now, cx.capacity, cx.limits);
        let requests = limits.requests as usize;
        let bandwidth = options.max_bandwidth;
        let promised = options.sla.map_or(FIRST_FREEZE, |target| target.limit);
        let verifies = options.verify;
        Self {
            generation: Generation(0),
            window: Window::new(options.window_chunks),
            idle_window: IdleWindow::new(&options),
            layout: Layout::new(&options),
            holes: Holes::new(&options, capacity),
            stage: Stage::Moving,
            policy,
            change: PolicyChange::default(),
            pass,
            capacity,
            wanted,
            dirty: verifies.then(|| BlockSet::new(capacity, VERIFY_BLOCK_SECTORS)),
            rate: Rate {
                bucket: bandwidth.map(|limit| TokenBucket::new(limit, now)),
                ..Rate::default()
            },
            governor: governor(&options, JudgedPeriods::default(), now),
            pauses: Pauses::default(),
            delayed: DelayedWrites::new(limits, capacity),
            posted: PostedWrites::new(&limits, now),
            waits: Waits {
                watched: VecDeque::with_capacity(requests * 4),
                tolerated: VecDeque::with_capacity(requests),
            },
            obstacles: Obstacles::new(now, bandwidth),
            counters: Counters::default(),
            mismatch: None,
            handover: Handover {
                may_switch_over: options.switchover == Switchover::WhenConverged,
                accepted: false,
                allowance: promised.max(FIRST_FREEZE),
            },
            peer: Peer {
                sync_up: true,
                next_tick: now,
                last_heard: now,
                follower: Follower::Behind,
            },
            started: now,
            options,
        }
    }

    /// Plants a defect.
    #[cfg(feature = "planted-bugs")]
    fn plant(&mut self, bug: PlantedBug) {
        match bug {
            PlantedBug::DropDelayedOnOverflow => self.delayed.drop_on_overflow(),
            PlantedBug::ForgetHot => self.delayed.forget_hot(),
            PlantedBug::ReadOverPosted => self.posted.hide_from_chunks(),
            _ => self.policy.plant(bug),
        }
    }

    /// Returns true if the guest was stopped for the switchover.
    pub(in crate::controller) const fn is_ordered(&self) -> bool {
        self.handover.may_switch_over && matches!(self.options.switchover, Switchover::WhenTold)
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
            if let Some(token_bucket) = &mut self.rate.bucket {
                token_bucket.spend(extent.bytes());
            }
        }
    }

    /// Returns the time at which the timer has to run next.
    pub(in crate::controller) fn next_deadline(&self, slots: &Slots) -> Time {
        let governed = self.governor.as_ref().map(|it| it.next_sample());
        let pause = self.pauses.current.as_ref().and_then(Pause::deadline);
        [
            self.rate.copies_wait,
            self.rate.delayed_wait,
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
        .fold(self.peer.next_tick, Time::min)
    }

    /// Returns the bytes still to be sent by the current pass and by delayed writes.
    pub(in crate::controller) fn bytes_left(&self) -> u64 {
        self.counters
            .pass_total
            .saturating_sub(self.counters.pass_done)
            + self.delayed.pending_bytes()
    }

    pub(in crate::controller) fn progress(&self, now: Time) -> Progress {
        Progress {
            migration: self.options.migration,
            phase: self.phase(),
            bytes_done: self.counters.pass_done,
            bytes_total: self.counters.pass_total.max(self.counters.pass_done),
            bytes_copied: self.counters.copied,
            copy_bytes_sent: self.counters.copy_sent,
            double_write_bytes_sent: self.counters.double_write_sent,
            bytes_verified: self.counters.verified,
            bytes_owed: self.policy.owes(),
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

impl Outgoing {
    /// Ends the source's part without a word to the destination, which has taken the disk.
    pub(in crate::controller) fn give_up_source(&mut self, cx: &mut Cx) {
        let Some(mut source) = self.source.take() else {
            return;
        };
        source.stage = Stage::Decided(Phase::Aborted);
        self.orphaned_reads += source.window.reads() + source.delayed.reads();
        self.last_progress = Some(source.progress(cx.now));
        cx.notify(Event::MigrationAborted {
            migration: source.options.migration,
            reason: AbortReason::PeerLost,
            mismatch: None,
        });
    }

    /// Ends the source's part: the destination serves, and only forwarding remains.
    pub(in crate::controller) fn complete_source(&mut self, cx: &mut Cx) {
        if let Some(mut source) = self.source.take() {
            source.stage = Stage::Decided(Phase::Completed);
            // A pause or a later write may have given up reads that the disk has not finished.
            self.orphaned_reads += source.window.reads() + source.delayed.reads();
            self.last_progress = Some(source.progress(cx.now));
        }
    }
}

impl Controller {
    /// Starts to move the disk away. The connections are up and the destination accepted the offer.
    ///
    /// # Errors
    /// [`StartError`]; nothing has changed then.
    pub fn start_source(&mut self, now: Time, options: MigrationOptions) -> Result<(), StartError> {
        self.check_start(&options)?;
        let leaves_image = self.differences.leaves_image();
        self.cx.now = now;
        self.doubt.control_up = true;
        self.forwarding.link = crate::controller::requests::forwarding::ForwardLink::Absent;
        #[cfg(feature = "planted-bugs")]
        if let (true, None, OlderCopy::Since(migration)) = (
            self.cx.has_bug(PlantedBug::StaleWritten),
            &self.differences.written,
            options.older_copy,
        ) {
            self.differences.written = Some(Written::nothing(migration, self.cx.capacity));
        }
        let on_image = self
            .differences
            .on_image
            .as_deref()
            .filter(|_| leaves_image);
        let differences = on_image.map(OnImage::different);
        let policy = AnyPolicy::new(options.policy, differences, self.cx.capacity, now);
        let pulls = policy.pulls();
        let (wanted, first_pass) = match differences {
            Some(_) => (Wanted::All, Pass::Resend { round: 1 }),
            None => Wanted::new(
                &mut self.differences.written,
                options.older_copy,
                !pulls,
                self.cx.capacity,
            ),
        };
        let mut source = Source::new(&self.cx, options, policy, wanted, first_pass);
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
        if let Some(bug) = self.cx.planted {
            source.plant(bug);
        }
        let migration = source.options.migration;
        self.outgoing.source = Some(Box::new(source));
        self.cx.notify(Event::PhaseEntered {
            migration,
            phase: Phase::Copying,
        });
        self.pump();
        // There may be nothing to copy.
        self.run_ready();
        Ok(())
    }

    fn check_start(&self, options: &MigrationOptions) -> Result<(), StartError> {
        options.check(&self.cx.limits, self.cx.capacity)?;
        self.check_on_image(options)?;
        let leaves_image = self.differences.leaves_image();
        let may_leave =
            self.cx.authority.is_settled() || (leaves_image && self.cx.authority.may_leave_rest());
        if !may_leave {
            return Err(match self.needs_source() {
                true => StartError::NeedsSource,
                false => StartError::NotServing,
            });
        }
        if self.outgoing.source.is_some()
            || self.outgoing.orphaned_reads > 0
            || self.outgoing.flushing_owed
        {
            return Err(StartError::Busy);
        }
        Ok(())
    }

    /// Aborts the migration: the guest goes on here, and operations under way with the destination no longer matter.
    /// Returns false past the point of no return.
    pub(in crate::controller) fn abort_source(&mut self, reason: AbortReason) -> bool {
        if self.sever_source(reason) {
            return true;
        }
        if self.outgoing.source.is_none() || !self.cx.authority.cancel() {
            return false;
        }
        let Some(mut source) = self.outgoing.source.take() else {
            return false;
        };
        let migration = source.options.migration;
        source.stage = Stage::Decided(Phase::Aborted);
        self.outgoing.last_progress = Some(source.progress(self.cx.now));
        self.outgoing.orphaned_reads += source.window.reads() + source.delayed.reads();
        if let Some(written) = source.take_written() {
            self.differences.written = Some(written);
        }
        let given_up = source.window.retreat();
        self.cx
            .send(TrafficClass::Control, Message::Abort { migration, reason });
        let mismatch = source.mismatch;
        self.cx.notify(Event::MigrationAborted {
            migration,
            reason,
            mismatch,
        });
        for tag in self.cx.slots.select(Slot::is_at_destination) {
            self.give_up_double_write(tag);
        }
        for chunk in given_up {
            self.cx.wake(chunk.waiters);
        }
        self.doubt.control_up = false;
        self.activity.end(&mut self.cx);
        self.differences.on_image = None;
        self.store_that_it_is_whole();
        self.release_held();
        true
    }

    /// Notes an answer of the other node.
    pub(in crate::controller) fn heard(&mut self) {
        if let Some(source) = &mut self.outgoing.source {
            source.peer.last_heard = self.cx.now;
        }
        self.destination_heard();
    }

    pub(in crate::controller) fn source_timer(&mut self) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        if source.policy.pass_time(now)
            || due(source.holes.deadline())
            || due(source.rate.copies_wait)
            || due(source.rate.delayed_wait)
        {
            self.outgoing.flush_delayed(&mut self.cx);
            self.pump();
        }
        self.watch_expired();
        self.tolerance_expired();
        self.pause_timer();
        if let Some(source) = &self.outgoing.source
            && due(source.freeze_deadline())
            && !self.pause(PauseReason::GuestLatency)
            && let Some(source) = &mut self.outgoing.source
        {
            source.handover.allowance *= 2;
        }
        let next_sample = self
            .outgoing
            .source
            .as_ref()
            .and_then(|source| source.governor.as_ref())
            .map(|it| it.next_sample());
        if due(next_sample) {
            self.sample();
        }
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        if source.peer.next_tick > now {
            return;
        }
        let timeout = source.options.peer_timeout;
        source.peer.next_tick = now.after(source.tick());
        let late = now.since(source.peer.last_heard) > timeout
            || source
                .stage
                .held_since()
                .is_some_and(|since| now.since(since) > timeout)
            || source.is_kept_waiting(now)
            || !self
                .cx
                .slots
                .select(|slot| slot.is_at_destination() && now.since(slot.issued) > timeout)
                .is_empty();
        if late && self.abort_source(AbortReason::PeerTimeout) {
            self.run_ready();
            return;
        }
        self.cx.send(TrafficClass::Control, Message::Ping);
    }
}
