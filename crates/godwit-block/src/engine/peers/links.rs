//! The roles of the connections to other nodes.

use std::time::Duration;

use godwit_core::action::Forwarder;
use godwit_core::authority::Ownership;
use godwit_core::event::{Event, Phase};
use godwit_core::units::{MigrationId, Time};
use godwit_core::wire::TrafficClass;

use crate::engine::config::EngineEvent;
use crate::engine::connections::streams::{PeerStream, PeerStreams};
use crate::engine::connections::{ConnectionKey, Party, Uses, descriptor};
use crate::engine::run::Engine;
use godwit_io::stream::Stream;

/// Time from a migration's end to the close of its connections: both sides must hear of the end.
const GRACE: Duration = Duration::from_secs(2);

/// Time limit for the other side to close a connection after this side's goodbye.
pub(in crate::engine) const FAREWELL: Duration = Duration::from_secs(5);

/// Most control connections of undecided migrations.
const MOST_RESOLVING: usize = 4;

/// Most forwarding nodes served at once.
pub(in crate::engine) const MOST_SERVED: usize = 64;

/// Bytes that the kernel takes from a migration's connection ahead of transmission: a millisecond's worth at 1 Gbit/s,
/// so that the link stays full and a double write waits for little.
const MOST_UNSENT: u32 = 128 << 10;

/// The connections of the current or last migration.
pub(in crate::engine) struct Links {
    pub(in crate::engine) migration: MigrationId,
    peer: String,
    pub(in crate::engine) control: Option<ConnectionKey>,
    pub(in crate::engine) sync: Option<ConnectionKey>,
    pub(in crate::engine) copies: Vec<ConnectionKey>,
    /// True until the migration ends.
    pub(in crate::engine) active: bool,
    /// Time to close the connections of an ended migration.
    retire_at: Option<Time>,
}

impl Engine {
    /// Takes over a peer's connection; `None` if its socket is unusable.
    pub(in crate::engine) fn adopt(
        &mut self,
        stream: PeerStream,
        class: TrafficClass,
        uses: Uses,
    ) -> Option<ConnectionKey> {
        let PeerStream { socket, tls } = stream;
        match Stream::new(descriptor(socket), tls, &[]) {
            Ok(stream) => {
                if uses.migration {
                    stream.limit_unsent(MOST_UNSENT);
                }
                let party = Party::Peer { class, uses };
                let account = self.slots.open_account();
                let now = self.now;
                Some(self.connections.insert(stream, party, account, now))
            }
            Err(error) => {
                let disk = &self.config.disk;
                tracing::warn!(
                    disk,
                    ?class,
                    "cannot use a connection to another node: {error}"
                );
                None
            }
        }
    }

    /// Replaces the connections of the last migration with those of a new one.
    pub(in crate::engine) fn link(&mut self, migration: MigrationId, streams: PeerStreams) {
        self.retire();
        let PeerStreams {
            peer,
            control,
            sync,
            copies,
            compression,
        } = streams;
        let uses = Uses {
            migration: true,
            ..Uses::default()
        };
        let control = self.adopt(control, TrafficClass::Control, uses);
        let sync = self.adopt(sync, TrafficClass::Sync, uses);
        let copies: Vec<_> = copies
            .into_iter()
            .map_while(|stream| self.adopt(stream, TrafficClass::Copy, uses))
            .collect();
        self.links = Some(Links {
            migration,
            peer,
            control,
            sync,
            copies,
            active: true,
            retire_at: None,
        });
        self.compression = self.new_compression(compression);
        self.copies_saved = 0;
    }

    /// Starts to read from the migration's connections, once the controller knows the migration.
    pub(in crate::engine) fn open_links(&mut self) {
        let Some(links) = &self.links else { return };
        let complete = links.control.is_some() && links.sync.is_some() && !links.copies.is_empty();
        let keys: Vec<_> = links
            .control
            .into_iter()
            .chain(links.sync)
            .chain(links.copies.clone())
            .collect();
        if !complete {
            self.core
                .handle_connection_lost(self.now, TrafficClass::Control);
            self.drain();
        }
        for key in keys {
            self.advance(key);
        }
    }

