//! The engine's handle: commands go in through a queue, the state is read from what was published.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_core::event::AbortReason;
use godwit_core::units::{MigrationId, Sectors};
use godwit_core::{ChangeError, Compared, Limits, MigrationChange, MigrationOptions, StartError};

use crate::engine::config::EngineError;
use crate::engine::connections::streams::{ClientStream, PeerStream, PeerStreams};
use crate::engine::peers::link_signal::InterfaceCounter;
use crate::engine::slots::chunks::ChunkMemory;
use crate::engine::stats::baseline::LatencyBaseline;
use crate::engine::stats::snapshot::Snapshot;
use crate::image::missing::MissingNotes;
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError};

/// Called once with a command's result, on the engine's thread.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// What a handle asks of its engine.
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
    MissingStored {
        notes: Option<MissingNotes>,
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
    LatencyBaseline {
        reply: Reply<Option<LatencyBaseline>>,
    },
    FrontEnd {
        command: FrontEndCommand,
        reply: FrontEndReply,
    },
    MachineStandsStill,
    MachineGoesOn,
    FailForwarded,
    Persisted,
    Surpass,
    SharingStored,
    NotPersisted {
        reason: AbortReason,
    },
    Shutdown,
}

impl Command {
    /// Answers a command that came after the engine's end.
    pub(super) fn refuse(self) {
        match self {
            Self::StartSource { reply, .. } | Self::StartDestination { reply, .. } => {
                reply(Err(StartError::NotServing));
            }
            Self::BeginComparison { reply } => reply(Err(StartError::NotServing)),
            Self::Compared { reply } => reply(None),
            Self::Cancel { reply, .. }
            | Self::SwitchOver { reply }
            | Self::GiveUpImage { reply } => reply(false),
            Self::ChangeMigration { reply, .. } => reply(Err(ChangeError::NoMigration)),
            Self::LatencyBaseline { reply } => reply(None),
            Self::FrontEnd { reply, .. } => reply(Err(FrontEndError::Ended)),
            _ => {}
        }
    }
}

/// Wakes the engine's thread from its wait.
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

