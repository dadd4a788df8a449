//! The connections of migrations.

use std::time::Duration;

use godwit_core::event::{Event, Phase};
use godwit_core::units::{MigrationId, Time};
use godwit_core::wire::{Message, TrafficClass};

use crate::engine::connections::streams::{PeerStream, PeerStreams};
use crate::engine::connections::{ConnectionKey, Connections, Uses};
use crate::engine::context::Context;
use crate::engine::peers::compression::Compression;
use crate::engine::peers::link_signal::LinkWatch;
use crate::engine::run::Engine;
use crate::engine::slots::memory::Memory;
use godwit_core::authority::Ownership;

/// Time from a migration's end to the close of its connections: both sides must hear of the end.
const GRACE: Duration = Duration::from_secs(2);

/// Time limit for the other side to close a connection after this side's goodbye.
pub(super) const FAREWELL: Duration = Duration::from_secs(5);

/// Most control connections of undecided migrations.
const MOST_RESOLVING: usize = 4;

/// The roles of a migration's connection.
const MIGRATION: Uses = Uses {
    migration: true,
    forwarding: false,
    served: false,
};

/// The connections of the current or last migration.
pub(in crate::engine) struct Links {
    migration: MigrationId,
    peer: String,
    control: Option<ConnectionKey>,
    sync: Option<ConnectionKey>,
    copies: Vec<ConnectionKey>,
    /// Time to close the connections; `None` until the migration ends.
    retire_at: Option<Time>,
    /// Compressor of the migration's data, if the other node accepts compression.
    compression: Option<Compression>,
    /// Watch on the sync connection while the migration leaves this node.
    pub(super) watch: Option<LinkWatch>,
}

impl Links {
    const fn is_active(&self) -> bool {
        self.retire_at.is_none()
    }

    pub(super) const fn sync(&self) -> Option<ConnectionKey> {
        self.sync
    }

    /// Returns the connections that carry data, double writes first, and the compressor of the data.
    pub(super) fn data_and_compression(
        &mut self,
    ) -> (
        impl Iterator<Item = (TrafficClass, ConnectionKey)>,
        Option<&mut Compression>,
    ) {
        let writes = self.sync.map(|key| (TrafficClass::Sync, key));
        let copies = self.copies.iter().map(|&key| (TrafficClass::Copy, key));
        (writes.into_iter().chain(copies), self.compression.as_mut())
    }

    fn all(&self) -> impl Iterator<Item = ConnectionKey> {
        let copies = self.copies.iter().copied();
        self.control.into_iter().chain(self.sync).chain(copies)
    }

    /// Drops a lost connection. Returns true if the connection was one of a migration under way.
    fn lose(&mut self, key: ConnectionKey) -> bool {
        let linked = self.all().any(|it| it == key);
        self.control.take_if(|control| *control == key);
        self.sync.take_if(|sync| *sync == key);
        self.copies.retain(|copy| *copy != key);
        linked && self.is_active()
    }
}

/// The migrations that this node takes part in.
#[derive(Default)]
pub(in crate::engine) struct Moves {
    /// Connections of the current or last migration.
    pub(super) links: Option<Links>,
    /// Bytes saved by compression in the copies of that migration.
    pub(in crate::engine) copies_saved: u64,
    /// Control connections of migrations to be decided after a crash.
    resolving: Vec<(MigrationId, ConnectionKey)>,
    /// Control connections of decided migrations, with the time to close each.
    decided: Vec<(Time, MigrationId, ConnectionKey)>,
}

impl Moves {
    /// Replaces the connections of the last migration with those of a new one.
    pub(in crate::engine) fn link(
        &mut self,
        migration: MigrationId,
        streams: PeerStreams,
        cx: &Context,
        connections: &mut Connections,
        memory: &mut Memory,
    ) {
        self.retire(cx.now, connections);
        let slots = &mut memory.slots;
        let mut adopt = |stream, class| connections.adopt(stream, class, MIGRATION, cx, slots);
        let control = adopt(streams.control, TrafficClass::Control);
        let sync = adopt(streams.sync, TrafficClass::Sync);
        let copies = streams.copies.into_iter();
        self.links = Some(Links {
            migration,
            peer: streams.peer,
            control,
            sync,
            copies: copies
                .map_while(|stream| adopt(stream, TrafficClass::Copy))
                .collect(),
            retire_at: None,
            compression: if streams.compression {
                Compression::start(cx)
            } else {
                None
            },
            watch: None,
        });
        self.copies_saved = 0;
    }

