//! Requests of clients that stayed: sent to the owner exactly once, and never after their client left.
//!
//! A client may leave a node with requests unanswered and continue at another node. The abandoned requests must not be
//! carried out after the client's new requests, however long a link is broken or a node stands still. Whenever a client
//! attaches, at any node, the owner therefore puts up a *fence*: forwarded requests that the owner has not yet taken
//! are void, including those in a socket. Nobody waits for the fence. A forwarder that sees the fence sends the
//! unanswered requests of its remaining clients again.
//!
//! Requests taken by the owner are carried out, so a forwarder does not send them again. The owner counts the requests
//! taken in a forwarder's *session*, over all connections of the session, and reports the count with each fence. An
//! owner that has lost its memory or became the owner later does not know the count: a write may have been carried out
//! before. Repeating the write changes nothing as long as no other party writes. If others write, which an owner stores
//! before serving them, such a write fails.

use crate::action::{Action, Forwarder};
use crate::controller::Controller;
use crate::controller::cx::Cx;
use crate::controller::requests::slots::{Slot, Work, WorkStage};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::{Operation, Origin, RequestError, RequestTag};
use crate::units::{Generation, Time};
use crate::wire::{Message, Taken, TrafficClass};

/// Decision on the frame of a forwarded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Taken: hand the frame over as a request.
    Take,
    /// Sent before a fence: drop the frame without an answer.
    Void,
    /// Protocol violation: the connection is useless.
    Broken,
}

/// The connection on which this node forwards I/O to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum ForwardLink {
    /// None, and none is expected.
    Absent,
    /// Lost; requests wait for the next connection.
    Down,
    /// Open, but the owner has not reported the fate of earlier forwarded requests; requests wait.
    Opening,
    /// Up.
    Up,
}

impl ForwardLink {
    /// Returns true if there is a connection.
    pub(in crate::controller) const fn is_there(self) -> bool {
        matches!(self, Self::Opening | Self::Up)
    }
}

/// State of a forwarder at the owner.
#[derive(Clone, Copy, Debug, Default)]
struct Session {
    /// The session's id, once the session has begun.
    id: Option<u64>,
    /// True if the requests taken before are known, and the forwarder has settled the rest.
    known: bool,
    /// True while a connection of the forwarder is here.
    connected: bool,
    /// True if a session has begun on the connection.
    begun: bool,
    /// Counts fences.
    fence: u32,
    /// True if the connection is the one of the migration that brought the disk.
    fresh: bool,
    /// True if arriving requests were sent after the last fence.
    reached: bool,
    /// True if the forwarder has not been told of the last fence.
    owed: bool,
    /// Number of the last request taken.
    taken: Option<u32>,
    /// True if a request has failed.
    failed: bool,
}

/// A party that sends requests to an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Party {
    /// Clients attached here.
    Clients,
    /// Clients of another node.
    Forwarder(Forwarder),
}

/// Number of parties that may have written since the disk came here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// At most this one.
    Alone(Option<Party>),
    /// More than one from now on. The fact is being stored; nobody is served meanwhile.
    Storing,
    /// More than one.
    Shared,
}

/// State of both ends of forwarding.
#[derive(Debug)]
pub(in crate::controller) struct Forwarding {
    /// The connection on which this node forwards.
    pub(in crate::controller) link: ForwardLink,
    /// At the owner: sessions by forwarder.
    sessions: Vec<Session>,
    sharing: Sharing,
    /// Clients attached here.
    clients: u32,
    /// At a forwarder: the id of its session, and the number of the last request sent.
    session: u64,
    sent: u32,
    /// True if the owner was told of the session on the current connection.
    begun: bool,
}

impl Forwarding {
    pub(in crate::controller) const fn new() -> Self {
        Self {
            link: ForwardLink::Absent,
            sessions: Vec::new(),
            sharing: Sharing::Alone(None),
            clients: 0,
            session: 0,
            sent: 0,
            begun: false,
        }
    }

    /// Returns true while requests wait for the stored fact that several parties write.
    pub(in crate::controller) fn stores(&self) -> bool {
        self.sharing == Sharing::Storing
    }

    /// Returns true if more than one party may have written.
    pub(in crate::controller) const fn is_shared(&self) -> bool {
        !matches!(self.sharing, Sharing::Alone(_))
    }

    /// Returns the number of the next request.
    const fn next_number(&mut self) -> u32 {
        self.sent = self.sent.wrapping_add(1);
        self.sent
    }

    fn session(&mut self, Forwarder(index): Forwarder) -> &mut Session {
        let index = usize::from(index);
        if index >= self.sessions.len() {
            self.sessions.resize_with(index + 1, Session::default);
        }
        &mut self.sessions[index]
    }

    /// Notes that a request of a forwarder has failed.
    pub(in crate::controller) fn failed(&mut self) {
        for session in &mut self.sessions {
            session.failed = true;
        }
    }