/// Controls a running engine. Clones control the same engine; when the last one is dropped the
/// engine shuts down. No method blocks except [`EngineHandle::chunk_memory`] and
/// [`EngineHandle::join`].
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
    fn send(&self, command: Command) {
        match self.commands.send(command) {
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
    /// Whether both are of the same engine.
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

    /// Serves an NBD client. Beyond [`EngineConfig::max_clients`](crate::engine::EngineConfig::max_clients)
    /// it is disconnected.
    pub fn attach(&self, client: ClientStream) {
        self.inner.send(Command::Attach(client));
    }

    /// Memory for a migration with these options. Blocks, for tens of milliseconds at worst, until what
    /// it needs first is committed.
    ///
    /// # Errors
    /// The kernel has no room for it.
    pub fn chunk_memory(&self, options: &MigrationOptions) -> io::Result<ChunkMemory> {
        ChunkMemory::new(&self.inner.limits, options)
    }

    /// Starts to move the disk away. The destination has accepted the offer. What an earlier
    /// migration still reads is waited for, a few seconds at most. Connections of an earlier
    /// migration are closed. `interface` counts what leaves by the interface whose
    /// [`MigrationOptions::interface_budget`] is to be kept.
    ///
    /// # Errors
    /// `reply` gets what [`godwit_core::Controller::start_source`] says.
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

    /// Starts to take the disk in, once all connections are up. What an earlier incoming migration
    /// still writes is waited for. Connections of an earlier migration are closed.
    ///
    /// # Errors
    /// `reply` gets what [`godwit_core::Controller::start_destination`] says.
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

    /// A control connection to the other node of an undecided migration is up again.
    pub fn control_up(&self, migration: MigrationId, control: PeerStream) {
        self.inner.send(Command::ControlUp { migration, control });
    }

    /// Forwards the I/O of this node's clients to the disk's owner on this connection, in place of
    /// an earlier one.
    pub fn forward(&self, sync: PeerStream) {
        self.inner.send(Command::Forward(sync));
    }

    /// Serves the I/O that `peer` forwards here on this connection. It replaces that node's earlier
    /// one: nothing more is read from that, and nothing is read from this one before everything
    /// that arrived on that is done.
    pub fn serve_forwarded(&self, peer: String, sync: PeerStream) {
        self.inner.send(Command::ServeForwarded { peer, sync });
    }

    /// On this connection, which another node has dialled that owes this one a part of the disk, as far as it knows, the
    /// disk pulls what it lacks, in place of an earlier one. Closed if this node owes a part itself. `shows_life`: the other
    /// node takes signs of life.
    pub fn pull(&self, stream: PeerStream, shows_life: bool) {
        self.inner.send(Command::Pull { stream, shows_life });
    }

    /// On this connection, which this node has dialled, the disk's owner pulls what this node owes, in place of an earlier
    /// one.
    pub fn owe(&self, stream: PeerStream) {
        self.inner.send(Command::Owe(stream));
    }

    /// On this connection the disk fetches what it lacks of its image, in place of an earlier one; beside [`Self::pull`] where
    /// another node owes some of what it lacks, and as there where none does.
    pub fn fetch(&self, stream: PeerStream) {
        self.inner.send(Command::Fetch(stream));
    }

    /// Of what the disk lacks only what somebody waits for is pulled from now on.
    pub fn pull_on_demand_only(&self) {
        self.inner.send(Command::PullOnDemandOnly);
    }

    /// What the disk lacks is not waited for any more: whoever needs it gets an I/O error. What comes all the same is used.
    pub fn abandon_missing(&self) {
        self.inner.send(Command::AbandonMissing);
    }

    /// Somebody begins to compare the disk with the image that it was created from; `reply` gets what
    /// [`godwit_core::Controller::begin_comparison`] says.
    pub fn begin_comparison(&self, reply: Reply<Result<Vec<u64>, StartError>>) {
        self.inner.send(Command::BeginComparison { reply });
    }

    /// What that found ([`godwit_core::Controller::end_comparison`]): the disk moves without what is the same.
    pub fn end_comparison(&self, different: Vec<u64>, same: Vec<u64>) {
        self.inner.send(Command::EndComparison { different, same });
    }

    /// `reply` gets what is known from a comparison, and from what was written since
    /// ([`godwit_core::Controller::compared`]).
    pub fn compared(&self, reply: Reply<Option<Compared>>) {
        self.inner.send(Command::Compared { reply });
    }

    /// The disk moves as a whole, or not at all.
    pub fn forget_comparison(&self) {
        self.inner.send(Command::ForgetComparison);
    }

    /// The image is about to be emptied; `reply` gets whether it may be
    /// ([`godwit_core::Controller::give_up_image`]).
    pub fn give_up_image(&self, reply: Reply<bool>) {
        self.inner.send(Command::GiveUpImage { reply });
    }

    /// What the last [`EngineEvent::StoreMissing`](crate::engine::EngineEvent::StoreMissing) asked for is durable;
    /// the first time with what notes what comes from then on.
    pub fn missing_stored(&self, notes: Option<MissingNotes>) {
        self.inner.send(Command::MissingStored { notes });
    }

    /// Ends the migration under way, if that is still possible; `reply` gets whether it was.
    pub fn cancel(&self, reason: AbortReason, reply: Reply<bool>) {
        self.inner.send(Command::Cancel { reason, reply });
    }

    /// The guest has stopped: hands the disk over as soon as the destination has everything
    /// ([`godwit_core::Controller::switch_over`]); `reply` gets whether a migration leaves.
    pub fn switch_over(&self, reply: Reply<bool>) {
        self.inner.send(Command::SwitchOver { reply });
    }

    /// Changes the migration that leaves; `reply` gets what [`godwit_core::Controller::change_migration`] says.
    pub fn change_migration(&self, change: MigrationChange, reply: Reply<Result<(), ChangeError>>) {
        self.inner.send(Command::ChangeMigration { change, reply });
    }

    /// How long this node's clients waited lately, before a migration changes it. `reply` gets
    /// nothing when the engine has ended.
    pub fn latency_baseline(&self, reply: Reply<Option<LatencyBaseline>>) {
        self.inner.send(Command::LatencyBaseline { reply });
    }

    /// The disk's name.
    pub fn disk(&self) -> &str {
        &self.inner.disk
    }

    /// The disk's size.
    pub fn capacity(&self) -> Sectors {
        self.inner.capacity
    }

    /// A step of the vhost-user protocol.
    pub(crate) fn front_end(&self, command: FrontEndCommand, reply: FrontEndReply) {
        self.inner.send(Command::FrontEnd { command, reply });
    }

    /// The virtual machine is about to be stopped because of
    /// [`EngineEvent::OutOfSpace`](crate::engine::EngineEvent::OutOfSpace), and will not move while it stands
    /// still: its rings may stop while requests wait for room. They are taken up when the machine goes
    /// on.
    pub fn machine_stands_still(&self) {
        self.inner.send(Command::MachineStandsStill);
    }

    /// The virtual machine that [stood still](Self::machine_stands_still), or was to, goes on: what was left for its rings'
    /// next life is taken up by those that never stopped.
    pub fn machine_goes_on(&self) {
        self.inner.send(Command::MachineGoesOn);
    }

    /// The disk's owner cannot be reached: fails every request that waits for it.
    pub fn fail_forwarded(&self) {
        self.inner.send(Command::FailForwarded);
    }

    /// The record of the last [`EngineEvent::Persist`](crate::engine::EngineEvent::Persist) is durable.
    pub fn persisted(&self) {
        self.inner.send(Command::Persisted);
    }

    /// Another node's record shows that this node is the owner no more: clients' requests are held from now on.
    pub fn surpass(&self) {
        self.inner.send(Command::Surpass);
    }

    /// What the last [`Event::SharingChanged`](godwit_core::event::Event::SharingChanged) said is durable.
    pub fn sharing_stored(&self) {
        self.inner.send(Command::SharingStored);
    }

    /// The record of the last [`EngineEvent::Persist`](crate::engine::EngineEvent::Persist), which gives the
    /// disk away, was not stored and never will be: the migration ends and this node serves on.
    pub fn not_persisted(&self, reason: AbortReason) {
        self.inner.send(Command::NotPersisted { reason });
    }

    /// What the engine last published.
    pub fn snapshot(&self) -> Snapshot {
        *self
            .inner
            .snapshot
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops taking requests, finishes what is in flight within 5 seconds, flushes the image and
    /// ends. A migration that can still be ended is cancelled.
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
