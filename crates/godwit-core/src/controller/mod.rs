//! The controller of one disk on one node.

mod governor;
mod handover;
mod limits;
mod requests;
mod transfer;

use core::time::Duration;
use std::collections::VecDeque;

pub use self::governor::arrivals::{Arrivals, GuestLoad};
pub use self::limits::Limits;
pub use self::requests::forwarding::Admission;
use self::requests::forwarding::{ForwardLink, Forwarding};
use self::requests::slots::{Slots, TagList};
use self::transfer::outgoing::Source;
pub use self::transfer::outgoing::{MAX_MOVED, MAX_VERIFIED};
use self::transfer::receive::Destination;
pub use self::transfer::verify_hole::HOLE_PIECE_SECTORS;
use crate::action::{Action, Content, DiskTag};
use crate::authority::{Authority, AuthorityRecord};
use crate::event::{AbortReason, Event, Obstacle, PauseReason, Phase};
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::sla::LatencyTarget;
use crate::units::{Extent, MigrationId, Sectors, Time};
use crate::wire::{Message, TrafficClass};
use crate::write_table::WriteTable;

/// How a disk is moved.
#[derive(Clone, Copy, Debug)]
pub struct MigrationOptions {
    /// Names this attempt; never used before.
    pub migration: MigrationId,
    /// Longest copy in sectors: a multiple of 8, at most 16 MiB worth.
    pub chunk_sectors: u32,
    /// Longest copy in sectors while the guest does I/O, whose requests wait for chunks that they
    /// meet: a multiple of 8, at most `chunk_sectors`. With a promise for which no request waits for
    /// chunks they become longer, up to `chunk_sectors`, when many would be in flight.
    pub busy_chunk_sectors: u32,
    /// Chunks in flight at once, at most [`Limits::window_chunks`].
    pub window_chunks: u16,
    /// Chunks in flight at once while the guest is idle, from 1 to `window_chunks`. More than these
    /// only as long as they are quick.
    pub idle_window_chunks: u16,
    /// Chunks in flight at once while the guest does I/O, from 1 to `window_chunks`: what is in
    /// flight is what a double write queues behind, at the link and at the destination's disk.
    pub busy_window_chunks: u16,
    /// Most bytes per second that copies, double writes and delayed writes together may take;
    /// double writes are never held back, so a guest that writes more than this gets it all and
    /// the rest waits.
    pub max_bandwidth: Option<u64>,
    /// What the guest was promised: the migration pauses when it would break it (Alg. 2). Without
    /// it nothing but the window holds the migration back.
    pub sla: Option<LatencyTarget>,
    /// What the guest asked for before the migration: copies leave it room for as many requests, as
    /// long as it makes them. Only with [`Self::sla`].
    pub guest_load: Option<GuestLoad>,
    /// The longest that a guest waits for chunks in flight when it wakes up: a shorter one lets
    /// fewer be in flight while it is idle. Without it they take 15 ms at most, and 30 ms when the
    /// guest has slept for a second.
    pub wake_up_limit: Option<Duration>,
    /// While paused, acknowledge writes to the migrated region locally and send them later
    /// (Alg. 3). Without it they go to both sides even then.
    pub delayed_writes: bool,
    /// Most bytes per second of delayed writes (`DELAYED_WRITE_RATE`); chosen by the controller
    /// when left out.
    pub delayed_write_rate: Option<u64>,
    /// Most bytes per second of all traffic on the interface, the host's other traffic included:
    /// when [`LinkSignal::interface_rate`] exceeds it the migration pauses.
    pub interface_budget: Option<u64>,
    /// When the first pass should be over, from the start. As it comes near, the migration takes
    /// what it needs even where that costs the guest its promise.
    pub deadline: Option<Duration>,
    /// Compare both images by hash before switchover.
    pub verify: bool,
    /// Ask where the disk has holes, and tell the destination of them instead of reading them. Only where
    /// it has [`Features::HOLES`](crate::wire::Features::HOLES).
    pub find_holes: bool,
    /// What the switchover waits for.
    pub switchover: Switchover,
    /// Longest wait for any answer of the other node before the migration is given up.
    pub peer_timeout: Duration,
}

