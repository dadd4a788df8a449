//! The connections that carry clients' requests to the disk's owner: those of this node's clients, and those of other
//! nodes' clients while this node owns the disk.

use godwit_core::action::Forwarder;
use godwit_core::authority::Ownership;
use godwit_core::wire::TrafficClass;

use crate::engine::config::EngineEvent;
use crate::engine::connections::streams::PeerStream;
use crate::engine::connections::{ConnectionKey, Connections, Uses};
use crate::engine::run::Engine;
use crate::engine::slots::Slots;

/// Most forwarding nodes served at once.
pub(in crate::engine) const MOST_SERVED: usize = 64;

/// The work that is due at the end of the turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    #[default]
    Nothing,
    /// This node may have to forward now.
    Ask,
    /// The connection leads to a node that is no longer the owner.
    Reconnect,
}

/// The way of this node's clients to the disk's owner.
#[derive(Default)]
pub(in crate::engine) struct Forwarding {
    connection: Option<ConnectionKey>,
    due: Due,
    /// True after a request to dial, until the engine's owner answers.
    asked: bool,
}

impl Forwarding {
    /// Returns the connection that leads to the owner.
    pub(in crate::engine) const fn connection(&self) -> Option<ConnectionKey> {
        self.connection
    }

    /// Takes a connection that leads to the owner, or none, and returns the one before, if another.
    pub(in crate::engine) fn replace(
        &mut self,
        connection: Option<ConnectionKey>,
    ) -> Option<ConnectionKey> {
        let old = std::mem::replace(&mut self.connection, connection);
        old.filter(|_| old != connection)
    }

    /// Drops the connection with this key. Returns false if the connection is another one.
    pub(in crate::engine) fn lose(&mut self, key: ConnectionKey) -> bool {
        self.connection.take_if(|it| *it == key).is_some()
    }

    /// Has the connection replaced at the end of the turn: the owner has changed.
    pub(in crate::engine) const fn owner_moved(&mut self) {
        self.due = Due::Reconnect;
    }

    /// Looks at the end of the turn for a need to forward.
    pub(in crate::engine) fn authority_changed(&mut self) {
        self.due = self.due.max(Due::Ask);
    }

    /// Records the answer to a request to dial.
    pub(in crate::engine) const fn was_answered(&mut self) {
        self.asked = false;
    }
}

/// The nodes whose clients' requests are served here.
#[derive(Default)]
pub(in crate::engine) struct Served {
    /// Names of nodes that forwarded here, by the controller's numbers for them.
    names: Vec<String>,
    connections: Vec<(Forwarder, ConnectionKey)>,
}

impl Served {
    /// Makes this connection the one for the requests of `peer`. Returns the controller's name of `peer`, and the
    /// connection before.
    pub(in crate::engine) fn replace(
        &mut self,
        peer: &str,
        key: ConnectionKey,
    ) -> (Forwarder, Option<ConnectionKey>) {
        let known = self.names.iter().position(|name| name == peer);
        let index = known.unwrap_or_else(|| {
            let index = self.names.len();
            if index < MOST_SERVED {
                self.names.push(peer.to_owned());
                return index;
            }
            // The oldest gives way.
            let index = self.connections.first().map_or(0, |it| it.0.0.into());
            peer.clone_into(&mut self.names[index]);
            index
        });
        let forwarder = Forwarder(index as u16);
        let old = self.connections.iter().position(|it| it.0 == forwarder);
        let old = old.map(|at| self.connections.remove(at).1);
        self.connections.push((forwarder, key));
        (forwarder, old)
    }

    /// Returns the node that forwards by this connection.
    pub(in crate::engine) fn forwarder(&self, key: ConnectionKey) -> Option<Forwarder> {
        let served = self.connections.iter().find(|it| it.1 == key)?;
        Some(served.0)
    }

    /// Returns the connection of a forwarding node.
    pub(in crate::engine) fn connection(&self, forwarder: Forwarder) -> Option<ConnectionKey> {
        let served = self.connections.iter().find(|it| it.0 == forwarder)?;
        Some(served.1)
    }

    /// Ends the role of this connection. Returns the node behind the connection.
    pub(in crate::engine) fn forget(&mut self, key: ConnectionKey) -> Option<Forwarder> {
        let at = self.connections.iter().position(|it| it.1 == key)?;
        Some(self.connections.remove(at).0)
    }

