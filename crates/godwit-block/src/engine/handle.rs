//! The engine's handle: commands go in through a queue, and the published state comes out.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_core::event::AbortReason;
use godwit_core::units::{Epoch, MigrationId, Sectors};
use godwit_core::{
    ActiveAreas, ChangeError, Compared, Limits, MigrationChange, MigrationOptions, StartError,
};

use crate::engine::config::EngineError;
use crate::engine::connections::streams::{ClientStream, PeerStream, PeerStreams};
use crate::engine::peers::link_signal::InterfaceCounter;
use crate::engine::slots::chunks::ChunkMemory;
use crate::engine::stats::baseline::LatencyBaseline;
use crate::engine::stats::snapshot::Snapshot;
use crate::image::notes::missing::MissingNotes;
use godwit_vhost::memory::written::WrittenPages;
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError};

/// Called once with a command's result, on the engine's thread.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// A command of a handle to its engine.
pub(super) enum Command {
    Attach(ClientStream),
    StartSource {
        options: Box<MigrationOptions>,
        memory: Box<ChunkMemory>,
        streams: PeerStreams,
        interface: Option<InterfaceCounter>,
        reply: Reply<Result<(), StartError>>,
    },
    StartDestination {
        migration: MigrationId,
        peer_timeout: Duration,
        streams: PeerStreams,
        reply: Reply<Result<(), StartError>>,
    },
    ControlUp {
        migration: MigrationId,
        control: PeerStream,
    },
    Forward(PeerStream),
    ServeForwarded {
        peer: String,
        sync: PeerStream,
    },
    Pull {
        stream: PeerStream,
        shows_life: bool,
    },
    Owe(PeerStream),
    Fetch(PeerStream),
    MissingStored {
        notes: Option<MissingNotes>,
    },
    LatencyBaseline {
        reply: Reply<Option<LatencyBaseline>>,
    },
    FrontEnd {
        command: FrontEndCommand,
        reply: FrontEndReply,
    },
    LogWrites {
        pages: Option<Arc<WrittenPages>>,
        reply: Reply<()>,
    },
    MachineStandsStill,
    MachineGoesOn,
    FailForwarded,
    /// A command for the controller alone.
    Controller(ControllerCommand),
    Shutdown,
}

/// A command for an engine's controller.
pub(super) enum ControllerCommand {
    PullOnDemandOnly,
    AbandonMissing,
    BeginComparison {
        reply: Reply<Result<Vec<u64>, StartError>>,
    },
    EndComparison {
        different: Vec<u64>,
        same: Vec<u64>,
    },
    ForgetComparison,
    Compared {
        reply: Reply<Option<Compared>>,
    },
    GiveUpImage {
        reply: Reply<bool>,
    },
    Cancel {
        reason: AbortReason,
        reply: Reply<bool>,
    },
    SwitchOver {
        reply: Reply<bool>,
    },
    ChangeMigration {
        change: MigrationChange,
        reply: Reply<Result<(), ChangeError>>,
    },
    Persisted,
    Surpass,
    Hold,
    GoAlone,
    YieldTo {
        epoch: Epoch,
        reply: Reply<bool>,
    },
    Sever {
        reply: Reply<bool>,
    },
    Take {
        reply: Reply<bool>,
    },
    MarkCheckpoint {
        number: u64,
        whole: u64,
        reply: Reply<bool>,
    },
    ApplyCheckpoints {
        number: u64,
        reply: Reply<bool>,
    },
    SharingStored,
    ActivityStored {
        stored: bool,
    },
    MayDiffer(ActiveAreas),
    NotPersisted {
        reason: AbortReason,
    },
}

impl From<ControllerCommand> for Command {
    fn from(command: ControllerCommand) -> Self {
        Self::Controller(command)
    }
}

impl ControllerCommand {
    fn refuse(self) {
        match self {
            Self::BeginComparison { reply } => reply(Err(StartError::NotServing)),
            Self::Compared { reply } => reply(None),
            Self::Cancel { reply, .. }
            | Self::SwitchOver { reply }
            | Self::YieldTo { reply, .. }
            | Self::Sever { reply }
            | Self::Take { reply }
            | Self::MarkCheckpoint { reply, .. }
            | Self::ApplyCheckpoints { reply, .. }
            | Self::GiveUpImage { reply } => reply(false),
            Self::ChangeMigration { reply, .. } => reply(Err(ChangeError::NoMigration)),
            _ => {}
        }
    }
}

impl Command {
    /// Answers a command that arrived after the engine's end.
    pub(super) fn refuse(self) {
        match self {
            Self::StartSource { reply, .. } | Self::StartDestination { reply, .. } => {
                reply(Err(StartError::NotServing));
            }
            Self::Controller(command) => command.refuse(),
            Self::LatencyBaseline { reply } => reply(None),
            Self::FrontEnd { reply, .. } => reply(Err(FrontEndError::Ended)),
            _ => {}
        }
    }
}