/// What the switchover waits for once the destination has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switchover {
    /// Nothing: the guest's I/O is held for a moment and goes on at the destination.
    WhenConverged,
    /// [`Controller::switch_over`], or the destination's word that the guest is there: the guest runs
    /// on behind double writes until its hypervisor has moved it.
    WhenTold,
}

impl MigrationOptions {
    /// The usual: 8 to 32 MiB in flight in chunks of 1 MiB, 1 MiB in chunks of 256 KiB while the
    /// guest does I/O, no promise and no limit.
    pub const fn new(migration: MigrationId) -> Self {
        Self {
            migration,
            chunk_sectors: 2048,
            busy_chunk_sectors: 512,
            window_chunks: 32,
            idle_window_chunks: 8,
            busy_window_chunks: 4,
            max_bandwidth: None,
            sla: None,
            guest_load: None,
            wake_up_limit: None,
            delayed_writes: true,
            delayed_write_rate: None,
            interface_budget: None,
            deadline: None,
            verify: false,
            find_holes: false,
            switchover: Switchover::WhenConverged,
            peer_timeout: Duration::from_secs(10),
        }
    }
}

/// What the body sees of the sync connection of an outgoing migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSignal {
    /// Bytes of frames that the other node has not acknowledged: in the body's queue and in the
    /// socket.
    pub queued: u64,
    /// Smoothed round trip; zero when unknown.
    pub round_trip: Duration,
    /// Bytes per second that the connection delivered lately; zero when unknown.
    pub delivery_rate: u64,
    /// Bytes per second that leave by the interface, the host's other traffic included, when it is
    /// watched.
    pub interface_rate: Option<u64>,
}

/// How far an outgoing migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which migration.
    pub migration: MigrationId,
    /// What it does now.
    pub phase: Phase,
    /// Bytes of the disk that the current pass has finished.
    pub bytes_done: u64,
    /// Bytes of the disk that the current pass goes over in all.
    pub bytes_total: u64,
    /// Bytes of the disk that were copied in the first pass, zeroes included.
    pub bytes_copied: u64,
    /// Data bytes of copies that were sent: `bytes_copied` less what was all zeroes, plus what a
    /// pause discarded.
    pub copy_bytes_sent: u64,
    /// Data bytes of double writes that were sent.
    pub double_write_bytes_sent: u64,
    /// Bytes that verification compared, over all passes.
    pub bytes_verified: u64,
    /// Whether every byte was compared and found equal.
    pub verified: bool,
    /// What was promised and how it is kept.
    pub promise: PromiseProgress,
}

/// How an outgoing migration keeps its promise to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromiseProgress {
    /// The longest latency promised.
    pub limit: Option<Duration>,
    /// How long requests may take at the moment: the limit, or more where the guest's take longer by
    /// themselves, or where nobody stated the limit and the migration could not end with it.
    pub allowed: Option<Duration>,
    /// Sampling periods so far in which the guest had requests.
    pub periods: u64,
    /// Those of them in which a request took longer than the limit.
    pub breached_periods: u64,
    /// Why the migration pauses now, if it does.
    pub paused: Option<PauseReason>,
    /// Pauses so far, by reason, in the order of [`PauseReason::ALL`].
    pub pauses: [u32; 3],
    /// Time spent in pauses.
    pub paused_for: Duration,
    /// Bytes of the disk that delayed writes still have to bring to the destination.
    pub delayed_bytes: u64,
    /// Data bytes of delayed writes that were sent.
    pub delayed_bytes_sent: u64,
    /// Delayed bytes that a later double write made obsolete before they were sent.
    pub delayed_bytes_cancelled: u64,
    /// Bytes per second that copies and delayed writes may take at the moment; `None` while nothing
    /// holds them back.
    pub rate_limit: Option<u64>,
    /// What keeps the migration from coming to its end, when something does.
    pub obstacle: Option<Obstacle>,
}

