//! The controller of one disk on one node.

mod block_set;
mod cx;
mod governor;
mod handover;
mod limits;
mod options;
pub(crate) mod policy;
mod progress;
mod requests;
mod transfer;

use core::time::Duration;

use self::cx::Cx;
pub use self::governor::arrivals::{Arrivals, GuestLoad};
pub use self::governor::parts::{GovernorParts, UnknownPart};
use self::handover::Doubt;
pub use self::limits::Limits;
pub use self::options::{ImageOffer, LinkSignal, MigrationOptions, OlderCopy, Switchover};
pub(crate) use self::policy::*;
pub use self::progress::{DeltaBy, DeltaProgress, Progress, PromiseProgress, StartError};
pub use self::requests::forwarding::Admission;
use self::requests::forwarding::Forwarding;
use self::requests::{Answers, Requests};
use self::transfer::differences::Differences;
pub use self::transfer::differences::on_image::Compared;
pub use self::transfer::differences::written::Written;
use self::transfer::follow::activity::ActivityLog;
pub use self::transfer::follow::activity::{AREA_SECTORS, ActiveAreas, MAX_AREAS};
use self::transfer::outgoing::Outgoing;
pub use self::transfer::outgoing::change::{ChangeError, MigrationChange};
pub use self::transfer::outgoing::{MAX_MOVED, MAX_PULLED, MAX_VERIFIED};
use self::transfer::receive::Destination;
use self::transfer::remainder::PullLink;
use self::transfer::remainder::lacking::Lacking;
pub use self::transfer::remainder::missing::{
    HeatPiece, Missing, PIECE_HEATS, PIECE_WORDS, WordPiece,
};
use self::transfer::remainder::owing::Owing;
pub use self::transfer::verify_hole::HOLE_PIECE_SECTORS;
use crate::action::{Action, Content, DiskTag};
use crate::authority::{AuthorityRecord, Ownership};
use crate::event::{AbortReason, Event};
#[cfg(feature = "planted-bugs")]
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Sectors, Time};
use crate::wire::{Message, TrafficClass};

/// The controller of one disk on one node: serves guests, moves the disk away, takes the disk in, and forwards the I/O
/// of clients that stayed.
///
/// Order of calls: after any `handle_*`, `start_*`, `cancel` or `fail_forwarded`, drain [`Self::poll_action`] until it
/// is empty and carry the actions out. The body chooses the tags. A tag is busy from the call that brings the tag until
/// [`Action::Complete`] or [`Action::ReleaseReplica`] names it. Call [`Self::handle_timer`] once
/// [`Self::next_deadline`] has passed.
#[derive(Debug)]
pub struct Controller {
    cx: Cx,
    requests: Requests,
    outgoing: Outgoing,
    destination: Option<Destination>,
    differences: Differences,
    /// Blocks that this node, the owner, lacks.
    lacking: Option<Box<Lacking>>,
    /// Maximum wait of a request for a missing block before the request fails; `None`: no limit.
    longest_missing_wait: Option<Duration>,
    owing: Owing,
    pull_link: PullLink,
    /// True while the connection to the image is up, if another node owes a part of the missing blocks.
    image_is_up: bool,
    forwarding: Forwarding,
    doubt: Doubt,
    activity: ActivityLog,
}

impl Controller {
    /// Interval of the body's [`LinkSignal`] reports.
    pub const LINK_SAMPLING: Duration = Duration::from_millis(10);

    /// Maximum wait of a request for the migration, as a multiple of the promise, if the promise's percentile spares
    /// the request.
    pub const MOST_LATENESS: u32 = 4;

    /// Upper bound on an eased implicit promise, where the migration could not end otherwise.
    pub const MOST_EASED: Duration = Duration::from_millis(200);

    /// Creates a controller for a disk of `capacity` sectors whose stored authority is `record`.
    pub fn new(limits: Limits, capacity: Sectors, record: AuthorityRecord) -> Self {
        let cx = Cx::new(limits, capacity, record);
        Self {
            doubt: Doubt::new(&cx.authority),
            cx,
            requests: Requests::default(),
            outgoing: Outgoing::default(),
            destination: None,
            differences: Differences::default(),
            lacking: None,
            longest_missing_wait: None,
            owing: Owing::new(),
            pull_link: PullLink::Down,
            image_is_up: false,
            forwarding: Forwarding::new(),
            activity: ActivityLog::default(),
        }
    }

    /// Plants a bug in this controller.
    #[cfg(feature = "planted-bugs")]
    pub const fn plant(&mut self, bug: PlantedBug) {
        self.cx.planted = Some(bug);
    }

