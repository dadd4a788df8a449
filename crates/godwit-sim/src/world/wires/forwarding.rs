//! What a body does for requests that are forwarded: connections that follow each other, clients that
//! come and go, and what is stored of who writes.

use godwit_core::Admission;
use godwit_core::action::Forwarder;
use godwit_core::request::{Operation, Origin, Request};
use godwit_core::wire::{Message, TrafficClass};

use crate::run::coverage::Reached;
use crate::world::MICROSECOND;
use crate::world::MILLISECOND;
use crate::world::Occurrence;
use crate::world::World;
use crate::world::name;
use crate::world::node::Holder;
use crate::world::wires::network::Frame;

/// There are two nodes, so each has one that forwards to it.
const PEER: Forwarder = Forwarder(0);

/// Whether a frame comes from a node that forwards.
pub(in crate::world) fn is_forwarders(message: &Message) -> bool {
    matches!(
        message,
        Message::Forward { .. }
            | Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. }
    )
}

impl World {
    /// Whether a forwarder's next frame on this session may be taken from its connection: what came by
    /// an older one has to be done first.
    pub(in crate::world) fn follows(&mut self, node: usize, session: usize) -> bool {
        if self.nodes[node]
            .served
            .is_some_and(|served| served >= session)
        {
            return true;
        }
        let older = |holder: &Holder| matches!(holder, Holder::Peer { session: other, .. } if *other != session);
        if self.nodes[node].holders.iter().any(older) {
            return false;
        }
        self.serve_session(node, session, false);
        true
    }

    /// The other node forwards on this session from here on.
    pub(in crate::world) fn serve_session(&mut self, node: usize, session: usize, fresh: bool) {
        let it = &mut self.nodes[node];
        it.served = Some(session);
        let now = it.clock.local(self.now);
        // Nothing has to be done about it, so it may happen in the middle of a call.
        if let Some(controller) = &mut it.controller {
            controller.handle_forwarder_up(now, PEER, fresh);
        }
    }

    /// The session on which the other node forwards is lost, or is not used for that.
    pub(in crate::world) fn stop_serving_session(&mut self, node: usize, session: usize) {
        let it = &mut self.nodes[node];
        if it.served.take_if(|served| *served == session).is_some() {
            let now = it.clock.local(self.now);
            if let Some(controller) = &mut it.controller {
                controller.handle_forwarder_lost(now, PEER);
            }
        }
    }

    /// A frame of the other node, which forwards, has arrived.
    pub(in crate::world) fn deliver_forwarded(&mut self, session: usize, to: usize, frame: Frame) {
        if self.nodes[to].served != Some(session) {
            return;
        }
        let Frame { message, data, .. } = frame;
        let Message::Forward {
            tag,
            number,
            operation,
        } = message
        else {
            if message == Message::ClientAttached {
                self.look_for_hang_ups(to);
            }
            self.with(to, |controller, now| {
                controller.handle_forwarder_message(now, PEER, message)
            });
            if message == Message::ClientAttached && self.nodes[to].serves() {
                self.give_up_what_was_left();
            }
            return;
        };
        let admission = self.nodes[to]
            .controller
            .as_mut()
            .map(|controller| controller.admit_forwarded(PEER, number));
        match admission {
            Some(Admission::Take) => {}
            Some(Admission::Void) => return self.reached(Reached::ForwardVoid),
            Some(Admission::Broken) => {
                return self.fail("a forwarder keeps to the protocol", || {
                    format!("{message:?} at {}", name(to))
                });
            }
            None => return,
        }
        // Of a write that zeroes nobody can tell which it is.
        let write = data.as_ref().and_then(|data| data.first().copied());
        if let Some(write) = write
            && self.nodes[to].done.contains(&write)
        {
            return self.fail("what was forwarded is done once", || {
                format!("#{write} at {}", name(to))
            });
        }
        let holder = Holder::Peer {
            write,
            session,
            theirs: tag,
            number,
            read: matches!(operation, Operation::Read(_)),
        };
        let Some(tag) = self.nodes[to].take_tag(holder, data) else {
            return;
        };
        let request = Request {
            tag,
            origin: Origin::Peer,
            operation,
        };
        self.with(to, |controller, now| {
            controller.handle_request(now, request)
        });
    }

    /// What the owner says to a node that forwards.
    pub(in crate::world) fn send_forwarder(&mut self, node: usize, message: Message) {
        if matches!(message, Message::Fence { .. }) {
            self.reached(Reached::Fence);
        }
        if let Some(session) = self.nodes[node].served {
            self.transmit(session, node, TrafficClass::Sync, message, None);
        }
    }

    /// The guest connects to a node.
    pub(in crate::world) fn attach(&mut self, node: usize) {
        self.guest.present[node] = true;
        self.note(|| format!("{}  the guest attaches", name(node)));
        self.look_for_hang_ups(node);
        self.with(node, |controller, now| {
            controller.handle_client_attached(now)
        });
        // Another node tells the owner, as soon as there is a way to it, and lets nobody do anything before.
        if self.nodes[node].serves() {
            self.give_up_what_was_left();
        }
    }

    /// The owner knows that the guest has attached somewhere: what the guest left unanswered has happened by now, or
    /// never will.
    fn give_up_what_was_left(&mut self) {
        for write in std::mem::take(&mut self.guest.left) {
            self.history.given_up(write, self.now);
        }
    }

    /// The guest leaves a node, whatever it waits for there, and goes on at the other.
    pub(in crate::world) fn desert(&mut self) {
        let node = self.guest.attached;
        self.reached(Reached::Deserted);
        self.note(|| format!("{}  the guest leaves without its answers", name(node)));
        self.leave(node);
        for holder in &mut self.nodes[node].holders {
            if matches!(holder, Holder::Client(_)) {
                *holder = Holder::Gone { told: false };
            }
        }
        let notices = self.link_random.magnitude(MICROSECOND, 40 * MILLISECOND);
        let incarnation = self.nodes[node].incarnation;
        self.schedule(notices, Occurrence::HangUpSeen { node, incarnation });
        self.guest.present[node] = false;
        self.guest.attached = 1 - node;
        self.attach(1 - node);
    }

    /// A node looks whether clients have hung up, and tells its controller of those that have.
    pub(in crate::world) fn look_for_hang_ups(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let mut tags = Vec::new();
        for (tag, holder) in (0u32..).zip(&mut it.holders) {
            if let Holder::Gone { told: told @ false } = holder {
                *told = true;
                tags.push(godwit_core::request::RequestTag(tag));
            }
        }
        if !tags.is_empty() {
            self.with(node, |controller, now| {
                controller.handle_client_left(now, tags)
            });
        }
    }

    /// Stores whether more than one party may have written.
    pub(in crate::world) fn store_sharing(&mut self, node: usize, shared: bool) {
        if shared {
            self.guest.shares = true;
            self.reached(Reached::Shared);
        }
        let it = &mut self.nodes[node];
        it.storing_shared = Some(shared);
        let incarnation = it.incarnation;
        let delay = self
            .store_random
            .between(20 * MICROSECOND, self.plan.store + 20 * MICROSECOND + 1);
        self.schedule(delay, Occurrence::SharingStored { node, incarnation });
    }

    /// That is stored now.
    pub(in crate::world) fn sharing_stored(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        if let Some(shared) = it.storing_shared.take() {
            it.shared = shared;
            self.with(node, |controller, now| {
                controller.handle_sharing_stored(now)
            });
        }
    }
}