    /// Measures the link from now on.
    pub(in crate::engine) fn watch(&mut self, watch: LinkWatch) {
        if let Some(links) = &mut self.links {
            links.watch = Some(watch);
        }
    }

    /// Ends the measurements of the link.
    fn stop_watching(&mut self) {
        if let Some(links) = &mut self.links {
            links.watch = None;
        }
    }

    /// Returns true while a migration leaves this node.
    pub(in crate::engine) fn is_watching(&self) -> bool {
        self.links.as_ref().is_some_and(|it| it.watch.is_some())
    }

    /// Returns the compressor of the migration's data, if there is one.
    pub(super) fn compression(&mut self) -> Option<&mut Compression> {
        self.links.as_mut()?.compression.as_mut()
    }

    /// Returns the time of the next measurement of the link.
    pub(in crate::engine) fn next_look(&self) -> Option<Time> {
        let watch = self.links.as_ref()?.watch.as_ref()?;
        Some(watch.next())
    }

    pub(super) fn sync(&self) -> Option<ConnectionKey> {
        self.links.as_ref().and_then(Links::sync)
    }

    /// Returns the connections of a migration.
    fn of(&self, migration: MigrationId) -> Option<&Links> {
        let links = self.links.as_ref();
        links.filter(|links| links.migration == migration)
    }

    /// Returns the connection for a control frame.
    pub(super) fn control_for(&self, message: &Message) -> Option<ConnectionKey> {
        let about = match *message {
            Message::Prepare { migration, .. }
            | Message::Prepared { migration }
            | Message::Commit { migration, .. }
            | Message::Committed { migration }
            | Message::Abort { migration, .. }
            | Message::Query { migration }
            | Message::Follow { migration, .. }
            | Message::Follows { migration }
            | Message::GuestArrived { migration } => Some(migration),
            _ => None,
        };
        let is_it = |id| about.is_none_or(|about| about == id);
        let current = self.links.as_ref().filter(|links| is_it(links.migration));
        current.and_then(|links| links.control).or_else(|| {
            // The last word on a migration follows its decision.
            let decided = self.decided.iter().map(|&(_, id, key)| (id, key));
            let mut others = self.resolving.iter().copied().chain(decided);
            others.find(|(id, _)| is_it(*id)).map(|(_, key)| key)
        })
    }

    /// Returns the copy connection with the least to send.
    pub(super) fn copy_for(&self, connections: &Connections) -> Option<ConnectionKey> {
        let waiting = |key: &ConnectionKey| {
            let connection = connections.get(*key);
            connection.map_or(usize::MAX, |c| c.stream.outbox().bytes())
        };
        self.links
            .as_ref()?
            .copies
            .iter()
            .copied()
            .min_by_key(waiting)
    }

    /// Drops the frames of the migration under way that wait on this class's connections and of which no byte has left.
    pub(in crate::engine) fn discard_unsent(
        &self,
        class: TrafficClass,
        connections: &mut Connections,
        memory: &mut Memory,
    ) {
        let Some(links) = self.links.as_ref().filter(|links| links.is_active()) else {
            return;
        };
        let keys = match class {
            TrafficClass::Control | TrafficClass::Pull | TrafficClass::Image => &[],
            TrafficClass::Sync => links.sync.as_slice(),
            TrafficClass::Copy => &links.copies[..],
        };
        for &key in keys {
            let Some(connection) = connections.get_mut(key) else {
                continue;
            };
            // Answers to forwarded requests and requests of this node's clients do not belong to the migration.
            let uses = connection.uses();
            if uses.migration && !uses.forwarding && !uses.served {
                let stream = &mut connection.stream;
                stream.discard_unsent(&mut |payload| memory.release(payload));
            }
        }
    }

