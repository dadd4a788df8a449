//! Carries out the commands of the handle.

use std::sync::mpsc::TryRecvError;
use std::time::Duration;

use godwit_core::event::{AbortReason, Phase};
use godwit_core::units::MigrationId;
use godwit_core::{MigrationOptions, StartError};

use crate::engine::connections::streams::PeerStreams;
use crate::engine::handle::{Command, ControllerCommand, Reply};
use crate::engine::peers::link_signal::{InterfaceCounter, LinkWatch};
use crate::engine::run::Engine;
use crate::engine::slots::chunks::{ChunkMemory, Chunks};

/// Time limit for operations in flight at the engine's end.
const SHUTDOWN: Duration = Duration::from_secs(5);

impl Engine {
    /// Carries out all queued commands.
    pub(super) fn run_commands(&mut self) {
        loop {
            match self.queue.next() {
                Ok(command) if self.must_wait(&command) && !self.queue.is_full() => {
                    self.queue.defer(command, self.cx.now);
                }
                Ok(command) => self.carry_out(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => return self.shut_down(),
            }
        }
    }

    /// Carries out the commands whose wait is over.
    pub(super) fn run_deferred(&mut self) {
        for deferred in self.queue.take_deferred() {
            let waited_enough = deferred.until.is_some_and(|until| until <= self.cx.now);
            if self.must_wait(&deferred.command) && !waited_enough {
                self.queue.put_back(deferred);
            } else {
                self.carry_out(deferred.command);
            }
        }
    }

    /// Returns true if an earlier migration still does something that conflicts with the command.
    fn must_wait(&self, command: &Command) -> bool {
        match command {
            // Writes of the last migration must not land on top of the next migration's data.
            Command::StartDestination { .. } => {
                self.memory.slots.applies() || self.kept.is_applying()
            }
            // The controller starts no migration while the reads of an abandoned one are pending. A start during a
            // migration is refused at once.
            Command::StartSource { .. } => self.memory.chunks.is_reading() && !self.is_leaving(),
            _ => false,
        }
    }

    fn is_leaving(&self) -> bool {
        let ended = |phase| matches!(phase, Phase::Completed | Phase::Aborted);
        let progress = self.cx.core.progress();
        progress.is_some_and(|progress| !ended(progress.phase))
    }

    fn carry_out(&mut self, command: Command) {
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
            Command::ServeForwarded { peer, sync } => self.serve_forwarded(&peer, sync),
            Command::Pull { stream, shows_life } => {
                self.pull_up(stream, false);
                if shows_life {
                    self.cx.core.show_life();
                }
            }
            Command::Owe(stream) => self.pull_up(stream, true),
            Command::Fetch(stream) if self.cx.core.lacks_in_two_places() => self.fetch_up(stream),
            Command::Fetch(stream) => self.pull_up(stream, false),
            Command::MissingStored { notes } => self.missing_stored(notes),
            Command::FrontEnd { command, reply } => self.front_end_command(command, reply),
            Command::LatencyBaseline { reply } => {
                reply(Some(self.cx.stats.baseline(self.cx.now)));
            }
            Command::LogWrites { pages, reply } => {
                self.vhost.written = pages;
                reply(());
            }
            Command::MachineStandsStill => self.machine_stands_still(),
            Command::MachineGoesOn => self.vhost.machine_goes_on(),
            Command::FailForwarded => {
                self.forwarding.was_answered();
                self.vhost.owner_unreachable();
                self.cx.core.fail_forwarded(self.cx.now);
                self.drain();
                self.attach_waiting();
            }
            Command::Controller(command) => self.tell_controller(command),
            Command::Shutdown => self.shut_down(),
        }
    }