    /// Returns all connections once the requests of their predecessors are done, if some are to be read again.
    fn to_resume(
        &self,
        connections: &Connections,
        slots: &Slots,
    ) -> Option<Vec<(Forwarder, ConnectionKey)>> {
        let is_paused = |key| connections.get(key).is_some_and(|it| it.paused);
        if !self.connections.iter().any(|it| is_paused(it.1)) {
            return None;
        }
        let keys: Vec<_> = self.connections.iter().map(|it| it.1).collect();
        (!slots.serves_others_than(&keys)).then(|| self.connections.clone())
    }
}

impl Engine {
    /// Forwards this node's clients on this connection from now on.
    pub(in crate::engine) fn forward(&mut self, sync: PeerStream) {
        self.forwarding.was_answered();
        let uses = Uses {
            forwarding: true,
            ..Uses::default()
        };
        let Some(key) = self.adopt(sync, TrafficClass::Sync, uses) else {
            return self.ask_forward();
        };
        self.stop_forwarding();
        self.forwarding.replace(Some(key));
        self.cx.core.handle_forward_up(self.cx.now);
        self.drain();
        self.advance(key);
        self.attach_waiting();
    }

    /// Drops the forwarding connection: nothing more is read from it.
    fn stop_forwarding(&mut self) {
        if let Some(old) = self.forwarding.replace(None) {
            self.close(old);
            self.forward_lost();
        }
    }

    /// Tells the controller that the way to the owner is lost.
    pub(super) fn forward_lost(&mut self) {
        self.cx.core.handle_forward_lost(self.cx.now);
        self.drain();
    }

    /// Does the forwarding work that is due at the end of the turn.
    pub(in crate::engine) fn forwarding_due(&mut self) {
        match std::mem::take(&mut self.forwarding.due) {
            Due::Nothing => return,
            Due::Ask => {}
            Due::Reconnect => self.stop_forwarding(),
        }
        self.ask_forward();
    }

    /// Asks the engine's owner for a connection to the disk's owner, if one is needed.
    pub(in crate::engine) fn ask_forward(&mut self) {
        let clients = self.clients() > 0 || !self.nbd.waiting.is_empty();
        let needed = match self.cx.core.record().ownership {
            Ownership::Departed { .. } => clients || self.cx.core.requests_in_flight() > 0,
            // A move of the disk back to this node was called off: clients that stayed here still need the disk
            // elsewhere.
            Ownership::Vacant => clients,
            Ownership::Serving | Ownership::Accepted { .. } | Ownership::Relinquished { .. } => {
                false
            }
        };
        let way = &mut self.forwarding;
        if needed && way.connection.is_none() && !std::mem::replace(&mut way.asked, true) {
            self.cx.tell(EngineEvent::ForwardDown);
        }
    }

    /// Attaches the clients that waited for a connection to the disk's owner.
    pub(in crate::engine) fn attach_waiting(&mut self) {
        for client in std::mem::take(&mut self.nbd.waiting) {
            self.attach(client);
        }
    }

    /// Serves the requests of `peer` on this connection, after all earlier ones.
    pub(in crate::engine) fn serve_forwarded(&mut self, peer: &str, sync: PeerStream) {
        let uses = Uses {
            served: true,
            ..Uses::default()
        };
        let Some(key) = self.adopt(sync, TrafficClass::Sync, uses) else {
            return;
        };
        self.replace_served(peer, key);
        if let Some(connection) = self.connections.get_mut(key) {
            connection.paused = true;
        }
        self.resume_served();
    }

    /// Makes this connection the one for the requests of `peer`. Returns the controller's name of `peer`.
    pub(super) fn replace_served(&mut self, peer: &str, key: ConnectionKey) -> Forwarder {
        let (forwarder, old) = self.served.replace(peer, key);
        if let Some(old) = old {
            self.close(old);
            let now = self.cx.now;
            self.cx.core.handle_forwarder_lost(now, forwarder);
        }
        forwarder
    }

    /// Ends the role of this connection for forwarded requests.
    pub(super) fn forget_served(&mut self, key: ConnectionKey) {
        if let Some(forwarder) = self.served.forget(key) {
            let now = self.cx.now;
            self.cx.core.handle_forwarder_lost(now, forwarder);
        }
    }

    /// Reads from served connections again once the requests of their predecessors are done.
    pub(in crate::engine) fn resume_served(&mut self) {
        let ready = self.served.to_resume(&self.connections, &self.memory.slots);
        for (forwarder, key) in ready.into_iter().flatten() {
            if let Some(connection) = self.connections.get_mut(key)
                && std::mem::take(&mut connection.paused)
            {
                let now = self.cx.now;
                self.cx.core.handle_forwarder_up(now, forwarder, false);
                self.advance(key);
            }
        }
    }
}
