//! One disk of this node: what is stored about it, its engine, and what is being done with it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_block::engine::EngineHandle;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{DiskId, MigrationId};
use godwit_core::wire::Features;
use godwit_vhost::VhostUserServer;
use tokio::task::{AbortHandle, JoinHandle};

use crate::disks::client_places::Places;
use crate::disks::group::SwitchGroup;
use crate::store::{DiskEntry, Mark};
use godwit_api::{DiskState, ErrorBody, ErrorCode};

/// A disk. Its lock is held for moments only, never across an await.
#[derive(Debug)]
pub(crate) struct Disk {
    /// Its name.
    pub(crate) name: String,
    /// NBD clients attached, as the engine last said.
    pub(crate) clients: Arc<AtomicU32>,
    /// The places of NBD clients, those included that are about to attach.
    pub(crate) places: Places,
    /// Held while an engine ends: the next one cannot have the image before.
    pub(crate) ending: tokio::sync::Mutex<()>,
    /// Held while the disk is compared with its image: what one found is not for another that began later.
    pub(crate) comparing: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

/// The part of a [`Disk`] that changes.
#[derive(Debug)]
pub(crate) struct Inner {
    /// What is stored.
    pub(crate) entry: DiskEntry,
    /// The authority record that is stored.
    pub(crate) record: AuthorityRecord,
    /// The engine, once it runs.
    pub(crate) engine: Option<Engine>,
    /// What is being done with the disk.
    pub(crate) activity: Activity,
    /// Why the disk cannot be used.
    pub(crate) problem: Option<String>,
    /// The task that looks for the other node of an undecided migration.
    pub(crate) resolver: Option<AbortHandle>,
    /// Whether a task looks for the disk's owner, to forward to it.
    pub(crate) forwarding: bool,
    /// The owner, which lacks a part of the disk, is being connected to.
    pub(crate) connecting_owner: bool,
    /// Why a part of the image that it was created from cannot be fetched now.
    pub(crate) image_trouble: Option<String>,
    /// The disks together with which it is about to leave.
    pub(crate) group: Option<Arc<SwitchGroup>>,
    /// Whether virtual machines must wait: see [`crate::disks::vhost::Held`].
    pub(crate) vhost_held: bool,
}

/// A running engine.
#[derive(Debug)]
pub(crate) struct Engine {
    /// Controls it.
    pub(crate) handle: EngineHandle,
    /// Serves the disk to virtual machines.
    pub(crate) vhost: Option<VhostUserServer>,
    /// The task that takes its events; it ends with the engine.
    pub(crate) events: JoinHandle<()>,
}

/// What is being done with a disk: one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Nothing but serving.
    Idle,
    /// Its image is made or copied in.
    Creating,
    /// Its image is copied out.
    Exporting,
    /// It is being removed.
    Removing,
    /// An operator takes it.
    Claiming,
    /// It is being made larger.
    Resizing,
    /// It moves away.
    Outgoing(MigrationId),
    /// It comes in.
    Incoming(MigrationId),
}

impl Activity {
    /// What is being done, in words that follow "the disk is".
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Creating => "being created",
            Self::Exporting => "being exported",
            Self::Removing => "being removed",
            Self::Claiming => "being claimed",
            Self::Resizing => "being made larger",
            Self::Outgoing(_) => "migrating to another node",
            Self::Incoming(_) => "being received from another node",
        }
    }

    /// The migration, if it is one.
    pub(crate) const fn migration(self) -> Option<MigrationId> {
        match self {
            Self::Outgoing(migration) | Self::Incoming(migration) => Some(migration),
            _ => None,
        }
    }
}