    /// Closes the connections of an ended migration, except a sync connection with other uses.
    pub(in crate::engine) fn retire(&mut self) {
        let Some(links) = self.links.take() else {
            return;
        };
        self.compression = None;
        for key in links.control.into_iter().chain(links.copies) {
            self.leave(key, FAREWELL);
        }
        let Some(sync) = links.sync else { return };
        let Some(connection) = self.connections.get_mut(sync) else {
            return;
        };
        connection.stream.stop_packing();
        if let Some(uses) = connection.uses_mut() {
            uses.migration = false;
            if !uses.forwarding && !uses.served {
                self.leave(sync, FAREWELL);
            }
        }
    }

    /// Takes a control connection for a migration that a crash or a lost connection left undecided.
    pub(in crate::engine) fn control_up(&mut self, migration: MigrationId, control: PeerStream) {
        let uses = Uses {
            migration: true,
            ..Uses::default()
        };
        let Some(key) = self.adopt(control, TrafficClass::Control, uses) else {
            return;
        };
        let mut replaced = None;
        match &mut self.links {
            Some(links) if links.migration == migration => replaced = links.control.replace(key),
            _ => {
                if let Some(at) = self.resolving.iter().position(|(id, _)| *id == migration) {
                    replaced = Some(self.resolving.remove(at).1);
                } else if self.resolving.len() >= MOST_RESOLVING {
                    replaced = Some(self.resolving.remove(0).1);
                }
                self.resolving.push((migration, key));
            }
        }
        if let Some(old) = replaced {
            self.close(old);
        }
        self.core.handle_control_up(self.now);
        self.drain();
        self.advance(key);
    }

    /// Forwards this node's clients on this connection from now on.
    pub(in crate::engine) fn forward(&mut self, sync: PeerStream) {
        self.forward_asked = false;
        let uses = Uses {
            forwarding: true,
            ..Uses::default()
        };
        let Some(key) = self.adopt(sync, TrafficClass::Sync, uses) else {
            return self.ask_forward();
        };
        self.stop_forwarding();
        self.forwarding = Some(key);
        self.core.handle_forward_up(self.now);
        self.drain();
        self.advance(key);
        self.attach_waiting();
    }

    /// Drops the forwarding connection: nothing more is read from it.
    pub(in crate::engine) fn stop_forwarding(&mut self) {
        if let Some(old) = self.forwarding.take() {
            self.close(old);
            self.core.handle_forward_lost(self.now);
            self.drain();
        }
    }

    /// Serves the requests of `peer` on this connection, after all earlier ones.
    pub(in crate::engine) fn serve_forwarded(&mut self, peer: String, sync: PeerStream) {
        let uses = Uses {
            served: true,
            ..Uses::default()
        };
        let Some(key) = self.adopt(sync, TrafficClass::Sync, uses) else {
            return;
        };
        self.replace_served(&peer, key);
        if let Some(connection) = self.connections.get_mut(key) {
            connection.paused = true;
        }
        self.resume_served();
    }

    /// Makes this connection the one for the requests of `peer`. Returns the controller's name of `peer`.
    fn replace_served(&mut self, peer: &str, key: ConnectionKey) -> Forwarder {
        let known = self.forwarders.iter().position(|name| name == peer);
        let index = known.unwrap_or_else(|| {
            let index = self.forwarders.len();
            if index < MOST_SERVED {
                self.forwarders.push(peer.to_owned());
                return index;
            }
            // The oldest gives way.
            let index = self.served.first().map_or(0, |served| served.0.0.into());
            peer.clone_into(&mut self.forwarders[index]);
            index
        });
        let forwarder = Forwarder(index as u16);
        if let Some(at) = self.served.iter().position(|served| served.0 == forwarder) {
            let (_, old) = self.served.remove(at);
            self.close(old);
            self.core.handle_forwarder_lost(self.now, forwarder);
        }
        self.served.push((forwarder, key));
        forwarder
    }