pub(super) struct Waker {
    event: Arc<OwnedFd>,
}

impl Waker {
    pub(super) const fn new(event: Arc<OwnedFd>) -> Self {
        Self { event }
    }

    fn wake(&self) {
        // The only failure is a counter about to overflow, and then the engine is awake anyway.
        let _ = rustix::io::write(&*self.event, &1_u64.to_ne_bytes());
    }
}

pub(super) type Published = Arc<Mutex<Snapshot>>;
pub(super) type EngineThread = JoinHandle<Result<(), EngineError>>;

/// Controls a running engine. Clones control the same engine; the engine shuts down once the last clone is dropped. No
/// method blocks except [`EngineHandle::chunk_memory`] and [`EngineHandle::join`].
#[derive(Clone)]
pub struct EngineHandle {
    inner: Arc<Inner>,
}

struct Inner {
    disk: String,
    capacity: Sectors,
    limits: Limits,
    commands: mpsc::Sender<Command>,
    waker: Waker,
    snapshot: Published,
    thread: Mutex<Option<EngineThread>>,
}

impl Inner {
    fn send(&self, command: impl Into<Command>) {
        match self.commands.send(command.into()) {
            Ok(()) => self.waker.wake(),
            Err(mpsc::SendError(command)) => command.refuse(),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.send(Command::Shutdown);
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle")
            .field("disk", &self.inner.disk)
            .finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Returns true if both handles control the same engine.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(super) fn new(
        disk: String,
        capacity: Sectors,
        limits: Limits,
        commands: mpsc::Sender<Command>,
        waker: Waker,
        snapshot: Published,
        thread: EngineThread,
    ) -> Self {
        let thread = Mutex::new(Some(thread));
        Self {
            inner: Arc::new(Inner {
                disk,
                capacity,
                limits,
                commands,
                waker,
                snapshot,
                thread,
            }),
        }
    }

    /// Serves an NBD client. Beyond [`EngineConfig::max_clients`](crate::engine::EngineConfig::max_clients) the client
    /// is disconnected.
    pub fn attach(&self, client: ClientStream) {
        self.inner.send(Command::Attach(client));
    }

    /// Returns memory for a migration with these options. Blocks, for tens of milliseconds at worst, until the first
    /// part is committed.
    ///
    /// # Errors
    /// The kernel has no room for the memory.
    pub fn chunk_memory(&self, options: &MigrationOptions) -> io::Result<ChunkMemory> {
        ChunkMemory::new(&self.inner.limits, options)
    }

    /// Starts to move the disk away. The destination must have accepted the offer. Waits for the reads of an earlier
    /// migration, a few seconds at most, and closes its connections. `interface` counts the traffic sent by the
    /// interface with the [`MigrationOptions::interface_budget`].
    ///
    /// # Errors
    /// `reply` gets the errors of [`godwit_core::Controller::start_source`].
    pub fn start_source(
        &self,
        options: MigrationOptions,
        memory: ChunkMemory,
        streams: PeerStreams,
        interface: Option<InterfaceCounter>,
        reply: Reply<Result<(), StartError>>,
    ) {
        self.inner.send(Command::StartSource {
            options: Box::new(options),
            memory: Box::new(memory),
            streams,
            interface,
            reply,
        });
    }

    /// Starts to receive the disk, once all connections are up. Waits for the writes of an earlier incoming migration,
    /// and closes its connections.
    ///
    /// # Errors
    /// `reply` gets the errors of [`godwit_core::Controller::start_destination`].
    pub fn start_destination(
        &self,
        migration: MigrationId,
        peer_timeout: Duration,
        streams: PeerStreams,
        reply: Reply<Result<(), StartError>>,
    ) {
        self.inner.send(Command::StartDestination {
            migration,
            peer_timeout,
            streams,
            reply,
        });
    }

    /// Resumes the control connection to the other node of an undecided migration.
    pub fn control_up(&self, migration: MigrationId, control: PeerStream) {
        self.inner.send(Command::ControlUp { migration, control });
    }

    /// Forwards the I/O of this node's clients to the disk's owner on this connection, in place of an earlier one.
    pub fn forward(&self, sync: PeerStream) {
        self.inner.send(Command::Forward(sync));
    }

    /// Serves the I/O that `peer` forwards here on this connection. Replaces the earlier connection of `peer`, which is
    /// no longer read from. The new connection is read from once everything that arrived on the earlier one is done.
    pub fn serve_forwarded(&self, peer: String, sync: PeerStream) {
        self.inner.send(Command::ServeForwarded { peer, sync });
    }

    /// Pulls the missing parts of the disk on this connection, in place of an earlier one. A node that owes parts, as
    /// far as that node knows, has dialled this connection. Closed if this node owes a part itself. `shows_life`: the
    /// other node takes signs of life.
    pub fn pull(&self, stream: PeerStream, shows_life: bool) {
        self.inner.send(Command::Pull { stream, shows_life });
    }

    /// Lets the disk's owner pull the parts that this node owes, on a connection that this node has dialled, in place
    /// of an earlier one.
    pub fn owe(&self, stream: PeerStream) {
        self.inner.send(Command::Owe(stream));
    }

    /// Fetches the missing parts of the disk from its image on this connection, in place of an earlier one. Runs beside
    /// [`Self::pull`] if another node owes some of the parts, and otherwise as [`Self::pull`] does.
    pub fn fetch(&self, stream: PeerStream) {
        self.inner.send(Command::Fetch(stream));
    }

    /// Pulls missing parts of the disk on demand only, from now on.
    pub fn pull_on_demand_only(&self) {
        self.inner.send(ControllerCommand::PullOnDemandOnly);
    }

    /// Stops waiting for missing parts of the disk: requests for them get an I/O error. Parts that still arrive are
    /// used.
    pub fn abandon_missing(&self) {
        self.inner.send(ControllerCommand::AbandonMissing);
    }

    /// Begins a comparison of the disk with the image that it was created from. `reply` gets the result of
    /// [`godwit_core::Controller::begin_comparison`].
    pub fn begin_comparison(&self, reply: Reply<Result<Vec<u64>, StartError>>) {
        self.inner
            .send(ControllerCommand::BeginComparison { reply });
    }

    /// Ends the comparison with its result ([`godwit_core::Controller::end_comparison`]): the disk moves without the
    /// equal blocks.
    pub fn end_comparison(&self, different: Vec<u64>, same: Vec<u64>) {
        self.inner
            .send(ControllerCommand::EndComparison { different, same });
    }

    /// `reply` gets the result of a comparison, adjusted for later writes ([`godwit_core::Controller::compared`]).
    pub fn compared(&self, reply: Reply<Option<Compared>>) {
        self.inner.send(ControllerCommand::Compared { reply });
    }

    /// Forgets the comparison: the disk moves as a whole, or not at all.
    pub fn forget_comparison(&self) {
        self.inner.send(ControllerCommand::ForgetComparison);
    }

    /// Announces that the image will be emptied. `reply` gets true if that is allowed
    /// ([`godwit_core::Controller::give_up_image`]).
    pub fn give_up_image(&self, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::GiveUpImage { reply });
    }

    /// Confirms that the state of the last [`EngineEvent::StoreMissing`](crate::engine::EngineEvent::StoreMissing) is
    /// durable. The first call brings the notes for parts that arrive from then on.
    pub fn missing_stored(&self, notes: Option<MissingNotes>) {
        self.inner.send(Command::MissingStored { notes });
    }

    /// Confirms that the last [`EngineEvent::StoreActivity`](crate::engine::EngineEvent::StoreActivity) is durable: the
    /// log if `stored`, else its absence.
    pub fn activity_stored(&self, stored: bool) {
        self.inner
            .send(ControllerCommand::ActivityStored { stored });
    }

    /// Source, before [`Self::start_source`]: the destination's log of what may differ
    /// ([`godwit_core::Controller::may_differ`]).
    pub fn may_differ(&self, log: ActiveAreas) {
        self.inner.send(ControllerCommand::MayDiffer(log));
    }

    /// Cancels the migration under way if no point of no return has passed. `reply` gets true if the migration was
    /// cancelled.
    pub fn cancel(&self, reason: AbortReason, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::Cancel { reason, reply });
    }

