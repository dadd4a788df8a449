//! The controller of one disk on one node.

mod governor;
mod handover;
mod limits;
mod options;
mod progress;
mod requests;
mod transfer;

use core::num::NonZeroU64;
use core::time::Duration;
use std::collections::VecDeque;

pub use self::governor::arrivals::{Arrivals, GuestLoad};
pub use self::governor::parts::{GovernorParts, UnknownPart};
pub use self::limits::Limits;
pub use self::options::{
    ImageOffer, LinkSignal, MigrationOptions, OlderCopy, PolicyOptions, PushOptions, RoundOptions,
    Switchover,
};
pub use self::progress::{DeltaBy, DeltaProgress, Progress, PromiseProgress, StartError};
pub use self::requests::forwarding::Admission;
use self::requests::forwarding::{ForwardLink, Forwarding};
use self::requests::slots::{Slots, TagList};
use self::transfer::differences::base::BecomingBase;
pub use self::transfer::differences::on_image::Compared;
use self::transfer::differences::on_image::OnImage;
pub use self::transfer::differences::written::Written;
use self::transfer::outgoing::Source;
pub use self::transfer::outgoing::change::{ChangeError, MigrationChange};
pub use self::transfer::outgoing::{MAX_MOVED, MAX_PULLED, MAX_VERIFIED};
use self::transfer::receive::Destination;
use self::transfer::remainder::lacking::Lacking;
pub use self::transfer::remainder::missing::{
    HeatPiece, Missing, PIECE_HEATS, PIECE_WORDS, WordPiece,
};
use self::transfer::remainder::owing::Owing;
pub use self::transfer::verify_hole::HOLE_PIECE_SECTORS;
use crate::action::{Action, Content, DiskTag, PULL_SLOTS};
use crate::authority::{Authority, AuthorityRecord};
use crate::event::{AbortReason, Event};
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Sectors, Time};
use crate::wire::{Message, TrafficClass};
use crate::write_table::WriteTable;

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
    /// What was written since a migration brought the disk here, where this process knows all of that.
    written: Option<Written>,
    /// The image of a disk that has left.
    base: BecomingBase,
    /// What this node, the owner, lacks.
    lacking: Option<Box<Lacking>>,
    /// So long a request waits for what the disk lacks, before it fails; for ever when nothing.
    longest_missing_wait: Option<Duration>,
    /// What of the disk is as it is in the image that it was created from, once somebody wants to know.
    on_image: Option<Box<OnImage>>,
    /// What this node reads for the owner.
    owing: Owing,
    /// The connection is up on which an owner pulls.
    pull_is_up: bool,
    /// The node at the other end of that connection takes signs of life.
    shows_life: bool,
    /// This node has dialled it: it owes, and its peer does not.
    pull_dialled: bool,
    /// The connection is up on which the image is to be had, where another node owes some of what this one lacks.
    image_is_up: bool,
    /// When the owner is told again that this node owes.
    owes_at: Option<Time>,
    /// The most bytes per second that the owner may pull of what this node owes.
    owed_bandwidth: Option<NonZeroU64>,
    /// The disk is being flushed before a part of it is owed.
    flushing_owed: bool,
    /// Chunk reads of an abandoned migration that the disk has not finished.
    orphaned_reads: u32,
    /// What the body was asked about, with [`DiskTag::Layout`], and has not answered.
    looking_at: Option<Extent>,
    /// The body was asked with [`DiskTag::Holes`], and has not answered.
    looking_for_holes: bool,
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
            table: WriteTable::new(limits.requests + u32::from(PULL_SLOTS)),
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
            written: None,
            base: BecomingBase::default(),
            lacking: None,
            on_image: None,
            longest_missing_wait: None,
            owing: Owing::new(),
            pull_is_up: false,
            shows_life: false,
            pull_dialled: false,
            image_is_up: false,
            owes_at: None,
            owed_bandwidth: None,
            flushing_owed: false,
            orphaned_reads: 0,
            looking_at: None,
            looking_for_holes: false,
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
        let lacking = self.lacking.as_deref();
        let lacking = lacking.and_then(|lacking| lacking.deadline(self.longest_missing_wait));
        [source, destination, self.remind_at, self.owes_at, lacking]
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
        if self.owes_at.is_some_and(|at| at <= now) {
            self.tell_of_debt();
        }
        self.lacking_timer();
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
            DiskTag::Chunk(_) | DiskTag::Delayed(_) if self.orphaned_reads > 0 => {
                // No migration starts while reads of an abandoned one are under way.
                self.orphaned_reads -= 1;
            }
            DiskTag::Chunk(slot) => self.chunk_read(slot, result),
            DiskTag::Delayed(slot) => self.delayed_read(slot, result),
            DiskTag::Replica(tag) => self.replica_disk_done(tag, result),
            DiskTag::Barrier => self.barrier_done(result.map(|_| ())),
            DiskTag::Layout => self.layout_found(result),
            DiskTag::Holes => self.long_hole_found(result),
            DiskTag::Owed(slot) => self.owed_read(slot, result),
            DiskTag::Pulled(slot) => self.pulled_written(slot, result.map(|_| ())),
            DiskTag::Checkpoint => self.checkpoint_flushed(result.map(|_| ())),
            DiskTag::OwedFlush => self.owed_flushed(result.map(|_| ())),
            DiskTag::BaseFlush => self.base_flushed(result.map(|_| ())),
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
    /// [`Self::handle_forwarder_message`] takes those. Before [`Message::Fence`], and before
    /// [`Message::Commit`], which may let requests be done here that were held, the body has to look which
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
            Message::Ping if class == TrafficClass::Pull => self.owing.owner_heard(self.now),
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
            Message::Lacks {
                start,
                sectors,
                heat,
                at_source,
            } => self.will_lack(start, sectors, heat, at_source),
            Message::Pull { slot, extent } => self.serve_pull(slot, extent),
            Message::Whole { .. } => {
                let effects = self.authority.handle(&message);
                self.apply(effects);
            }
            Message::Owes {
                migration,
                max_bandwidth,
            } => self.owed(class, migration, max_bandwidth),
            // Those go to `handle_forwarder_message`, `handle_pulled` and `admit_forwarded`.
            Message::Forward { .. }
            | Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. }
            | Message::Pulled { .. } => {}
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
        self.store_that_it_is_whole();
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
        self.authority.is_settled()
            && self.source.is_none()
            && self.destination.is_none()
            && self.lacking.is_none()
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