    /// Returns the node that forwards by this connection.
    pub(in crate::engine) fn forwarder(&self, key: ConnectionKey) -> Option<Forwarder> {
        let served = self.served.iter().find(|served| served.1 == key)?;
        Some(served.0)
    }

    /// Ends the role of this connection for forwarded requests.
    fn forget_served(&mut self, key: ConnectionKey) {
        if let Some(at) = self.served.iter().position(|served| served.1 == key) {
            let (forwarder, _) = self.served.remove(at);
            self.core.handle_forwarder_lost(self.now, forwarder);
        }
    }

    /// Reads from served connections again once the requests of their predecessors are done.
    pub(in crate::engine) fn resume_served(&mut self) {
        let paused = |(_, key): &(Forwarder, ConnectionKey)| {
            self.connections
                .get(*key)
                .is_some_and(|connection| connection.paused)
        };
        if !self.served.iter().any(paused) {
            return;
        }
        let keys: Vec<_> = self.served.iter().map(|(_, key)| *key).collect();
        if self.slots.serves_others_than(&keys) {
            return;
        }
        for (forwarder, key) in self.served.clone() {
            if let Some(connection) = self.connections.get_mut(key)
                && std::mem::take(&mut connection.paused)
            {
                self.core.handle_forwarder_up(self.now, forwarder, false);
                self.advance(key);
            }
        }
    }

    /// Asks the engine's owner for a connection to the disk's owner, if one is needed.
    pub(in crate::engine) fn ask_forward(&mut self) {
        let clients = self.clients > 0 || !self.waiting_clients.is_empty();
        let needed = match self.core.record().ownership {
            Ownership::Departed { .. } => clients || self.core.requests_in_flight() > 0,
            // A move of the disk back to this node was called off: clients that stayed here still need the disk
            // elsewhere.
            Ownership::Vacant => clients,
            Ownership::Serving | Ownership::Accepted { .. } | Ownership::Relinquished { .. } => {
                false
            }
        };
        if needed && self.forwarding.is_none() && !self.forward_asked {
            self.forward_asked = true;
            self.tell(EngineEvent::ForwardDown);
        }
    }

    /// Attaches the clients that waited for a connection to the disk's owner.
    pub(in crate::engine) fn attach_waiting(&mut self) {
        for client in std::mem::take(&mut self.waiting_clients) {
            self.attach(client);
        }
    }

    /// Adapts the connections to an event of the controller.
    pub(in crate::engine) fn relink(&mut self, event: &Event) {
        match *event {
            // The destination serves the disk once it is given away, and hears of requests at once.
            Event::PhaseEntered {
                phase: Phase::Committing,
                ..
            } => self.forward_on_links(),
            Event::MigrationCompleted { migration } => {
                self.link_watch = None;
                self.end_links(migration);
                self.forward_on_links();
            }
            Event::ReceiveCompleted { migration } => self.end_links(migration),
            Event::MigrationAborted { migration, .. } => {
                self.link_watch = None;
                self.discard_unsent(TrafficClass::Copy);
                self.discard_unsent(TrafficClass::Sync);
                self.drop_deferred_reads();
                self.end_links(migration);
            }
            Event::ReceiveAborted { migration, .. } => {
                self.notes = None;
                self.end_links(migration);
                self.stop_serving_on_links(migration);
            }
            Event::Whole { .. } | Event::OwesNothing { .. } | Event::LeftImage { .. } => {
                self.end_pulling();
            }
            Event::OwnerMoved => self.close_forwarding = true,
            Event::AuthorityChanged { record } => {
                // A source that has heard of this may forward from now on.
                if let Ownership::Accepted { migration } = record.ownership {
                    self.serve_on_links(migration);
                }
                // Only a node that durably gave the disk away asks for the way to its owner.
                self.check_forward = true;
            }
            _ => {}
        }
    }

    /// Uses the migration's sync connection, if still there, for forwarding.
    fn forward_on_links(&mut self) {
        let sync = self.links.as_ref().and_then(|links| links.sync);
        let old = std::mem::replace(&mut self.forwarding, sync);
        if let Some(old) = old.filter(|old| Some(*old) != sync) {
            self.close(old);
        }
        let uses = sync.and_then(|key| self.connections.get_mut(key)?.uses_mut());
        if let Some(uses) = uses {
            uses.forwarding = true;
        }
    }