    /// Notes that this node gave the disk away: earlier requests of forwarders say nothing about a later time. Further
    /// requests on their connections are answered that the disk is elsewhere.
    pub(in crate::controller) fn gave_away(&mut self) {
        for session in &mut self.sessions {
            session.known = false;
        }
    }
}

impl Forwarding {
    /// Notes that the disk comes to this node, which may begin to serve soon.
    pub(in crate::controller) fn disk_comes(&mut self, cx: &mut Cx, shared: bool) {
        self.sharing = if shared {
            Sharing::Shared
        } else {
            Sharing::Alone(None)
        };
        cx.notify(Event::SharingChanged { shared });
    }

    /// Notes that this node is now the owner, also for the clients attached throughout.
    pub(in crate::controller) fn serves_clients(&mut self, cx: &mut Cx) {
        if self.clients > 0 {
            self.asks(cx, Party::Clients);
        }
    }

    /// Notes a party before its first request.
    fn asks(&mut self, cx: &mut Cx, party: Party) {
        match self.sharing {
            Sharing::Alone(None) => self.sharing = Sharing::Alone(Some(party)),
            Sharing::Alone(Some(other)) if other != party => {
                self.sharing = Sharing::Storing;
                cx.notify(Event::SharingChanged { shared: true });
            }
            Sharing::Alone(_) | Sharing::Storing | Sharing::Shared => {}
        }
    }

    /// Puts up a fence: earlier requests of all forwarders except one are void.
    fn put_up_fence(&mut self, cx: &mut Cx, except: Option<Forwarder>) {
        cx.slots.begin_era();
        let elsewhere = cx.authority.is_elsewhere() || cx.authority.gave_away();
        if elsewhere || cx.has_bug(PlantedBug::ForgetFence) {
            return;
        }
        for (index, session) in (0u16..).zip(&mut self.sessions) {
            if except != Some(Forwarder(index)) && session.connected {
                session.fence = session.fence.wrapping_add(1);
                session.reached = false;
                session.owed = session.begun;
            }
        }
        self.tell_of_fences(cx);
    }

    /// Tells forwarders of their fences, unless the sharing is still being stored.
    fn tell_of_fences(&mut self, cx: &mut Cx) {
        if self.stores() {
            return;
        }
        let shared = self.is_shared();
        for index in 0..self.sessions.len() {
            let session = &mut self.sessions[index];
            if !std::mem::take(&mut session.owed) {
                continue;
            }
            let taken = match session.taken {
                _ if !session.known => Taken::Unknown,
                None => Taken::Nothing,
                Some(last) => Taken::Through(last),
            };
            let message = Message::Fence {
                number: session.fence,
                taken,
                shared,
                failed: session.failed,
            };
            cx.act(Action::SendForwarder {
                forwarder: Forwarder(index as u16),
                message,
            });
        }
    }

    /// Notes that this node has a connection to forward on. With `at_once` the owner is told immediately, because the
    /// owner has to report the fate of earlier requests. Otherwise the owner is told with the first forwarded request;
    /// until then this node is not a party.
    pub(in crate::controller) fn may_forward(&mut self, cx: &mut Cx, at_once: bool) {
        self.begun = false;
        if at_once {
            self.begin_forwarding(cx);
        }
    }

    fn begin_forwarding(&mut self, cx: &mut Cx) {
        if !std::mem::replace(&mut self.begun, true) {
            let session = self.session;
            cx.send(TrafficClass::Sync, Message::ForwardBegin { session });
        }
    }

    /// Sends a request to the owner.
    #[inline]
    pub(in crate::controller) fn forward(&mut self, cx: &mut Cx, tag: RequestTag) {
        let Work::Request { operation, .. } = cx.slots[tag].work else {
            return;
        };
        self.begin_forwarding(cx);
        let number = self.next_number();
        let slot = &mut cx.slots[tag];
        slot.stage = WorkStage::Forwarded { sent: true };
        slot.generation = Generation(number);
        let message = Message::Forward {
            tag,
            number,
            operation,
        };
        cx.send(TrafficClass::Sync, message);
    }

    /// Remembers that a forwarder's request has failed, because the answer may be lost. A request refused because the
    /// disk is elsewhere was never taken: the refusal is forgotten with the disk.
    #[inline]
    pub(in crate::controller) fn note_failure(
        &mut self,
        origin: Origin,
        result: Result<(), RequestError>,
    ) {
        if origin == Origin::Peer && !matches!(result, Ok(()) | Err(RequestError::NotServing)) {
            self.failed();
        }
    }
}

