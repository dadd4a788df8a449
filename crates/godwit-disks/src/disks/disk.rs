//! A disk of this node: its stored entry, its engine and its current activity.

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
use godwit_api::{DiskState, ErrorBody, ErrorCode};
use godwit_context::store::{DiskEntry, Mark};

/// A disk. The lock is held for moments only, never across an await.
#[derive(Debug)]
pub struct Disk {
    /// The disk's name, unique on the node.
    pub name: String,
    /// NBD clients attached, as last reported by the engine.
    pub clients: Arc<AtomicU32>,
    /// The places of NBD clients, including clients about to attach.
    pub places: Places,
    /// Held while an engine ends: the image is free for the next engine only afterwards.
    pub ending: tokio::sync::Mutex<()>,
    /// Held during a comparison of the disk with its image: the result of one comparison is not valid for a later one.
    pub(crate) comparing: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

/// The mutable part of a [`Disk`].
#[derive(Debug)]
pub struct Inner {
    /// The stored entry.
    pub entry: DiskEntry,
    /// The stored authority record.
    pub record: AuthorityRecord,
    /// The engine, once it runs.
    pub engine: Option<Engine>,
    /// The current activity.
    pub activity: Activity,
    /// The reason why the disk cannot be used.
    pub problem: Option<String>,
    /// The task looking for the other node of an undecided migration.
    pub(crate) resolver: Option<AbortHandle>,
    /// True while a task looks for the disk's owner in order to forward to the owner.
    pub(crate) forwarding: bool,
    /// True while this node connects to the owner, which lacks a part of the disk.
    pub(crate) connecting_owner: bool,
    /// The reason why a part of the base image cannot be fetched now.
    pub(crate) image_trouble: Option<String>,
    /// The disks that are about to leave together with this one.
    pub group: Option<Arc<SwitchGroup>>,
    /// True while no request may be answered, because a backup may have taken the disk.
    pub held: bool,
    /// True while virtual machines must wait: see [`crate::disks::vhost::Held`].
    pub(crate) vhost_held: bool,
}

/// A running engine.
#[derive(Debug)]
pub struct Engine {
    /// Gives the engine its commands.
    pub handle: EngineHandle,
    /// The server of the disk to virtual machines.
    pub vhost: Option<VhostUserServer>,
    /// The task that takes the engine's events; ends with the engine.
    pub events: JoinHandle<()>,
}

/// The activity of a disk. A disk has one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// No activity but serving.
    Idle,
    /// The image is made or copied in.
    Creating,
    /// The image is copied out.
    Exporting,
    /// The disk is being removed.
    Removing,
    /// An operator claims ownership.
    Claiming,
    /// The disk is being made larger.
    Resizing,
    /// The disk migrates to another node.
    Outgoing(MigrationId),
    /// The disk is received from another node.
    Incoming(MigrationId),
}

impl Activity {
    /// Describes the activity in words to follow "the disk is".
    pub const fn describe(self) -> &'static str {
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

    /// Returns the migration of an outgoing or incoming disk.
    pub const fn migration(self) -> Option<MigrationId> {
        match self {
            Self::Outgoing(migration) | Self::Incoming(migration) => Some(migration),
            _ => None,
        }
    }
}

impl Disk {
    /// Creates a disk without an engine.
    pub fn new(
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
                held: false,
                vhost_held: false,
            }),
        })
    }

    /// Locks the mutable part.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the disk's id, which distinguishes disks of the same name, if the other node knows [`Features::OWNERS`].
    pub(crate) fn id_for(&self, knows: Features) -> Option<DiskId> {
        let id = self.lock().entry.id;
        id.filter(|_| knows.contain(Features::OWNERS))
    }

    /// Returns the number of attached NBD clients.
    pub fn clients(&self) -> u32 {
        self.clients.load(Ordering::Relaxed)
    }

    /// Returns the engine's handle while the engine runs.
    pub fn engine(&self) -> Option<EngineHandle> {
        self.lock()
            .engine
            .as_ref()
            .map(|engine| engine.handle.clone())
    }

    /// Begins an activity if the disk is idle and `allowed` agrees. The activity ends when the returned guard is
    /// dropped.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming the current activity, or the error of `allowed`.
    pub fn begin(
        self: &Arc<Self>,
        activity: Activity,
        allowed: impl FnOnce(&Inner) -> Result<(), ErrorBody>,
    ) -> Result<ActivityGuard, ErrorBody> {
        let mut inner = self.lock();
        // The migration of a disk in doubt does not end by itself when the other node is lost. A claim replaces such a
        // migration.
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

    /// Ends an activity unless another has replaced it.
    pub fn end(&self, activity: Activity) {
        let mut inner = self.lock();
        if inner.activity == activity {
            inner.activity = Activity::Idle;
            inner.group = None;
        }
    }
}

impl Inner {
    /// Returns the disk's state as known to this node.
    pub fn state(&self) -> DiskState {
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

    /// Returns true while writes of the virtual machine wait because the file system has no room for the image.
    pub fn lacks_room(&self) -> bool {
        let engine = self.engine.as_ref();
        engine.is_some_and(|engine| engine.handle.snapshot().lacks_room)
    }

    /// Checks that the whole disk is here and can be `done`.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] if a part is still in the base image, or at the node that gave the disk away.
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

    /// Checks that the missing parts of the disk allow a move. Parts in the base image only may stay there.
    ///
    /// # Errors
    /// For people: the place of the missing parts, and the remedy.
    pub fn may_leave(&self, name: &str) -> Result<(), ErrorBody> {
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

    /// Returns the undecided migration if this node alone cannot know the owner.
    pub const fn in_doubt(&self) -> Option<MigrationId> {
        match self.record.ownership {
            Ownership::Accepted { migration } | Ownership::Relinquished { migration } => {
                Some(migration)
            }
            _ => None,
        }
    }
}

/// An activity under way; dropping the guard ends the activity.
#[derive(Debug)]
pub struct ActivityGuard {
    disk: Arc<Disk>,
    activity: Activity,
}

impl ActivityGuard {
    /// Leaves the activity under way for an event to end.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.disk.end(self.activity);
    }
}