    /// Lets the migration's sync connection carry the source's forwarded requests.
    fn serve_on_links(&mut self, migration: MigrationId) {
        let linked = self
            .links
            .as_ref()
            .filter(|links| links.migration == migration)
            .and_then(|links| Some((links.peer.clone(), links.sync?)));
        if let Some((peer, sync)) = linked
            && let Some(uses) = self.connections.get_mut(sync).and_then(|c| c.uses_mut())
        {
            uses.served = true;
            let forwarder = self.replace_served(&peer, sync);
            self.core.handle_forwarder_up(self.now, forwarder, true);
        }
    }

    /// Ends forwarding from a source that did not give the disk away.
    fn stop_serving_on_links(&mut self, migration: MigrationId) {
        let sync = self
            .links
            .as_ref()
            .filter(|links| links.migration == migration)
            .and_then(|links| links.sync);
        if let Some(sync) = sync {
            self.forget_served(sync);
            if let Some(uses) = self.connections.get_mut(sync).and_then(|c| c.uses_mut()) {
                uses.served = false;
            }
        }
    }

    /// Ends the migration's connections: later frames on its copy and sync connections are dropped, and all of its
    /// connections close soon.
    fn end_links(&mut self, migration: MigrationId) {
        let at = self.now.after(GRACE);
        if let Some(links) = &mut self.links
            && links.migration == migration
        {
            links.active = false;
            links.retire_at = Some(at);
            for &key in links.copies.iter().chain(&links.sync) {
                if let Some(uses) = self.connections.get_mut(key).and_then(|c| c.uses_mut()) {
                    uses.migration = false;
                }
            }
        }
        for (id, key) in &self.resolving {
            if *id == migration {
                self.decided.push((at, *id, *key));
            }
        }
        self.resolving.retain(|(id, _)| *id != migration);
    }

    /// Closes the connections left by a migration's end, and returns its memory. Returns true while some are left.
    pub(in crate::engine) fn retire_old(&mut self) -> bool {
        let now = self.now;
        if self
            .links
            .as_ref()
            .is_some_and(|links| links.retire_at.is_some_and(|at| at <= now))
        {
            self.retire();
            self.chunks.let_go();
            self.slots.decommit_replicas();
        }
        while let Some(at) = self.decided.iter().position(|(at, ..)| *at <= now) {
            let (_, _, key) = self.decided.swap_remove(at);
            self.leave(key, FAREWELL);
        }
        !self.decided.is_empty()
            || self
                .links
                .as_ref()
                .is_some_and(|links| links.retire_at.is_some())
    }

    /// Handles the loss of a peer's connection: tells the controller, once for each role.
    pub(in crate::engine) fn unlink(
        &mut self,
        key: ConnectionKey,
        class: TrafficClass,
        uses: Uses,
    ) {
        let mut report = false;
        if let Some(links) = &mut self.links {
            let linked = links.control == Some(key)
                || links.sync == Some(key)
                || links.copies.contains(&key);
            report = linked && links.active;
            links.control.take_if(|control| *control == key);
            links.sync.take_if(|sync| *sync == key);
            links.copies.retain(|copy| *copy != key);
        }
        if let Some(at) = self.resolving.iter().position(|(_, k)| *k == key) {
            self.resolving.remove(at);
            // With a migration under way, the controller would attribute the loss to that migration.
            report = !self.links.as_ref().is_some_and(|links| links.active);
        }
        self.decided.retain(|(_, _, k)| *k != key);
        self.forget_served(key);
        self.lose_pull(key);
        if report {
            self.core.handle_connection_lost(self.now, class);
            self.drain();
        }
        if uses.forwarding && self.forwarding == Some(key) {
            self.forwarding = None;
            self.core.handle_forward_lost(self.now);
            self.drain();
            self.ask_forward();
        }
    }
}