impl Controller {
    /// Restores the state of a starting process: `shared` as last reported by [`Event::SharingChanged`], and a new id
    /// for this node's forwarding session.
    pub fn resume_forwarding(&mut self, shared: bool, session: u64) {
        self.forwarding.session = session;
        self.forwarding.sharing = if shared {
            Sharing::Shared
        } else {
            Sharing::Alone(None)
        };
    }

    /// Notes that a client has attached to this node. The requests of clients known to be gone must have been given up
    /// before ([`Self::handle_client_left`]), and unread requests of such clients must never be handed over.
    pub fn handle_client_attached(&mut self, now: Time) {
        self.cx.now = now;
        self.forwarding.clients += 1;
        if self.forwarding.link.is_there() && !self.cx.authority.may_serve() {
            self.cx.send(TrafficClass::Sync, Message::ClientAttached);
        }
        if self.cx.authority.may_serve() {
            self.forwarding.asks(&mut self.cx, Party::Clients);
        }
        self.forwarding.put_up_fence(&mut self.cx, None);
        self.run_ready();
    }

    /// Notes that a client of this node is gone and hears no more answers. The client's requests, `tags`, are answered
    /// without being carried out, as far as still possible.
    pub fn handle_client_left(&mut self, now: Time, tags: impl IntoIterator<Item = RequestTag>) {
        self.forwarding.clients = self.forwarding.clients.saturating_sub(1);
        self.handle_requests_given_up(now, tags);
    }

    /// Gives up requests of this node's clients whose answers nobody hears any more. The requests are answered without
    /// being carried out, as far as still possible.
    pub fn handle_requests_given_up(
        &mut self,
        now: Time,
        tags: impl IntoIterator<Item = RequestTag>,
    ) {
        self.cx.now = now;
        let mut holds = false;
        for tag in tags {
            let Some(slot) = self.cx.slots.get_mut(tag).filter(|slot| slot.is_request()) else {
                continue;
            };
            slot.abandoned = true;
            holds |= slot.stage == WorkStage::Held;
            // An owner that has given the disk to this node carries out no more forwarded requests.
            let is_hopeless =
                self.forwarding.link != ForwardLink::Up || self.cx.authority.may_serve();
            if slot.is_forwarded() && is_hopeless {
                self.give_up(tag);
            }
        }
        if holds {
            self.release_held();
        }
        self.wake_for_missing();
        self.run_ready();
    }

    /// Ends a request whose client is gone.
    pub(in crate::controller) fn give_up(&mut self, tag: RequestTag) {
        self.end_forwarded(tag, Err(RequestError::NotServing));
    }

    /// Ends forwarded requests of clients that are gone.
    pub(in crate::controller) fn give_up_abandoned(&mut self) {
        let abandoned = |slot: &Slot| slot.abandoned && slot.is_forwarded();
        for tag in self.cx.slots.select(abandoned) {
            self.give_up(tag);
        }
    }

    fn end_forwarded(&mut self, tag: RequestTag, result: Result<(), RequestError>) {
        self.cx.slots[tag].stage = WorkStage::Done;
        self.cx.slots[tag].result = result;
        self.finish(tag);
    }

    /// Notes that the sharing by several parties is durable.
    pub fn handle_sharing_stored(&mut self, now: Time) {
        self.cx.now = now;
        if self.forwarding.stores() {
            self.forwarding.sharing = Sharing::Shared;
            self.forwarding.tell_of_fences(&mut self.cx);
            self.release_held();
        }
        self.run_ready();
    }

    /// Notes a new connection of this forwarder. From now on frames of the forwarder's older connections must not reach
    /// this controller; their requests are carried out. `fresh`: the connection belongs to the migration that brings
    /// the disk, and nothing was forwarded on it before.
    pub fn handle_forwarder_up(&mut self, now: Time, forwarder: Forwarder, fresh: bool) {
        self.cx.now = now;
        // A client already attached here may have left the other node with requests unanswered.
        let alone = self.forwarding.clients == 0;
        let session = self.forwarding.session(forwarder);
        session.connected = true;
        session.begun = false;
        session.owed = false;
        (session.fresh, session.reached) = (fresh, fresh && alone);
        session.fence = session.fence.wrapping_add(1);
    }

    /// Notes that this forwarder's connection ended.
    pub fn handle_forwarder_lost(&mut self, now: Time, forwarder: Forwarder) {
        self.cx.now = now;
        let session = self.forwarding.session(forwarder);
        (session.connected, session.begun) = (false, false);
        (session.reached, session.owed) = (false, false);
    }

