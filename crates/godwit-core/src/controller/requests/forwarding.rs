//! Requests of clients that stayed: sent to the owner exactly once, and never after their client left.
//!
//! A client may leave a node with requests unanswered, and go on at another. What it left must not be
//! done after what it asks for there, however long a link is broken or a node stands still meanwhile.
//! So whenever a client attaches, wherever that is, the owner puts up a *fence*: what it has not yet
//! taken of what other nodes forward is void, also what lies in a socket. Nobody waits for that. A
//! forwarder that sees the fence sends again what is unanswered of the clients that it still has.
//!
//! What was taken is done, so it is not sent again. The owner counts what it takes of a forwarder's
//! *session*, over all connections of that session, and says how far that is with each fence. Where it
//! cannot know, because it has lost its memory or became the owner later, a write may have been done
//! before. To do it again changes nothing as long as nobody else writes; where others do, which an owner
//! stores before it serves them, such a write fails.

use crate::action::{Action, Forwarder};
use crate::controller::Controller;
use crate::controller::requests::slots::{Slot, Work, WorkStage};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::{Operation, Origin, RequestError, RequestTag};
use crate::units::{Generation, Time};
use crate::wire::{Message, Taken, TrafficClass};

/// Whether the frame of a forwarded request is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is: hand it over as a request.
    Take,
    /// It was sent before a fence: drop it without an answer.
    Void,
    /// No forwarder that keeps to the protocol sends it: the connection is of no use.
    Broken,
}

/// The connection on which this node forwards I/O to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum ForwardLink {
    /// None, and none is expected.
    Absent,
    /// Lost; requests wait for it.
    Down,
    /// There, but the owner has not said what it did of what was forwarded before; requests wait.
    Opening,
    /// Up.
    Up,
}

impl ForwardLink {
    /// Whether there is a connection.
    pub(in crate::controller) const fn is_there(self) -> bool {
        matches!(self, Self::Opening | Self::Up)
    }
}

/// What a node that forwards here has sent.
#[derive(Clone, Copy, Debug, Default)]
struct Session {
    /// Its name, once it has begun.
    id: Option<u64>,
    /// What was taken of it before is known, and the forwarder has settled what was not.
    known: bool,
    /// A connection of the forwarder is here.
    connected: bool,
    /// A session has begun on it.
    begun: bool,
    /// Counts fences.
    fence: u32,
    /// It is the connection of the migration that brought the disk.
    fresh: bool,
    /// What arrives now was sent after the last fence.
    reached: bool,
    /// The forwarder has not been told of the last fence.
    owed: bool,
    /// The last request that was taken.
    taken: Option<u32>,
    /// A request has failed.
    failed: bool,
}

/// Who asks an owner for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Party {
    /// Clients that are attached here.
    Clients,
    /// Clients of that node.
    Forwarder(Forwarder),
}

/// Whether more than one party may have written since the disk came here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// At most this one.
    Alone(Option<Party>),
    /// More than one from now on, which is being stored; nobody is served meanwhile.
    Storing,
    /// More than one.
    Shared,
}

/// Both ends of forwarding.
#[derive(Debug)]
pub(in crate::controller) struct Forwarding {
    /// At the owner: sessions by forwarder.
    sessions: Vec<Session>,
    sharing: Sharing,
    /// Clients that are attached here.
    clients: u32,
    /// At a forwarder: the name of its session, and the number of the last request that it sent.
    session: u64,
    sent: u32,
    /// The owner was told of the session on the connection that is there.
    begun: bool,
}

impl Forwarding {
    pub(in crate::controller) const fn new() -> Self {
        Self {
            sessions: Vec::new(),
            sharing: Sharing::Alone(None),
            clients: 0,
            session: 0,
            sent: 0,
            begun: false,
        }
    }

    /// Whether requests wait until it is stored that more than one party writes.
    pub(in crate::controller) fn stores(&self) -> bool {
        self.sharing == Sharing::Storing
    }