    /// Closes the connections of an ended migration, except a sync connection with other uses.
    fn retire(&mut self, now: Time, connections: &mut Connections) {
        let Some(links) = self.links.take() else {
            return;
        };
        let deadline = now.after(FAREWELL);
        for key in links.control.into_iter().chain(links.copies) {
            connections.leave(key, deadline);
        }
        let Some(sync) = links.sync else { return };
        let Some(connection) = connections.get_mut(sync) else {
            return;
        };
        connection.stream.stop_packing();
        if let Some(uses) = connection.uses_mut() {
            uses.migration = false;
            if !uses.forwarding && !uses.served {
                connections.leave(sync, deadline);
            }
        }
    }

    /// Takes a control connection for a migration that is to be decided. Returns the connection that it replaces.
    fn replace_control(
        &mut self,
        migration: MigrationId,
        key: ConnectionKey,
    ) -> Option<ConnectionKey> {
        if let Some(links) = &mut self.links
            && links.migration == migration
        {
            return links.control.replace(key);
        }
        let known = self.resolving.iter().position(|(id, _)| *id == migration);
        let full = self.resolving.len() >= MOST_RESOLVING;
        let replaced = known.or(full.then_some(0));
        let replaced = replaced.map(|at| self.resolving.remove(at).1);
        self.resolving.push((migration, key));
        replaced
    }

