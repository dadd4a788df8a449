//! Carries out the commands of the handle.

use std::time::Duration;

use godwit_core::authority::Ownership;
use godwit_core::event::AbortReason;
use godwit_core::units::MigrationId;
use godwit_core::{MigrationOptions, StartError};

use crate::engine::connections::streams::{ClientStream, PeerStreams};
use crate::engine::deferred::MOST_DEFERRED;
use crate::engine::handle::{Command, Reply};
use crate::engine::peers::link_signal::{InterfaceCounter, LinkWatch};
use crate::engine::run::Engine;
use crate::engine::slots::chunks::{ChunkMemory, Chunks};

/// Time limit for operations in flight at the engine's end.
const SHUTDOWN: Duration = Duration::from_secs(5);

impl Engine {
    /// Carries out all queued commands.
    pub(super) fn run_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.run_command(command),
                Err(std::sync::mpsc::TryRecvError::Empty) => return,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return self.shut_down(),
            }
        }
    }

    fn run_command(&mut self, command: Command) {
        if self.must_wait(&command) && self.deferred.len() < MOST_DEFERRED {
            self.defer(command);
        } else {
            self.carry_out(command);
        }
    }

    pub(super) fn carry_out(&mut self, command: Command) {
        match command {
            Command::Attach(client) => self.attach_or_wait(client),
            Command::StartSource {
                options,
                memory,
                streams,
                interface,
                reply,
            } => {
                self.start_source(*options, *memory, streams, interface, reply);
            }
            Command::StartDestination {
                migration,
                peer_timeout,
                streams,
                reply,
            } => {
                self.start_destination(migration, peer_timeout, streams, reply);
            }
            Command::ControlUp { migration, control } => self.control_up(migration, control),
            Command::Forward(sync) => self.forward(sync),
            Command::ServeForwarded { peer, sync } => self.serve_forwarded(peer, sync),
            Command::Pull { stream, shows_life } => {
                self.pull_up(stream, false);
                if shows_life {
                    self.core.show_life();
                }
            }
            Command::Owe(stream) => self.pull_up(stream, true),
            Command::Fetch(stream) if self.core.lacks_in_two_places() => self.fetch_up(stream),
            Command::Fetch(stream) => self.pull_up(stream, false),
            Command::PullOnDemandOnly => self.core.pull_on_demand_only(),
            Command::AbandonMissing => {
                self.config.missing_pauses_after = None;
                self.core.fail_missing_after(Duration::ZERO);
            }
            Command::BeginComparison { reply } => reply(self.core.begin_comparison()),
            Command::EndComparison { different, same } => {
                // The disk does not start to leave after a comparison that has become useless, either.
                let counts = self.core.end_comparison(&different, &same);
                tracing::debug!(disk = self.config.disk, counts, "a comparison ended");
            }
            Command::Compared { reply } => reply(self.core.compared()),
            Command::ForgetComparison => self.core.forget_comparison(),
            Command::GiveUpImage { reply } => reply(self.core.give_up_image()),
            Command::MissingStored { notes } => self.missing_stored(notes),
            Command::Cancel { reason, reply } => {
                let cancelled = self.core.cancel(self.now, reason);
                self.drain();
                reply(cancelled);
            }
            Command::SwitchOver { reply } => {
                let leaves = self.core.switch_over(self.now);
                self.drain();
                reply(leaves);
            }
            Command::ChangeMigration { change, reply } => {
                let changed = self.core.change_migration(self.now, &change);
                self.drain();
                reply(changed);
            }
            Command::FrontEnd { command, reply } => self.front_end_command(command, reply),
            Command::LatencyBaseline { reply } => reply(Some(self.stats.baseline(self.now))),
            Command::MachineStandsStill => self.machine_stands_still(),
            Command::MachineGoesOn => self.machine_goes_on(),
            Command::FailForwarded => {
                self.forward_asked = false;
                self.vhost.owner_unreachable();
                self.core.fail_forwarded(self.now);
                self.drain();
                self.attach_waiting();
            }
            Command::Persisted => {
                self.core.handle_persisted(self.now);
                self.drain();
            }
            Command::Surpass => {
                self.core.surpass(self.now);
                self.drain();
            }
            Command::SharingStored => {
                self.core.handle_sharing_stored(self.now);
                self.drain();
            }
            Command::NotPersisted { reason } => {
                self.core.handle_not_persisted(self.now, reason);
                self.drain();
            }
            Command::Shutdown => self.shut_down(),
        }
    }

    /// Attaches a client. A client of a disk that has moved away waits until the owner can be reached.
    fn attach_or_wait(&mut self, client: ClientStream) {
        let departed = matches!(self.core.record().ownership, Ownership::Departed { .. });
        if departed && self.forwarding.is_none() {
            if self.waiting_clients.len() < self.config.max_clients as usize {
                self.waiting_clients.push(client);
                self.ask_forward();
            }
        } else {
            self.attach(client);
        }
    }

    fn start_source(
        &mut self,
        options: MigrationOptions,
        memory: ChunkMemory,
        streams: PeerStreams,
        interface: Option<InterfaceCounter>,
        reply: Reply<Result<(), StartError>>,
    ) {
        if self.shutdown.is_some() {
            return reply(Err(StartError::NotServing));
        }
        if !memory.suffices(&options) {
            return reply(Err(StartError::Option("window")));
        }
        // The controller reads chunks only after a successful start, and only through `drain` below.
        if let Err(error) = self.core.start_source(self.now, options) {
            return reply(Err(error));
        }
        let capacity = self.disk.capacity().bytes();
        self.chunks = Chunks::new(&self.config.limits, memory, capacity);
        self.link(options.migration, streams);
        self.link_watch = Some(LinkWatch::new(self.now, interface));
        reply(Ok(()));
        self.drain();
        self.open_links();
    }

    fn start_destination(
        &mut self,
        migration: MigrationId,
        peer_timeout: Duration,
        streams: PeerStreams,
        reply: Reply<Result<(), StartError>>,
    ) {
        if self.shutdown.is_some() {
            return reply(Err(StartError::NotServing));
        }
        if let Err(error) = self
            .core
            .start_destination(self.now, migration, peer_timeout)
        {
            return reply(Err(error));
        }
        self.slots.commit_for_replicas(self.disk.capacity().bytes());
        self.link(migration, streams);
        reply(Ok(()));
        self.drain();
        self.open_links();
    }

    fn shut_down(&mut self) {
        if self.shutdown.is_some() {
            return;
        }
        self.shutdown = Some(self.now.after(SHUTDOWN));
        self.waiting_clients.clear();
        self.core.cancel(self.now, AbortReason::Cancelled);
        self.stop_pulling();
        self.drain();
        self.hang_up();
        let clients: Vec<_> = self
            .connections
            .iter()
            .filter(|c| c.is_client())
            .map(|c| c.key)
            .collect();
        for key in clients {
            self.leave(key, SHUTDOWN);
        }
    }
}