    /// Whether more than one party may have written.
    pub(in crate::controller) const fn is_shared(&self) -> bool {
        !matches!(self.sharing, Sharing::Alone(_))
    }

    /// The number of the next request that is sent.
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

    /// A request that a forwarder sent has failed.
    pub(in crate::controller) fn failed(&mut self) {
        for session in &mut self.sessions {
            session.failed = true;
        }
    }

    /// This node gave the disk away: what forwarders sent before says nothing about a later time. What
    /// still comes by their connections is told that the disk is elsewhere.
    pub(in crate::controller) fn gave_away(&mut self) {
        for session in &mut self.sessions {
            session.known = false;
        }
    }
}

impl Controller {
    /// What a process that starts knows: whether more than one party may have written to the disk since
    /// it came here, as [`Event::SharingChanged`] last said, and a name for what it forwards, never used
    /// before.
    pub fn resume_forwarding(&mut self, shared: bool, session: u64) {
        self.forwarding.session = session;
        self.forwarding.sharing = if shared {
            Sharing::Shared
        } else {
            Sharing::Alone(None)
        };
    }

    /// A client has attached to this node. Requests of clients that are gone, as far as the body can
    /// tell, must have been given up before ([`Self::handle_client_left`]), and what those clients sent and
    /// was not read must never be handed over.
    pub fn handle_client_attached(&mut self, now: Time) {
        self.now = now;
        self.forwarding.clients += 1;
        if self.forward_link.is_there() && !self.authority.may_serve() {
            self.send(TrafficClass::Sync, Message::ClientAttached);
        }
        if self.authority.may_serve() {
            self.asks(Party::Clients);
        }
        self.put_up_fence(None);
        self.run_ready();
    }

    /// A client of this node is gone and hears no answer any more. Its requests, `tags`, are answered
    /// without being done, as far as that is still possible.
    pub fn handle_client_left(&mut self, now: Time, tags: impl IntoIterator<Item = RequestTag>) {
        self.forwarding.clients = self.forwarding.clients.saturating_sub(1);
        self.handle_requests_given_up(now, tags);
    }