impl Disk {
    pub(crate) fn new(
        name: String,
        entry: DiskEntry,
        record: AuthorityRecord,
        activity: Activity,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            clients: Arc::default(),
            places: Places::default(),
            ending: tokio::sync::Mutex::default(),
            comparing: tokio::sync::Mutex::default(),
            inner: Mutex::new(Inner {
                entry,
                record,
                engine: None,
                activity,
                problem: None,
                resolver: None,
                forwarding: false,
                connecting_owner: false,
                image_trouble: None,
                group: None,
                vhost_held: false,
            }),
        })
    }

    /// The part that changes.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What tells it from others of its name, for a node that knows these parts of the protocol.
    pub(crate) fn id_for(&self, knows: Features) -> Option<DiskId> {
        let id = self.lock().entry.id;
        id.filter(|_| knows.contain(Features::OWNERS))
    }

    /// NBD clients attached.
    pub(crate) fn clients(&self) -> u32 {
        self.clients.load(Ordering::Relaxed)
    }

    /// The engine's handle, while it runs.
    pub(crate) fn engine(&self) -> Option<EngineHandle> {
        self.lock()
            .engine
            .as_ref()
            .map(|engine| engine.handle.clone())
    }

    /// Begins something with the disk if nothing else is under way and `allowed` agrees. It ends
    /// when the returned guard is dropped.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming what is under way, or what `allowed` says.
    pub(crate) fn begin(
        self: &Arc<Self>,
        activity: Activity,
        allowed: impl FnOnce(&Inner) -> Result<(), ErrorBody>,
    ) -> Result<ActivityGuard, ErrorBody> {
        let mut inner = self.lock();
        // The migration that has left a disk in doubt does not end by itself when the other node is lost.
        let undecided = inner.in_doubt();
        let claims = activity == Activity::Claiming
            && undecided.is_some()
            && inner.activity.migration() == undecided;
        if inner.activity != Activity::Idle && !claims {
            let error = ErrorBody::new(
                ErrorCode::Conflict,
                format!("disk {} is {}", self.name, inner.activity.describe()),
            );
            return Err(match inner.activity.migration() {
                Some(migration) => {
                    error.hint(format!("wait for migration {migration}, or cancel it"))
                }
                None => error.hint("try again when that is done"),
            });
        }
        allowed(&inner)?;
        inner.activity = activity;
        Ok(ActivityGuard {
            disk: Arc::clone(self),
            activity,
        })
    }

    /// Ends an activity, if it is still the one under way.
    pub(crate) fn end(&self, activity: Activity) {
        let mut inner = self.lock();
        if inner.activity == activity {
            inner.activity = Activity::Idle;
            inner.group = None;
        }
    }
}

impl Inner {
    /// What this node knows about its right to serve the disk.
    pub(crate) fn state(&self) -> DiskState {
        if self.problem.is_some() && self.engine.is_none() {
            return DiskState::Failed;
        }
        match self.record.ownership {
            _ if self.entry.mark == Some(Mark::Creating) => DiskState::Importing,
            Ownership::Serving if self.entry.surpassed.is_some() => DiskState::Outdated,
            Ownership::Serving => DiskState::Serving,
            Ownership::Accepted { .. } => DiskState::Accepted,
            Ownership::Relinquished { .. } => DiskState::Relinquished,
            Ownership::Vacant | Ownership::Departed { .. } => {
                if matches!(self.activity, Activity::Incoming(_)) {
                    DiskState::Receiving
                } else {
                    DiskState::Departed
                }
            }
        }
    }

    /// Whether writes of the disk's virtual machine wait because its image has no room for them.
    pub(crate) fn lacks_room(&self) -> bool {
        let engine = self.engine.as_ref();
        engine.is_some_and(|engine| engine.handle.snapshot().lacks_room)
    }

    /// Whether all of the disk is here, so that it can be `done` with as a whole.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`]: a part is still at the node that gave it away.
    pub(crate) fn is_whole(&self, name: &str, done: &str) -> Result<(), ErrorBody> {
        if self.record.lacks().is_none() {
            return Ok(());
        }
        if let Some(base) = self.entry.fetches(&self.record) {
            let text = format!(
                "disk {name} cannot be {done} yet: a part of it is still in image '{}', from where it is fetched",
                base.image
            );
            let hint = if base.prefetch {
                format!(
                    "try again when all of it is here: godwit disk show {name} tells what is left"
                )
            } else {
                String::from("it fetches only what is read: read all of it once, and try again")
            };
            return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(hint));
        }
        Err(self.needs_source(name, done))
    }

    /// Whether the disk can move, as far as what it lacks is concerned: that stays in its image, if it is nowhere else.
    ///
    /// # Errors
    /// For people: where what it lacks is, and what to do.
    pub(crate) fn may_leave(&self, name: &str) -> Result<(), ErrorBody> {
        if self.entry.fetches(&self.record).is_none() {
            return self.is_whole(name, "moved");
        }
        let engine = self.engine.as_ref();
        match engine.is_some_and(|engine| engine.handle.snapshot().needs_source) {
            true => Err(self.needs_source(name, "moved")),
            false => Ok(()),
        }
    }

    fn needs_source(&self, name: &str, done: &str) -> ErrorBody {
        let from = self.entry.counterpart.as_deref();
        let from = from.unwrap_or("the node that it came from");
        let text = format!(
            "disk {name} cannot be {done} yet: a part of it is still at node '{from}', from where it is \
             being pulled"
        );
        ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
            "try again when all of that is here: godwit disk show {name} tells what is left"
        ))
    }

    /// The undecided migration, when this node cannot know by itself who owns the disk.
    pub(crate) const fn in_doubt(&self) -> Option<MigrationId> {
        match self.record.ownership {
            Ownership::Accepted { migration } | Ownership::Relinquished { migration } => {
                Some(migration)
            }
            _ => None,
        }
    }
}

/// Something under way with a disk; dropping it ends that.
#[derive(Debug)]
pub(crate) struct ActivityGuard {
    disk: Arc<Disk>,
    activity: Activity,
}

impl ActivityGuard {
    /// Leaves the activity under way: an event will end it.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.disk.end(self.activity);
    }
}
