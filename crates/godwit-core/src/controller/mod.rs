//! The controller of one disk on one node.

use core::time::Duration;

use crate::action::{Action, Content, DiskTag};
use crate::authority::AuthorityRecord;
use crate::event::{AbortReason, Phase};
use crate::request::{Request, RequestError, RequestTag};
use crate::units::{Extent, MigrationId, Sectors, Time};
use crate::wire::{Message, TrafficClass};

/// Sizes of the controller's tables, fixed for its life.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Request tags: every guest request, forwarded request and received frame in flight holds one.
    pub requests: u32,
    /// Slots of the locking window: chunks in flight at the source.
    pub window_chunks: u16,
}

/// How a disk is moved.
#[derive(Clone, Copy, Debug)]
pub struct MigrationOptions {
    /// Names this attempt; never used before.
    pub migration: MigrationId,
    /// Longest copy in sectors: a multiple of 8, at most 16 MiB worth.
    pub chunk_sectors: u32,
    /// Chunks in flight at once, at most [`Limits::window_chunks`].
    pub window_chunks: u16,
    /// Most bytes per second that copies and double writes together may take; double writes are
    /// never held back, so a guest that writes more than this gets it all and copies wait.
    pub max_bandwidth: Option<u64>,
    /// Compare both images by hash before switchover.
    pub verify: bool,
    /// Longest wait for any answer of the other node before the migration is given up.
    pub peer_timeout: Duration,
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
    /// Data bytes of copies that were sent: `bytes_copied` less what was all zeroes.
    pub copy_bytes_sent: u64,
    /// Data bytes of double writes that were sent.
    pub double_write_bytes_sent: u64,
    /// Bytes that verification compared, over all passes.
    pub bytes_verified: u64,
    /// Whether every byte was compared and found equal.
    pub verified: bool,
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
/// Order of calls: after any `handle_*`, `start_*` or `cancel`, drain [`Self::poll_action`] until it
/// is empty and carry the actions out. Tags are chosen by the body; a tag is busy from the call that
/// brings it until [`Action::Complete`] or [`Action::ReleaseReplica`] names it. Call
/// [`Self::handle_timer`] when [`Self::next_deadline`] has passed.
#[derive(Debug)]
pub struct Controller {}

impl Controller {
    /// A controller for a disk of `capacity` sectors whose stored authority is `record`.
    pub fn new(limits: Limits, capacity: Sectors, record: AuthorityRecord) -> Self { todo!() }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> { todo!() }

    /// When [`Self::handle_timer`] wants to be called.
    pub fn next_deadline(&self) -> Option<Time> { todo!() }

    /// A deadline passed.
    pub fn handle_timer(&mut self, now: Time) { todo!() }

    /// A guest or the peer (forwarding) asks for I/O. It is answered by [`Action::Complete`],
    /// possibly only after a migration has been decided.
    pub fn handle_request(&mut self, now: Time, request: Request) { todo!() }

    /// A disk operation finished.
    pub fn handle_disk_done(&mut self, now: Time, tag: DiskTag, result: Result<Content, RequestError>) { todo!() }

    /// A frame arrived on a connection of the current migration. `buffer` is the free tag in whose
    /// buffer the payload was received; [`Message::Copy`], [`Message::DoubleWrite`] and
    /// [`Message::Verify`] need one even without payload (a verification's data is read into it:
    /// it must hold the extent). The others must come without one. [`Message::Forward`] must not be
    /// given here: the body turns it into [`Self::handle_request`] with [`Origin::Peer`](crate::request::Origin).
    /// For [`Message::ForwardReply`] the payload is in the buffer of the request it answers.
    pub fn handle_message(&mut self, now: Time, class: TrafficClass, message: Message, buffer: Option<RequestTag>) { todo!() }

    /// The bytes of payload that a [`Message::ForwardReply`] for this tag carries when the request
    /// succeeded; `None` when no reply is expected (then the frame breaks the protocol).
    pub fn forward_reply_length(&self, tag: RequestTag) -> Option<u32> { todo!() }

    /// The record of the last [`Action::Persist`] is durable.
    pub fn handle_persisted(&mut self, now: Time) { todo!() }

    /// A connection of the current migration (any class) ended. Copies and double writes that were
    /// not acknowledged are given up; before the point of no return the migration aborts. The sync
    /// connection after switchover: forwarded I/O is kept and sent again after
    /// [`Self::handle_forward_up`].
    pub fn handle_connection_lost(&mut self, now: Time, class: TrafficClass) { todo!() }

    /// A control connection to the other node of an undecided migration is up (again): see
    /// [`Event::NeedPeer`](crate::event::Event::NeedPeer).
    pub fn handle_control_up(&mut self, now: Time) { todo!() }

    /// A sync connection to the node that owns the disk is up: held requests are forwarded on it,
    /// and those that were forwarded on a lost connection are sent again. Frames of older
    /// connections must not reach [`Self::handle_message`] any more.
    pub fn handle_forward_up(&mut self, now: Time) { todo!() }

    /// Forwarding has become hopeless: fails every request that waits for the owner.
    pub fn fail_forwarded(&mut self, now: Time) { todo!() }

    /// Starts to move the disk away. The connections are up and the destination accepted the offer.
    pub fn start_source(&mut self, now: Time, options: MigrationOptions) -> Result<(), StartError> { todo!() }

    /// Starts to take the disk in. The offer was accepted.
    pub fn start_destination(&mut self, now: Time, migration: MigrationId, peer_timeout: Duration) -> Result<(), StartError> { todo!() }

    /// Ends the outgoing or incoming migration if that is still possible. False when it is too
    /// late (or there is none): then it will succeed, or only the other node can tell.
    pub fn cancel(&mut self, now: Time, reason: AbortReason) -> bool { todo!() }

    /// What is durably known about who owns the disk.
    pub fn record(&self) -> AuthorityRecord { todo!() }

    /// Whether guest I/O is served from this node's disk now.
    pub fn serves(&self) -> bool { todo!() }

    /// How far the outgoing migration is, or how the last one ended.
    pub fn progress(&self) -> Option<Progress> { todo!() }

    /// Requests that have entered and not been answered.
    pub fn requests_in_flight(&self) -> u32 { todo!() }

    /// Whether the tag's extent equals this one; a body's cross-check in tests.
    #[doc(hidden)]
    pub fn debug_extent(&self, tag: RequestTag) -> Option<Extent> { todo!() }
}