    /// Returns the next action.
    #[inline]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.cx.actions.pop_front()
    }

    /// Returns the time of the next [`Self::handle_timer`] call.
    pub fn next_deadline(&self) -> Option<Time> {
        let source = self
            .outgoing
            .source
            .as_ref()
            .map(|source| source.next_deadline(&self.cx.slots));
        let destination = self
            .destination
            .as_ref()
            .map(|destination| destination.deadline);
        let lacking = self.lacking.as_deref();
        let lacking = lacking.and_then(|lacking| lacking.deadline(self.longest_missing_wait));
        [
            source,
            destination,
            self.doubt.remind_at,
            self.owing.tell_at,
            lacking,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Handles a deadline that has passed.
    pub fn handle_timer(&mut self, now: Time) {
        self.cx.now = now;
        self.source_timer();
        self.destination_timer();
        if self.doubt.remind_at.is_some_and(|at| at <= now) {
            self.doubt.remind(&mut self.cx);
        }
        if self.owing.tell_at.is_some_and(|at| at <= now) {
            self.tell_of_debt();
        }
        self.lacking_timer();
        self.run_ready();
    }

    /// Handles a finished disk operation. An operation that was not started is ignored.
    #[inline]
    pub fn handle_disk_done(
        &mut self,
        now: Time,
        tag: DiskTag,
        result: Result<Content, RequestError>,
    ) {
        self.cx.now = now;
        match tag {
            DiskTag::Request(tag) => self.request_disk_done(tag, result.map(|_| ())),
            DiskTag::Chunk(_) | DiskTag::Delayed(_) if self.outgoing.orphaned_reads > 0 => {
                // No migration starts while reads of an abandoned migration are under way.
                self.outgoing.orphaned_reads -= 1;
            }
            DiskTag::Chunk(slot) => self.chunk_read(slot, result),
            DiskTag::Delayed(slot) => self.delayed_read(slot, result),
            DiskTag::Replica(tag) => self.replica_disk_done(tag, result),
            DiskTag::Barrier => self.barrier_done(result.map(|_| ())),
            DiskTag::Layout => self.layout_found(result),
            DiskTag::Holes => self.long_hole_found(result),
            DiskTag::Owed(slot) => self.owing.owed_read(&mut self.cx, slot, result),
            DiskTag::Pulled(slot) => self.pulled_written(slot, result.map(|_| ())),
            DiskTag::Checkpoint => self.checkpoint_flushed(result.map(|_| ())),
            DiskTag::OwedFlush => self.owed_flushed(result.map(|_| ())),
            DiskTag::ActivityFlush => self.activity_flushed(result.map(|_| ())),
            DiskTag::BaseFlush => self
                .differences
                .base
                .base_flushed(&mut self.cx, result.map(|_| ())),
        }
        self.run_ready();
    }

    /// Handles a frame from a connection of the current migration.
    ///
    /// `buffer` is the free tag whose buffer received the payload. [`Message::Copy`], [`Message::DoubleWrite`],
    /// [`Message::DelayedWrite`] and [`Message::Verify`] need a buffer even without payload: a verification reads its
    /// data into the buffer, so the buffer must hold the extent. [`Message::VerifyHole`] needs a buffer for at most
    /// [`HOLE_PIECE_SECTORS`] of its extent. Other frames must come without a buffer.
    ///
    /// [`Message::Forward`] must not be given here: the body asks [`Self::admit_forwarded`] and converts the frame to
    /// [`Self::handle_request`] with [`Origin::Peer`](crate::request::Origin::Peer). Other frames of a forwarder go to
    /// [`Self::handle_forwarder_message`].
    ///
    /// [`Message::Commit`] may release held requests here. Before `Commit` and before [`Message::Fence`] the body must
    /// therefore find the clients that are gone, as before [`Self::handle_client_attached`].
    ///
    /// The payload of a [`Message::ForwardReply`] is in the buffer of the answered request. The frame comes from the
    /// connection on which this node forwards.
    #[inline]
    pub fn handle_message(
        &mut self,
        now: Time,
        class: TrafficClass,
        message: Message,
        buffer: Option<RequestTag>,
    ) {
        self.cx.now = now;
        match message {
            Message::Ack { .. }
            | Message::Verified { .. }
            | Message::DelayedWritten { .. }
            | Message::GenerationReached { .. }
            | Message::GuestArrived { .. } => self.source_message(class, message),
            Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. }
            | Message::VerifyHole { .. } => self.replica(message, buffer),
            Message::ForwardReply {
                tag,
                number,
                result,
                ..
            } => self.forward_reply(tag, number, result),
            Message::Ping if class == TrafficClass::Pull => self.owing.owner_heard(self.cx.now),
            Message::Ping => self.pinged(),
            Message::Pong => self.heard(),
            Message::NewGeneration { generation } => self.new_generation(generation),
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
            Message::Pull { slot, extent } => self.owing.serve_pull(&mut self.cx, slot, extent),
            Message::Whole { .. } => {
                let effects = self.cx.authority.handle(&message);
                self.apply(effects);
            }
            Message::Owes {
                migration,
                max_bandwidth,
            } => self.owed(class, migration, max_bandwidth),
            // These go to `handle_forwarder_message`, `handle_pulled` and `admit_forwarded`.
            Message::Forward { .. }
            | Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. }
            | Message::Pulled { .. } => {}
            Message::Follow { .. } | Message::Follows { .. } | Message::CheckpointMark { .. } => {
                self.follow_message(&message);
            }
            Message::Prepare { .. }
            | Message::Prepared { .. }
            | Message::Commit { .. }
            | Message::Committed { .. }
            | Message::Abort { .. }
            | Message::Query { .. } => self.authority_message(&message),
        }
        self.run_ready();
    }

    fn pinged(&mut self) {
        self.heard();
        self.cx.send(TrafficClass::Control, Message::Pong);
    }

    /// Handles a frame of the destination for the source.
    #[inline]
    fn source_message(&mut self, class: TrafficClass, message: Message) {
        match message {
            Message::Ack {
                tag,
                generation,
                result,
            } => {
                self.acknowledged(class, tag, generation, result);
            }
            Message::Verified {
                slot,
                generation,
                result,
            } => {
                self.chunk_compared(slot, generation, result);
            }
            Message::DelayedWritten {
                slot,
                generation,
                result,
            } => self.delayed_written(slot, generation, result),
            Message::GenerationReached { generation } => self.generation_reached(generation),
            Message::GuestArrived { migration } => self.guest_arrived(migration),
            _ => {}
        }
    }

    /// Notes that the record of the last [`Action::Persist`] is durable.
    pub fn handle_persisted(&mut self, now: Time) {
        self.cx.now = now;
        #[cfg(feature = "planted-bugs")]
        if self.cx.used_early > 0 {
            self.cx.used_early -= 1;
            return;
        }
        let effects = self.cx.authority.persisted();
        let record = self.cx.authority.record();
        self.cx.notify(Event::AuthorityChanged { record });
        if self.requests.answers == Answers::Held && record.ownership == Ownership::Vacant {
            self.yielded();
        }
        self.apply(effects);
        self.store_that_it_is_whole();
        self.run_ready();
    }

    /// Notes that the record of the last [`Action::Persist`], which gives the disk away or takes a disk that follows, was
    /// not stored and never will be: the migration ends. Returns false if the last record was another one.
    pub fn handle_not_persisted(&mut self, now: Time, reason: AbortReason) -> bool {
        self.cx.now = now;
        let kept = self.cx.authority.keep();
        let effects = match kept {
            true => Vec::new(),
            false => self.cx.authority.untake(reason),
        };
        let ended = kept || !effects.is_empty();
        if kept {
            self.abort_source(reason);
        }
        self.apply(effects);
        self.run_ready();
        ended
    }

    /// Cancels the outgoing or incoming migration if still possible. Returns false if there is no migration or the
    /// point of no return has passed: the migration will then succeed, or only the other node knows the outcome.
    pub fn cancel(&mut self, now: Time, reason: AbortReason) -> bool {
        self.cx.now = now;
        let cancelled = if self.outgoing.source.is_some() {
            self.abort_source(reason)
        } else if let Some(migration) = self.cx.authority.receiving() {
            let effects = self.cx.authority.stop_receiving(reason);
            self.cx
                .send(TrafficClass::Control, Message::Abort { migration, reason });
            self.apply(effects);
            true
        } else {
            let effects = self.cx.authority.fail_taking(reason);
            let taken = !effects.is_empty();
            self.apply(effects);
            taken
        };
        self.run_ready();
        cancelled
    }

    /// Hands the disk over as soon as the destination has everything, because the guest has stopped. From here on the
    /// promise to the guest holds nothing back. Returns false if no migration leaves.
    pub fn switch_over(&mut self, now: Time) -> bool {
        self.cx.now = now;
        let leaves = self.order_switchover();
        self.run_ready();
        leaves
    }

    /// Tells the source to hand the disk over, because the hypervisor has moved the guest to this node. Returns false
    /// if the disk is not arriving.
    pub fn handle_guest_here(&mut self, now: Time) -> bool {
        self.cx.now = now;
        let arrives = self.cx.authority.receiving();
        if let Some(migration) = arrives {
            self.cx
                .send(TrafficClass::Control, Message::GuestArrived { migration });
        }
        arrives.is_some()
    }

    /// Returns the durable record of ownership.
    pub const fn record(&self) -> AuthorityRecord {
        self.cx.authority.record()
    }

    /// Returns true if guest I/O is served from this node's disk now, and answers are not [held](Self::hold).
    pub const fn serves(&self) -> bool {
        self.cx.authority.may_serve() && !matches!(self.requests.answers, Answers::Held)
    }

    /// Returns true if this node's disk is whole: the node serves durably, and no migration is under way in either
    /// direction. The storage's statement about unwritten blocks then holds for the disk.
    pub const fn is_alone(&self) -> bool {
        self.cx.authority.is_settled()
            && self.outgoing.source.is_none()
            && self.destination.is_none()
            && self.lacking.is_none()
    }

    /// Returns true if the disk is on its way out of this node.
    pub const fn is_leaving(&self) -> bool {
        self.outgoing.source.is_some()
    }

    /// Returns the progress of the outgoing migration, or the final progress of the last one.
    pub fn progress(&self) -> Option<Progress> {
        self.outgoing
            .source
            .as_ref()
            .map(|source| source.progress(self.cx.now))
            .or(self.outgoing.last_progress)
    }

    /// Returns the requests that have entered and are unanswered.
    pub const fn requests_in_flight(&self) -> u32 {
        self.requests.unanswered
    }
}