    /// Announces that the guest has stopped: hands the disk over once the destination has everything
    /// ([`godwit_core::Controller::switch_over`]). `reply` gets true if an outgoing migration exists.
    pub fn switch_over(&self, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::SwitchOver { reply });
    }

    /// Changes the outgoing migration. `reply` gets the result of [`godwit_core::Controller::change_migration`].
    pub fn change_migration(&self, change: MigrationChange, reply: Reply<Result<(), ChangeError>>) {
        self.inner
            .send(ControllerCommand::ChangeMigration { change, reply });
    }

    /// `reply` gets the recent latencies of this node's clients, from before a migration changes them; nothing if the
    /// engine has ended.
    pub fn latency_baseline(&self, reply: Reply<Option<LatencyBaseline>>) {
        self.inner.send(Command::LatencyBaseline { reply });
    }

    /// Returns the disk's name.
    pub fn disk(&self) -> &str {
        &self.inner.disk
    }

    /// Returns the disk's size.
    pub fn capacity(&self) -> Sectors {
        self.inner.capacity
    }

    /// Carries out a step of the vhost-user protocol.
    pub(crate) fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply) {
        self.inner.send(Command::FrontEnd { command, reply });
    }

    /// Logs the pages of guest memory that this engine writes, or stops logging. After the reply, every write is logged
    /// that had not ended before. `reply` is dropped without a call if the engine has ended.
    pub fn log_writes(&self, pages: Option<Arc<WrittenPages>>, reply: Reply<()>) {
        self.inner.send(Command::LogWrites { pages, reply });
    }

    /// Announces that the virtual machine is about to be stopped because of
    /// [`EngineEvent::OutOfSpace`](crate::engine::EngineEvent::OutOfSpace), and will not move while stopped. The
    /// machine's rings may stop while requests wait for room. The requests are resumed when the machine runs again.
    pub fn machine_stands_still(&self) {
        self.inner.send(Command::MachineStandsStill);
    }

    /// Announces that the virtual machine that [stood still](Self::machine_stands_still), or was to, runs again. Rings
    /// that never stopped resume the requests left for their next life.
    pub fn machine_goes_on(&self) {
        self.inner.send(Command::MachineGoesOn);
    }

    /// Fails every request that waits for the disk's owner: the owner cannot be reached.
    pub fn fail_forwarded(&self) {
        self.inner.send(Command::FailForwarded);
    }

    /// Confirms that the record of the last [`EngineEvent::Persist`](crate::engine::EngineEvent::Persist) is durable.
    pub fn persisted(&self) {
        self.inner.send(ControllerCommand::Persisted);
    }

    /// Announces that another node's record shows a later owner: clients' requests are held from now on.
    pub fn surpass(&self) {
        self.inner.send(ControllerCommand::Surpass);
    }

    /// Holds all answers to clients until [`Self::go_alone`] or [`Self::yield_to`]
    /// ([`godwit_core::Controller::hold`]). A virtual machine that is to be stopped meanwhile
    /// [stands still](Self::machine_stands_still) first, or its rings wait for the answers.
    pub fn hold(&self) {
        self.inner.send(ControllerCommand::Hold);
    }

    /// Goes on without the node that followed the disk ([`godwit_core::Controller::go_alone`]).
    pub fn go_alone(&self) {
        self.inner.send(ControllerCommand::GoAlone);
    }

    /// Gives up a disk that the node that followed has taken. `reply` gets the result of
    /// [`godwit_core::Controller::yield_to`].
    pub fn yield_to(&self, epoch: Epoch, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::YieldTo { epoch, reply });
    }

    /// Takes nothing more from the source of a disk that follows here. `reply` gets the result of
    /// [`godwit_core::Controller::sever`].
    pub fn sever(&self, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::Sever { reply });
    }

    /// Becomes the owner of a severed disk that follows here. `reply` gets true if the taking has begun
    /// ([`godwit_core::Controller::take`]).
    pub fn take(&self, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::Take { reply });
    }

    /// Source: ends the epoch of a checkpoint. `reply` gets the result of
    /// [`godwit_core::Controller::mark_checkpoint`].
    pub fn mark_checkpoint(&self, number: u64, whole: u64, reply: Reply<bool>) {
        self.inner.send(ControllerCommand::MarkCheckpoint {
            number,
            whole,
            reply,
        });
    }

    /// Destination: applies the kept writes of a checkpoint and of all before. `reply` gets the result of
    /// [`godwit_core::Controller::apply_checkpoints`].
    pub fn apply_checkpoints(&self, number: u64, reply: Reply<bool>) {
        self.inner
            .send(ControllerCommand::ApplyCheckpoints { number, reply });
    }

    /// Confirms that the state of the last [`Event::SharingChanged`](godwit_core::event::Event::SharingChanged) is
    /// durable.
    pub fn sharing_stored(&self) {
        self.inner.send(ControllerCommand::SharingStored);
    }

    /// Announces that the record of the last [`EngineEvent::Persist`](crate::engine::EngineEvent::Persist), which gives
    /// the disk away, was not stored and never will be: the migration ends and this node serves on.
    pub fn not_persisted(&self, reason: AbortReason) {
        self.inner.send(ControllerCommand::NotPersisted { reason });
    }

    /// Returns the state that the engine last published.
    pub fn snapshot(&self) -> Snapshot {
        *self
            .inner
            .snapshot
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops taking requests, finishes the operations in flight within 5 seconds, flushes the image and ends the
    /// engine. A migration that can still be cancelled is cancelled.
    pub fn shutdown(&self) {
        self.inner.send(Command::Shutdown);
    }

    /// Waits for the engine's end. The second call returns at once.
    ///
    /// # Errors
    /// [`EngineError::Failed`] or [`EngineError::Flush`].
    pub fn join(self) -> Result<(), EngineError> {
        let thread = self
            .inner
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match thread.map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(EngineError::Failed {
                disk: self.inner.disk.clone(),
                cause: String::from("its thread panicked"),
            }),
        }
    }
}
