//! The bodies' part for forwarded requests: successive connections, clients coming and going, and the stored sharing
//! state.

use godwit_core::Admission;
use godwit_core::action::Forwarder;
use godwit_core::request::{Operation, Origin, Request};
use godwit_core::wire::{Message, TrafficClass};

use crate::run::coverage::Reached;
use crate::world::node::Holder;
use crate::world::wires::network::Frame;
use crate::world::{MICROSECOND, MILLISECOND, World, name};

/// The only forwarder of a node: there are two nodes.
const PEER: Forwarder = Forwarder(0);

/// Returns true for a forwarder's message.
pub(crate) fn is_forwarders(message: &Message) -> bool {
    matches!(
        message,
        Message::Forward { .. }
            | Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. }
    )
}

impl World {
    /// Returns true if a forwarder's next frame on this session may be taken. Requests of an older session must be done
    /// first.
    pub(crate) fn follows(&mut self, node: usize, session: usize) -> bool {
        let it = &self.nodes[node];
        if it.sessions.served.is_some_and(|served| served >= session) {
            return true;
        }
        if it.buffers.has_of_older(session) {
            return false;
        }
        self.serve_session(node, session, false);
        true
    }

    /// Makes this the session on which the other node forwards.
    pub(crate) fn serve_session(&mut self, node: usize, session: usize, fresh: bool) {
        let it = &mut self.nodes[node];
        it.sessions.served = Some(session);
        let now = it.clock.local(self.now);
        // The call causes no actions, so it is safe inside another call.
        if let Some(controller) = &mut it.controller {
            controller.handle_forwarder_up(now, PEER, fresh);
        }
    }

    /// Ends forwarding on a lost or no longer used session.
    pub(crate) fn stop_serving_session(&mut self, node: usize, session: usize) {
        let it = &mut self.nodes[node];
        let served = &mut it.sessions.served;
        if served.take_if(|served| *served == session).is_some() {
            let now = it.clock.local(self.now);
            if let Some(controller) = &mut it.controller {
                controller.handle_forwarder_lost(now, PEER);
            }
        }
    }

    /// Delivers a frame of the forwarding node.
    pub(crate) fn deliver_forwarded(&mut self, session: usize, to: usize, frame: Frame) {
        if self.nodes[to].sessions.served != Some(session) {
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
            self.with(to, |c, now| c.handle_forwarder_message(now, PEER, message));
            if message == Message::ClientAttached && self.nodes[to].serves() {
                self.give_up_what_was_left();
            }
            return;
        };
        let controller = self.nodes[to].controller.as_mut();
        match controller.map(|controller| controller.admit_forwarded(PEER, number)) {
            Some(Admission::Take) => {}
            Some(Admission::Void) => return self.reached(Reached::ForwardVoid),
            Some(Admission::Broken) => {
                return self.fail("a forwarder keeps to the protocol", || {
                    format!("{message:?} at {}", name(to))
                });
            }
            None => return,
        }
        // A write of zeroes cannot be identified.
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
        let Some(tag) = self.nodes[to].buffers.take(holder, data) else {
            return;
        };
        let request = Request {
            tag,
            origin: Origin::Peer,
            operation,
        };
        self.with(to, |c, now| c.handle_request(now, request));
    }

    /// Sends an owner's message to the forwarder.
    pub(crate) fn send_forwarder(&mut self, node: usize, message: Message) {
        if matches!(message, Message::Fence { .. }) {
            self.reached(Reached::Fence);
        }
        if let Some(session) = self.nodes[node].sessions.served {
            self.transmit(session, node, TrafficClass::Sync, message, None);
        }
    }

    /// Connects the guest to a node.
    pub(crate) fn attach(&mut self, node: usize) {
        self.guest.present[node] = true;
        self.note(|| format!("{}  the guest attaches", name(node)));
        self.look_for_hang_ups(node);
        self.with(node, |c, now| c.handle_client_attached(now));
        // A node without ownership tells the owner once connected, and lets no request proceed before.
        if self.nodes[node].serves() {
            self.give_up_what_was_left();
        }
    }

    /// Records the fate of the guest's abandoned writes once the owner knows that the guest has attached: they have
    /// taken effect by now, or never will.
    fn give_up_what_was_left(&mut self) {
        for write in std::mem::take(&mut self.guest.left) {
            self.history.given_up(write, self.now);
        }
    }

    /// Moves the guest to the other node, without the outstanding answers.
    pub(crate) fn desert(&mut self) {
        let node = self.guest.attached;
        self.reached(Reached::Deserted);
        self.note(|| format!("{}  the guest leaves without its answers", name(node)));
        let abandoned = self.leave(node, MICROSECOND);
        self.guest.left.extend(abandoned);
        self.nodes[node].buffers.desert();
        let notices = self.random.link.magnitude(MICROSECOND, 40 * MILLISECOND);
        self.schedule_own(node, notices, move |world| world.look_for_hang_ups(node));
        self.guest.present[node] = false;
        self.guest.attached = 1 - node;
        self.attach(1 - node);
    }

    /// Tells a node's controller about clients that have hung up.
    pub(crate) fn look_for_hang_ups(&mut self, node: usize) {
        let tags = self.nodes[node].buffers.hang_ups();
        if !tags.is_empty() {
            self.with(node, |c, now| c.handle_client_left(now, tags));
        }
    }

    /// Stores the sharing state: true if more than one party may have written.
    pub(crate) fn store_sharing(&mut self, node: usize, shared: bool) {
        if shared {
            self.guest.shares = true;
            self.reached(Reached::Shared);
        }
        let store = &mut self.nodes[node].store;
        store.storing_shared = Some(shared);
        let delay = store.latency(&mut self.random.store);
        self.schedule_own(node, delay, move |world| world.sharing_stored(node));
    }

    /// Completes the store of the sharing state.
    pub(crate) fn sharing_stored(&mut self, node: usize) {
        let store = &mut self.nodes[node].store;
        if let Some(shared) = store.storing_shared.take() {
            store.shared = shared;
            self.with(node, |c, now| c.handle_sharing_stored(now));
        }
    }
}