/// Why a migration cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// This node does not own the disk.
    #[error("this node does not serve the disk")]
    NotServing,
    /// Another migration of the disk is under way.
    #[error("another migration of the disk is under way")]
    Busy,
    /// An option is out of its range.
    #[error("the {0} is out of range")]
    Option(&'static str),
}

/// The controller of one disk on one node: serves guests, moves the disk away, takes it in, and
/// forwards the I/O of clients that stayed.
///
/// Order of calls: after any `handle_*`, `start_*`, `cancel` or `fail_forwarded`, drain
/// [`Self::poll_action`] until it is empty and carry the actions out. Tags are chosen by the body; a
/// tag is busy from the call that brings it until [`Action::Complete`] or
/// [`Action::ReleaseReplica`] names it. Call [`Self::handle_timer`] when [`Self::next_deadline`] has
/// passed.
#[derive(Debug)]
pub struct Controller {
    limits: Limits,
    capacity: Sectors,
    slots: Slots,
    table: WriteTable,
    actions: VecDeque<Action>,
    /// Tags whose blocker is gone, to be looked at again.
    ready: VecDeque<RequestTag>,
    /// Requests that wait until it is known who serves.
    held: TagList,
    /// Requests that have been admitted and not finished.
    admitted: u32,
    requests: u32,
    /// When a request last entered.
    last_request: Option<Time>,
    authority: Authority,
    source: Option<Box<Source>>,
    last_progress: Option<Progress>,
    destination: Option<Destination>,
    /// Chunk reads of an abandoned migration that the disk has not finished.
    orphaned_reads: u32,
    /// What the body was asked about, with [`DiskTag::Layout`], and has not answered.
    looking_at: Option<Extent>,
    forward_link: ForwardLink,
    forwarding: Forwarding,
    control_up: bool,
    /// When to remind the other node of an undecided migration.
    remind_at: Option<Time>,
    now: Time,
    #[cfg(feature = "planted-bugs")]
    planted: Option<PlantedBug>,
    /// Records that were acted on too early.
    #[cfg(feature = "planted-bugs")]
    used_early: u32,
}

impl Controller {
    /// How often the body reports [`LinkSignal`]s.
    pub const LINK_SAMPLING: Duration = Duration::from_millis(10);

    /// How many times longer than promised a request may wait for the migration, at most, when the
    /// promise's percentile spares it.
    pub const MOST_LATENESS: u32 = 4;

    /// What a promise that nobody stated is eased to at most where the migration could not end with it.
    pub const MOST_EASED: Duration = Duration::from_millis(200);

    /// A controller for a disk of `capacity` sectors whose stored authority is `record`.
    pub fn new(limits: Limits, capacity: Sectors, record: AuthorityRecord) -> Self {
        let authority = Authority::new(record);
        let remind_at = authority.in_doubt().map(|_| Time(0));
        Self {
            limits,
            capacity,
            slots: Slots::new(limits.requests),
            table: WriteTable::new(limits.requests),
            actions: VecDeque::with_capacity(
                limits.requests as usize * 4 + usize::from(limits.window_chunks) * 2 + 16,
            ),
            ready: VecDeque::with_capacity(limits.requests as usize),
            held: TagList::EMPTY,
            admitted: 0,
            requests: 0,
            last_request: None,
            authority,
            source: None,
            last_progress: None,
            destination: None,
            orphaned_reads: 0,
            looking_at: None,
            forward_link: ForwardLink::Absent,
            forwarding: Forwarding::new(),
            control_up: false,
            remind_at,
            now: Time(0),
            #[cfg(feature = "planted-bugs")]
            planted: None,
            #[cfg(feature = "planted-bugs")]
            used_early: 0,
        }
    }

    /// Makes this controller wrong.
    #[cfg(feature = "planted-bugs")]
    pub const fn plant(&mut self, bug: PlantedBug) {
        self.planted = Some(bug);
    }

    #[cfg(feature = "planted-bugs")]
    fn has_bug(&self, bug: PlantedBug) -> bool {
        self.planted == Some(bug)
    }