    /// Nobody hears the answers to these requests of this node's clients any more: they are answered
    /// without being done, as far as that is still possible.
    pub fn handle_requests_given_up(
        &mut self,
        now: Time,
        tags: impl IntoIterator<Item = RequestTag>,
    ) {
        self.now = now;
        let mut holds = false;
        for tag in tags {
            let Some(slot) = self.slots.get_mut(tag).filter(|slot| slot.is_request()) else {
                continue;
            };
            slot.abandoned = true;
            holds |= slot.stage == WorkStage::Held;
            // An owner that has given the disk to this node does nothing more of what it was sent.
            let is_hopeless = self.forward_link != ForwardLink::Up || self.authority.may_serve();
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

    /// Ends the requests of clients that are gone which the owner was sent, or was to be sent.
    pub(in crate::controller) fn give_up_abandoned(&mut self) {
        let abandoned = |slot: &Slot| slot.abandoned && slot.is_forwarded();
        for tag in self.slots.select(abandoned) {
            self.give_up(tag);
        }
    }

    fn end_forwarded(&mut self, tag: RequestTag, result: Result<(), RequestError>) {
        self.slots[tag].stage = WorkStage::Done;
        self.slots[tag].result = result;
        self.finish(tag);
    }

    /// That more than one party writes is durable.
    pub fn handle_sharing_stored(&mut self, now: Time) {
        self.now = now;
        if self.forwarding.stores() {
            self.forwarding.sharing = Sharing::Shared;
            self.tell_of_fences();
            self.release_held();
        }
        self.run_ready();
    }

    /// The disk comes to this node, which may begin to serve it soon.
    pub(in crate::controller) fn disk_comes(&mut self, shared: bool) {
        self.forwarding.sharing = if shared {
            Sharing::Shared
        } else {
            Sharing::Alone(None)
        };
        self.notify(Event::SharingChanged { shared });
    }

    /// This node is the owner now, also for the clients that it has had all the time.
    pub(in crate::controller) fn serves_clients(&mut self) {
        if self.forwarding.clients > 0 {
            self.asks(Party::Clients);
        }
    }

    /// Somebody is going to ask for something.
    fn asks(&mut self, party: Party) {
        match self.forwarding.sharing {
            Sharing::Alone(None) => self.forwarding.sharing = Sharing::Alone(Some(party)),
            Sharing::Alone(Some(other)) if other != party => {
                self.forwarding.sharing = Sharing::Storing;
                self.notify(Event::SharingChanged { shared: true });
            }
            Sharing::Alone(_) | Sharing::Storing | Sharing::Shared => {}
        }
    }

    /// A connection of this forwarder is here, and frames of its older ones must not reach this
    /// controller any more; what they brought is done. `fresh`: it is the one of the migration that
    /// brings the disk, on which nothing was forwarded before.
    pub fn handle_forwarder_up(&mut self, now: Time, forwarder: Forwarder, fresh: bool) {
        self.now = now;
        // Who is attached here already may have left the other node without its answers.
        let alone = self.forwarding.clients == 0;
        let session = self.forwarding.session(forwarder);
        session.connected = true;
        session.begun = false;
        session.owed = false;
        (session.fresh, session.reached) = (fresh, fresh && alone);
        session.fence = session.fence.wrapping_add(1);
    }

    /// The connection of this forwarder ended.
    pub fn handle_forwarder_lost(&mut self, now: Time, forwarder: Forwarder) {
        self.now = now;
        let session = self.forwarding.session(forwarder);
        (session.connected, session.begun) = (false, false);
        (session.reached, session.owed) = (false, false);
    }

    /// A forwarder sent [`Message::ForwardBegin`], [`Message::ClientAttached`] or
    /// [`Message::FenceReached`]; others are ignored. Before the second the body has to look which of
    /// its own clients are gone, as before [`Self::handle_client_attached`].
    pub fn handle_forwarder_message(&mut self, now: Time, forwarder: Forwarder, message: Message) {
        self.now = now;
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
                self.asks(Party::Forwarder(forwarder));
                let stores = self.forwarding.stores();
                let session = self.forwarding.session(forwarder);
                if !session.reached || stores {
                    (session.reached, session.owed) = (false, true);
                    self.tell_of_fences();
                }
            }
            Message::ClientAttached => self.put_up_fence(Some(forwarder)),
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

    /// Whether a forwarded request that has arrived whole is taken.
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

    /// What forwarders have sent is void from here on, but for one of them.
    fn put_up_fence(&mut self, except: Option<Forwarder>) {
        self.slots.begin_era();
        let elsewhere = self.authority.is_elsewhere() || self.authority.gave_away();
        if elsewhere || self.has_bug(PlantedBug::ForgetFence) {
            return;
        }
        for (index, session) in (0u16..).zip(&mut self.forwarding.sessions) {
            if except != Some(Forwarder(index)) && session.connected {
                session.fence = session.fence.wrapping_add(1);
                session.reached = false;
                session.owed = session.begun;
            }
        }
        self.tell_of_fences();
    }

    /// Tells forwarders of their fences, unless it is still to be stored that others write.
    fn tell_of_fences(&mut self) {
        if self.forwarding.stores() {
            return;
        }
        let shared = self.forwarding.is_shared();
        for index in 0..self.forwarding.sessions.len() {
            let session = &mut self.forwarding.sessions[index];
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
            self.act(Action::SendForwarder {
                forwarder: Forwarder(index as u16),
                message,
            });
        }
    }

    /// This node has a connection to forward on. The owner is told at once where it has to say what it
    /// did of what was sent before, and else when there is something to forward: until then this node is
    /// no party.
    pub(in crate::controller) fn may_forward(&mut self, at_once: bool) {
        self.forwarding.begun = false;
        if at_once {
            self.begin_forwarding();
        }
    }

    fn begin_forwarding(&mut self) {
        if !std::mem::replace(&mut self.forwarding.begun, true) {
            let session = self.forwarding.session;
            self.send(TrafficClass::Sync, Message::ForwardBegin { session });
        }
    }

    /// Sends a request to the owner.
    #[inline]
    pub(in crate::controller) fn forward(&mut self, tag: RequestTag) {
        let Work::Request { operation, .. } = self.slots[tag].work else {
            return;
        };
        self.begin_forwarding();
        let number = self.forwarding.next_number();
        let slot = &mut self.slots[tag];
        slot.stage = WorkStage::Forwarded { sent: true };
        slot.generation = Generation(number);
        let message = Message::Forward {
            tag,
            number,
            operation,
        };
        self.send(TrafficClass::Sync, message);
    }

    /// The bytes of payload that a [`Message::ForwardReply`] with this tag and number carries when the request
    /// succeeded; `None` when no reply is expected (then the frame breaks the protocol).
    pub fn forward_reply_length(&self, tag: RequestTag, number: u32) -> Option<u32> {
        let slot = self
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

    /// The owner has put up a fence: what it has not taken is sent again.
    pub(in crate::controller) fn fence_seen(
        &mut self,
        number: u32,
        taken: Taken,
        (shared, failed): (bool, bool),
    ) {
        // On a connection that is in use what was taken is answered; on a new one what was taken is done.
        let answers = self.forward_link != ForwardLink::Opening;
        if self.forward_link.is_there() {
            self.forward_link = ForwardLink::Up;
            self.send(TrafficClass::Sync, Message::FenceReached { number });
        } else if !self.authority.may_serve() {
            return;
        }
        for tag in self.slots.select(Slot::is_forwarded) {
            let slot = &self.slots[tag];
            let sent = slot.stage == WorkStage::Forwarded { sent: true };
            let (is_write, abandoned) = (slot.is_write(), slot.abandoned);
            let is_taken =
                matches!(taken, Taken::Through(last) if is_through(last, slot.generation.0));
            // What was sent on a connection in use after its first fence was not taken before that.
            let is_unknown = taken == Taken::Unknown && !answers;
            let repeats = self.has_bug(PlantedBug::RepeatForwarded);
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
                self.start_over(tag);
            }
        }
        self.release_held();
    }

    /// This node has become the owner and hears nothing more from the one before: what that had been
    /// sent is done here, unless it may have been done there and others have written since.
    pub(in crate::controller) fn take_back_forwarded(&mut self) {
        let shared = self.forwarding.is_shared();
        for tag in self.slots.select(Slot::is_forwarded) {
            let slot = &self.slots[tag];
            if slot.abandoned {
                self.give_up(tag);
            } else if shared
                && slot.stage == (WorkStage::Forwarded { sent: true })
                && slot.is_write()
            {
                self.end_forwarded(tag, Err(RequestError::Uncertain));
            } else {
                self.start_over(tag);
            }
        }
    }

    /// Remembers that a request of a forwarder has failed, whose answer may be lost. One that was not
    /// served because the disk is elsewhere is none of what was taken: that is forgotten with the disk.
    #[inline]
    pub(in crate::controller) fn note_failure(
        &mut self,
        origin: Origin,
        result: Result<(), RequestError>,
    ) {
        if origin == Origin::Peer && !matches!(result, Ok(()) | Err(RequestError::NotServing)) {
            self.forwarding.failed();
        }
    }
}

/// Whether a request of this number was sent before or as the one of number `last`.
const fn is_through(last: u32, number: u32) -> bool {
    last.wrapping_sub(number) < 1 << 31
}