    /// Handles [`Message::ForwardBegin`], [`Message::ClientAttached`] or [`Message::FenceReached`] from a forwarder;
    /// other messages are ignored. Before `ClientAttached` the body must find its own departed clients, as before
    /// [`Self::handle_client_attached`].
    pub fn handle_forwarder_message(&mut self, now: Time, forwarder: Forwarder, message: Message) {
        self.cx.now = now;
        match message {
            Message::ForwardBegin { session: id } => {
                let session = self.forwarding.session(forwarder);
                if session.id.replace(id) != Some(id) {
                    (session.taken, session.failed) = (None, false);
                    session.known = false;
                }
                // Before the disk was given away its last owner had nothing to forward.
                session.known |= session.fresh;
                session.begun = true;
                self.forwarding
                    .asks(&mut self.cx, Party::Forwarder(forwarder));
                let stores = self.forwarding.stores();
                let session = self.forwarding.session(forwarder);
                if !session.reached || stores {
                    (session.reached, session.owed) = (false, true);
                    self.forwarding.tell_of_fences(&mut self.cx);
                }
            }
            Message::ClientAttached => self.forwarding.put_up_fence(&mut self.cx, Some(forwarder)),
            Message::FenceReached { number } => {
                let session = self.forwarding.session(forwarder);
                if session.begun && !session.owed && number == session.fence {
                    (session.reached, session.known) = (true, true);
                }
            }
            _ => {}
        }
        self.run_ready();
    }

    /// Decides on a forwarded request that has arrived whole.
    #[inline]
    pub fn admit_forwarded(&mut self, forwarder: Forwarder, number: u32) -> Admission {
        let session = self.forwarding.session(forwarder);
        if !session.begun || session.taken.is_some_and(|taken| is_through(taken, number)) {
            return Admission::Broken;
        }
        if !session.reached {
            return Admission::Void;
        }
        session.taken = Some(number);
        Admission::Take
    }

    /// Returns the payload length in bytes of a successful [`Message::ForwardReply`] with this tag and number, or
    /// `None` if no reply is expected and the frame breaks the protocol.
    pub fn forward_reply_length(&self, tag: RequestTag, number: u32) -> Option<u32> {
        let slot = self
            .cx
            .slots
            .get(tag)
            .filter(|slot| slot.awaits_reply(number))?;
        match slot.work {
            Work::Request {
                operation: Operation::Read(extent),
                ..
            } => Some(extent.bytes() as u32),
            Work::Request { .. } => Some(0),
            _ => None,
        }
    }

    /// Handles the owner's fence: requests that the owner has not taken are sent again.
    pub(in crate::controller) fn fence_seen(
        &mut self,
        number: u32,
        taken: Taken,
        (shared, failed): (bool, bool),
    ) {
        // On a connection in use the owner answers the taken requests; on a new connection the taken requests are
        // complete.
        let answers = self.forwarding.link != ForwardLink::Opening;
        if self.forwarding.link.is_there() {
            self.forwarding.link = ForwardLink::Up;
            self.cx
                .send(TrafficClass::Sync, Message::FenceReached { number });
        } else if !self.cx.authority.may_serve() {
            return;
        }
        for tag in self.cx.slots.select(Slot::is_forwarded) {
            let slot = &self.cx.slots[tag];
            let sent = slot.stage == WorkStage::Forwarded { sent: true };
            let (is_write, abandoned) = (slot.is_write(), slot.abandoned);
            let is_taken =
                matches!(taken, Taken::Through(last) if is_through(last, slot.generation.0));
            // Requests sent on a connection in use after its first fence were not taken before this fence.
            let is_unknown = taken == Taken::Unknown && !answers;
            let repeats = self.cx.has_bug(PlantedBug::RepeatForwarded);
            if answers && sent && is_taken {
                continue;
            }
            if abandoned {
                self.give_up(tag);
            } else if sent && is_write && is_taken && !repeats {
                let result = if failed {
                    Err(RequestError::Uncertain)
                } else {
                    Ok(())
                };
                self.end_forwarded(tag, result);
            } else if sent && is_write && is_unknown && shared && !repeats {
                self.end_forwarded(tag, Err(RequestError::Uncertain));
            } else {
                self.outgoing.start_over(&mut self.cx, tag);
            }
        }
        self.release_held();
    }

    /// Carries out the requests forwarded to the previous owner, because this node has become the owner and hears
    /// nothing more from the previous one. A write that may have been carried out there fails if others have written
    /// since.
    pub(in crate::controller) fn take_back_forwarded(&mut self) {
        let shared = self.forwarding.is_shared();
        for tag in self.cx.slots.select(Slot::is_forwarded) {
            let slot = &self.cx.slots[tag];
            if slot.abandoned {
                self.give_up(tag);
            } else if shared
                && slot.stage == (WorkStage::Forwarded { sent: true })
                && slot.is_write()
            {
                self.end_forwarded(tag, Err(RequestError::Uncertain));
            } else {
                self.outgoing.start_over(&mut self.cx, tag);
            }
        }
    }
}

/// Returns true if the request `number` was sent no later than the request `last`.
const fn is_through(last: u32, number: u32) -> bool {
    last.wrapping_sub(number) < 1 << 31
}