    #[cfg(not(feature = "planted-bugs"))]
    #[inline]
    #[allow(
        clippy::unused_self,
        reason = "it has the signature of its counterpart"
    )]
    const fn has_bug(&self, _: PlantedBug) -> bool {
        false
    }

    /// The next thing to do.
    #[inline]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Self::handle_timer`] wants to be called.
    pub fn next_deadline(&self) -> Option<Time> {
        let source = self
            .source
            .as_ref()
            .map(|source| source.next_deadline(&self.slots));
        let destination = self
            .destination
            .as_ref()
            .map(|destination| destination.deadline);
        [source, destination, self.remind_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// A deadline passed.
    pub fn handle_timer(&mut self, now: Time) {
        self.now = now;
        self.source_timer();
        self.destination_timer();
        if self.remind_at.is_some_and(|at| at <= now) {
            self.remind();
        }
        self.run_ready();
    }

    /// A disk operation finished. One that was not started is ignored.
    #[inline]
    pub fn handle_disk_done(
        &mut self,
        now: Time,
        tag: DiskTag,
        result: Result<Content, RequestError>,
    ) {
        self.now = now;
        match tag {
            DiskTag::Request(tag) => self.request_disk_done(tag, result.map(|_| ())),
            DiskTag::Chunk(_) if self.orphaned_reads > 0 => {
                // No migration starts while reads of an abandoned one are under way.
                self.orphaned_reads -= 1;
            }
            DiskTag::Chunk(slot) if slot.0 >= self.limits.window_chunks => {
                self.delayed_read(slot, result);
            }
            DiskTag::Chunk(slot) => self.chunk_read(slot, result),
            DiskTag::Replica(tag) => self.replica_disk_done(tag, result),
            DiskTag::Barrier => self.barrier_done(result.map(|_| ())),
            DiskTag::Layout => self.layout_found(result),
        }
        self.run_ready();
    }

    /// A frame arrived on a connection of the current migration. `buffer` is the free tag in whose
    /// buffer the payload was received; [`Message::Copy`], [`Message::DoubleWrite`],
    /// [`Message::DelayedWrite`] and [`Message::Verify`] need one even without payload (a
    /// verification's data is read into it: it must hold the extent), and so does
    /// [`Message::VerifyHole`], for [`HOLE_PIECE_SECTORS`] of its extent at most. The others must come without one. [`Message::Forward`] must not be
    /// given here: the body asks [`Self::admit_forwarded`] and turns it into [`Self::handle_request`] with
    /// [`Origin::Peer`](crate::request::Origin::Peer). Nor must the other frames of a forwarder:
    /// [`Self::handle_forwarder_message`] takes those. Before [`Message::Fence`] the body has to look which
    /// of its clients are gone, as before [`Self::handle_client_attached`]. For [`Message::ForwardReply`] the payload is
    /// in the buffer of the request it answers; it comes from the connection on which this node
    /// forwards.
    #[inline]
    pub fn handle_message(
        &mut self,
        now: Time,
        class: TrafficClass,
        message: Message,
        buffer: Option<RequestTag>,
    ) {
        self.now = now;
        match message {
            Message::Ack {
                tag,
                generation,
                result,
            } => {
                self.acknowledged(class, tag, generation, result);
            }
            Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. }
            | Message::VerifyHole { .. } => {
                if let Some(tag) = buffer {
                    self.replica(message, tag);
                }
            }
            Message::Verified {
                slot,
                generation,
                result,
            } => {
                self.chunk_compared(slot, generation, result);
            }
            Message::ForwardReply {
                tag,
                number,
                result,
                ..
            } => self.forward_reply(tag, number, result),
            Message::Ping => {
                self.heard();
                self.send(TrafficClass::Control, Message::Pong);
            }
            Message::Pong => self.heard(),
            Message::DelayedWritten {
                slot,
                generation,
                result,
            } => self.delayed_written(slot, generation, result),
            Message::NewGeneration { generation } => self.new_generation(generation),
            Message::GenerationReached { generation } => self.generation_reached(generation),
            Message::GuestArrived { migration } => self.guest_arrived(migration),
            Message::Fence {
                number,
                taken,
                shared,
                failed,
            } => self.fence_seen(number, taken, (shared, failed)),
            // Those go to `handle_forwarder_message` and `admit_forwarded`.
            Message::Forward { .. }
            | Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. } => {}
            Message::Prepare { .. }
            | Message::Prepared { .. }
            | Message::Commit { .. }
            | Message::Committed { .. }
            | Message::Abort { .. }
            | Message::Query { .. } => self.authority_message(&message),
        }
        self.run_ready();
    }

    /// The record of the last [`Action::Persist`] is durable.
    pub fn handle_persisted(&mut self, now: Time) {
        self.now = now;
        #[cfg(feature = "planted-bugs")]
        if self.used_early > 0 {
            self.used_early -= 1;
            return;
        }
        let effects = self.authority.persisted();
        let record = self.authority.record();
        self.notify(Event::AuthorityChanged { record });
        self.apply(effects);
        self.run_ready();
    }

    /// The record of the last [`Action::Persist`] says that this node gave the disk away, was not
    /// stored and never will be: the migration is given up. False when that was not the last record.
    pub fn handle_not_persisted(&mut self, now: Time, reason: AbortReason) -> bool {
        self.now = now;
        let kept = self.authority.keep();
        if kept {
            self.abort_source(reason);
        }
        self.run_ready();
        kept
    }

    /// Ends the outgoing or incoming migration if that is still possible. False when it is too
    /// late (or there is none): then it will succeed, or only the other node can tell.
    pub fn cancel(&mut self, now: Time, reason: AbortReason) -> bool {
        self.now = now;
        let cancelled = if self.source.is_some() {
            self.abort_source(reason)
        } else if let Some(migration) = self.authority.receiving() {
            let effects = self.authority.stop_receiving(reason);
            self.send(TrafficClass::Control, Message::Abort { migration, reason });
            self.apply(effects);
            true
        } else {
            false
        };
        self.run_ready();
        cancelled
    }

    /// The guest has stopped: hands the disk over as soon as the destination has everything. What
    /// was promised to the guest holds nothing back from here on. False when no migration leaves.
    pub fn switch_over(&mut self, now: Time) -> bool {
        self.now = now;
        let leaves = self.order_switchover();
        self.run_ready();
        leaves
    }

    /// The guest's hypervisor has moved the guest to this node, whose disk is not here yet: tells
    /// the source to hand it over. False when the disk does not arrive.
    pub fn handle_guest_here(&mut self, now: Time) -> bool {
        self.now = now;
        let arrives = self.authority.receiving();
        if let Some(migration) = arrives {
            self.send(TrafficClass::Control, Message::GuestArrived { migration });
        }
        arrives.is_some()
    }

    /// What is durably known about who owns the disk.
    pub const fn record(&self) -> AuthorityRecord {
        self.authority.record()
    }

    /// Whether guest I/O is served from this node's disk now.
    pub const fn serves(&self) -> bool {
        self.authority.may_serve()
    }

    /// Whether this node's disk holds all there is: it serves, durably, and no migration is under way in either
    /// direction, so that what its storage says of unwritten blocks is true of the disk.
    pub const fn is_alone(&self) -> bool {
        self.authority.is_settled() && self.source.is_none() && self.destination.is_none()
    }

    /// Whether the disk is on its way out of this node.
    pub const fn is_leaving(&self) -> bool {
        self.source.is_some()
    }

    /// How far the outgoing migration is, or how the last one ended.
    pub fn progress(&self) -> Option<Progress> {
        self.source
            .as_ref()
            .map(|source| source.progress(self.now))
            .or(self.last_progress)
    }

    /// Requests that have entered and not been answered.
    pub const fn requests_in_flight(&self) -> u32 {
        self.requests
    }

    #[inline]
    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    #[inline]
    fn send(&mut self, class: TrafficClass, message: Message) {
        self.act(Action::Send { class, message });
    }

    fn notify(&mut self, event: Event) {
        self.act(Action::Notify(event));
    }
}