    /// Ends a migration: later frames on its copy and sync connections are dropped, and all of its connections close
    /// soon.
    fn end(&mut self, migration: MigrationId, now: Time, connections: &mut Connections) {
        let at = now.after(GRACE);
        if let Some(links) = &mut self.links
            && links.migration == migration
        {
            links.retire_at = Some(at);
            for &key in links.copies.iter().chain(&links.sync) {
                if let Some(uses) = connections.uses_mut(key) {
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
    pub(in crate::engine) fn retire_old(
        &mut self,
        now: Time,
        connections: &mut Connections,
        memory: &mut Memory,
    ) -> bool {
        let retire_at = |moves: &Self| moves.links.as_ref().and_then(|links| links.retire_at);
        if retire_at(self).is_some_and(|at| at <= now) {
            self.retire(now, connections);
            memory.chunks.let_go();
            memory.slots.decommit_replicas();
        }
        while let Some(at) = self.decided.iter().position(|(at, ..)| *at <= now) {
            let (_, _, key) = self.decided.swap_remove(at);
            connections.leave(key, now.after(FAREWELL));
        }
        !self.decided.is_empty() || retire_at(self).is_some()
    }

    /// Drops a lost connection. Returns true if the controller must hear of the loss.
    fn lose(&mut self, key: ConnectionKey) -> bool {
        let mut report = self.links.as_mut().is_some_and(|links| links.lose(key));
        if let Some(at) = self.resolving.iter().position(|(_, k)| *k == key) {
            self.resolving.remove(at);
            // With a migration under way, the controller would attribute the loss to that migration.
            report = !self.links.as_ref().is_some_and(Links::is_active);
        }
        self.decided.retain(|(_, _, k)| *k != key);
        report
    }
}

impl Engine {
    /// Replaces the connections of the last migration with those of a new one.
    pub(in crate::engine) fn link(&mut self, migration: MigrationId, streams: PeerStreams) {
        let (connections, memory) = (&mut self.connections, &mut self.memory);
        self.moves
            .link(migration, streams, &self.cx, connections, memory);
    }

    /// Starts to read from the migration's connections, once the controller knows the migration.
    pub(in crate::engine) fn open_links(&mut self) {
        let Some(links) = &self.moves.links else {
            return;
        };
        let complete = links.control.is_some() && links.sync.is_some() && !links.copies.is_empty();
        let keys: Vec<_> = links.all().collect();
        if !complete {
            self.connection_lost(TrafficClass::Control);
        }
        for key in keys {
            self.advance(key);
        }
    }

    fn connection_lost(&mut self, class: TrafficClass) {
        let now = self.cx.now;
        self.cx.core.handle_connection_lost(now, class);
        self.drain();
    }

    /// Takes a control connection for a migration that a crash or a lost connection left undecided.
    pub(in crate::engine) fn control_up(&mut self, migration: MigrationId, control: PeerStream) {
        let Some(key) = self.adopt(control, TrafficClass::Control, MIGRATION) else {
            return;
        };
        if let Some(old) = self.moves.replace_control(migration, key) {
            self.close(old);
        }
        self.cx.core.handle_control_up(self.cx.now);
        self.drain();
        self.advance(key);
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
                self.moves.stop_watching();
                self.end_links(migration);
                self.forward_on_links();
            }
            Event::ReceiveCompleted { migration } => self.end_links(migration),
            Event::MigrationAborted { migration, .. } => {
                self.moves.stop_watching();
                for class in [TrafficClass::Copy, TrafficClass::Sync] {
                    self.discard_unsent(class);
                }
                self.drop_deferred_reads();
                self.end_links(migration);
            }
            Event::ReceiveAborted { migration, .. } => {
                self.pulls.forget_notes();
                self.end_links(migration);
                self.stop_serving_on_links(migration);
            }
            Event::Whole { .. } | Event::OwesNothing { .. } | Event::LeftImage { .. } => {
                self.end_pulling();
            }
            Event::OwnerMoved => self.forwarding.owner_moved(),
            Event::AuthorityChanged { record } => {
                // A source that has heard of this may forward from now on.
                if let Ownership::Accepted { migration } = record.ownership {
                    self.serve_on_links(migration);
                }
                // Only a node that durably gave the disk away asks for the way to its owner.
                self.forwarding.authority_changed();
            }
            _ => {}
        }
    }

    pub(in crate::engine) fn discard_unsent(&mut self, class: TrafficClass) {
        let (connections, memory) = (&mut self.connections, &mut self.memory);
        self.moves.discard_unsent(class, connections, memory);
    }

    fn end_links(&mut self, migration: MigrationId) {
        let now = self.cx.now;
        self.moves.end(migration, now, &mut self.connections);
    }

    /// Uses the migration's sync connection, if still there, for forwarding.
    fn forward_on_links(&mut self) {
        let sync = self.moves.sync();
        if let Some(old) = self.forwarding.replace(sync) {
            self.close(old);
        }
        if let Some(uses) = sync.and_then(|key| self.connections.uses_mut(key)) {
            uses.forwarding = true;
        }
    }

    /// Lets the migration's sync connection carry the source's forwarded requests.
    fn serve_on_links(&mut self, migration: MigrationId) {
        let links = self.moves.of(migration);
        let linked = links.and_then(|links| Some((links.peer.clone(), links.sync?)));
        if let Some((peer, sync)) = linked
            && let Some(uses) = self.connections.uses_mut(sync)
        {
            uses.served = true;
            let forwarder = self.replace_served(&peer, sync);
            let now = self.cx.now;
            self.cx.core.handle_forwarder_up(now, forwarder, true);
        }
    }

    /// Ends forwarding from a source that did not give the disk away.
    fn stop_serving_on_links(&mut self, migration: MigrationId) {
        if let Some(sync) = self.moves.of(migration).and_then(Links::sync) {
            self.forget_served(sync);
            if let Some(uses) = self.connections.uses_mut(sync) {
                uses.served = false;
            }
        }
    }

    /// Handles the loss of a peer's connection: tells the controller, once for each role.
    pub(in crate::engine) fn unlink(
        &mut self,
        key: ConnectionKey,
        class: TrafficClass,
        uses: Uses,
    ) {
        let report = self.moves.lose(key);
        self.forget_served(key);
        self.lose_pull(key);
        if report {
            self.connection_lost(class);
        }
        if uses.forwarding && self.forwarding.lose(key) {
            self.forward_lost();
            self.ask_forward();
        }
    }
}