    /// Carries out a command for the controller alone.
    fn tell_controller(&mut self, command: ControllerCommand) {
        let now = self.cx.now;
        let core = &mut self.cx.core;
        match command {
            ControllerCommand::PullOnDemandOnly => return core.pull_on_demand_only(),
            ControllerCommand::AbandonMissing => {
                self.cx.config.missing_pauses_after = None;
                return core.fail_missing_after(Duration::ZERO);
            }
            ControllerCommand::BeginComparison { reply } => return reply(core.begin_comparison()),
            ControllerCommand::EndComparison { different, same } => {
                // The disk does not start to leave after a comparison that has become useless, either.
                let counts = core.end_comparison(&different, &same);
                tracing::debug!(disk = self.cx.config.disk, counts, "a comparison ended");
                return;
            }
            ControllerCommand::Compared { reply } => return reply(core.compared()),
            ControllerCommand::ForgetComparison => return core.forget_comparison(),
            ControllerCommand::GiveUpImage { reply } => return reply(core.give_up_image()),
            ControllerCommand::Cancel { reason, reply } => {
                let cancelled = core.cancel(now, reason);
                self.drain();
                return reply(cancelled);
            }
            ControllerCommand::SwitchOver { reply } => {
                let leaves = core.switch_over(now);
                self.drain();
                return reply(leaves);
            }
            ControllerCommand::ChangeMigration { change, reply } => {
                let changed = core.change_migration(now, &change);
                self.drain();
                return reply(changed);
            }
            ControllerCommand::Persisted => core.handle_persisted(now),
            ControllerCommand::Surpass => core.surpass(now),
            ControllerCommand::Hold => core.hold(now),
            ControllerCommand::GoAlone => core.go_alone(now),
            ControllerCommand::YieldTo { epoch, reply } => reply(core.yield_to(now, epoch)),
            ControllerCommand::Sever { reply } => reply(core.sever(now)),
            ControllerCommand::Take { reply } => reply(core.take(now).is_ok()),
            ControllerCommand::MarkCheckpoint {
                number,
                whole,
                reply,
            } => {
                reply(core.mark_checkpoint(now, number, whole));
            }
            ControllerCommand::ApplyCheckpoints { number, reply } => {
                reply(core.apply_checkpoints(now, number));
            }
            ControllerCommand::SharingStored => core.handle_sharing_stored(now),
            ControllerCommand::ActivityStored { stored } => {
                core.handle_activity_stored(now, stored);
            }
            ControllerCommand::MayDiffer(log) => return core.may_differ(&log),
            ControllerCommand::NotPersisted { reason } => {
                core.handle_not_persisted(now, reason);
            }
        }
        self.drain();
    }

    fn start_source(
        &mut self,
        options: MigrationOptions,
        memory: ChunkMemory,
        streams: PeerStreams,
        interface: Option<InterfaceCounter>,
        reply: Reply<Result<(), StartError>>,
    ) {
        if self.cx.is_ending() {
            return reply(Err(StartError::NotServing));
        }
        if !memory.suffices(&options) {
            return reply(Err(StartError::Option("window")));
        }
        // The controller reads chunks only after a successful start, and only through `drain` below.
        if let Err(error) = self.cx.core.start_source(self.cx.now, options) {
            return reply(Err(error));
        }
        let capacity = self.disk.capacity().bytes();
        self.memory.chunks = Chunks::new(&self.cx.config.limits, memory, capacity);
        self.link(options.migration, streams);
        self.moves.watch(LinkWatch::new(self.cx.now, interface));
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
        if self.cx.is_ending() {
            return reply(Err(StartError::NotServing));
        }
        if let Err(error) = self
            .cx
            .core
            .start_destination(self.cx.now, migration, peer_timeout)
        {
            return reply(Err(error));
        }
        self.memory
            .slots
            .commit_for_replicas(self.disk.capacity().bytes());
        self.link(migration, streams);
        reply(Ok(()));
        self.drain();
        self.open_links();
    }

    fn shut_down(&mut self) {
        if self.cx.is_ending() {
            return;
        }
        self.cx.shutdown = Some(self.cx.now.after(SHUTDOWN));
        self.nbd.waiting.clear();
        self.cx.core.cancel(self.cx.now, AbortReason::Cancelled);
        self.stop_pulling();
        self.drain();
        self.hang_up();
        let deadline = self.cx.now.after(SHUTDOWN);
        let clients = self.connections.iter().filter(|c| c.is_client());
        for key in clients.map(|c| c.key).collect::<Vec<_>>() {
            self.connections.leave(key, deadline);
        }
    }
}
