//! The disks of this node.

pub mod client_places;
pub mod disk;
pub mod following;
pub mod group;
pub mod jobs;
pub mod lifecycle;
pub mod storage;
pub mod vhost;
pub mod view;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use disk::Disk;
use godwit_core::event::Event;
use godwit_core::units::MigrationId;
use tokio::sync::watch;

use crate::disks::jobs::Jobs;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::Context;
use godwit_context::store::BaseImage;

/// An engine's message to the users of disks: moves and machines.
#[derive(Debug)]
pub enum Said {
    /// The engine serves, or will when the record allows.
    Started,
    /// An event of a migration or of forwarding.
    Core(Event),
    /// The disk is elsewhere, and no connection to its owner is up.
    ForwardDown,
    /// An operator claimed the disk while this migration was undecided.
    Claimed(MigrationId),
    /// The owner lacks a part of the disk, and no connection to the owner is up.
    PullDown,
    /// The image has no room for the guest's writes.
    OutOfSpace,
    /// A machine's request waits long for a missing part of the disk.
    WaitsLong,
    /// The engine ended by itself, together with a migration that is not in doubt.
    EngineFailed {
        /// The migration.
        migration: MigrationId,
        /// The reason why the engine ended.
        problem: String,
    },
}

/// The standing of a disk with the repository of its image.
#[derive(Debug, Default)]
pub struct Standing {
    /// True if the repository does not yet know that the disk needs the image.
    pub unnoted: bool,
    /// The reason for which an operator should look at the image, if any.
    pub warning: Option<String>,
}

/// The users of disks: moves, images and machines. Each of them knows disks, and disks know none.
pub trait DiskUsers: fmt::Debug + Send + Sync {
    /// Handles a message of an engine. The engine's next message waits until the future is ready.
    fn handle(&self, disk: Arc<Disk>, said: Said) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Returns the machine here that uses the disk.
    fn machine_with(&self, disk: &str) -> Option<String>;

    /// Returns true if the disk belongs to a machine that is still being received.
    fn arrives_with_machine(&self, disk: &str) -> bool;

    /// Returns the standing of the disk with the repository of its image. `fetching` is true while the disk still lacks
    /// parts of the image. Called under the disk's lock: takes no lock of a machine or a disk.
    fn standing(&self, disk: &str, base: &BaseImage, fetching: bool) -> Standing;

    /// Notes that a disk was removed, which may have been the last user of its image.
    fn removed(&self);
}

/// Most disks on one node.
const MAX_DISKS: usize = 4096;

/// The disks by name.
#[derive(Debug)]
pub struct Disks {
    /// Configuration, store and connections of the node.
    pub context: Arc<Context>,
    /// Imports and exports.
    pub jobs: Jobs,
    /// Signals every change of the stored owner of a disk.
    pub owners: watch::Sender<()>,
    users: OnceLock<Box<dyn DiskUsers>>,
    by_name: Mutex<BTreeMap<String, Arc<Disk>>>,
}

impl Disks {
    /// Creates the empty table. [`Self::set_users`] completes it.
    pub fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            jobs: Jobs::default(),
            owners: watch::Sender::new(()),
            users: OnceLock::new(),
            by_name: Mutex::default(),
        }
    }

    /// Sets the users of disks, once, before the first disk starts.
    pub fn set_users(&self, users: Box<dyn DiskUsers>) {
        let earlier = self.users.set(users);
        debug_assert!(earlier.is_ok(), "the users of disks are set once");
    }

    /// Passes an engine's message to the users of disks.
    pub async fn tell(&self, disk: &Arc<Disk>, said: Said) {
        if let Some(users) = self.users.get() {
            users.handle(Arc::clone(disk), said).await;
        }
    }

    /// Returns the machine here that uses the disk.
    pub fn machine_with(&self, disk: &str) -> Option<String> {
        self.users.get()?.machine_with(disk)
    }

    /// Returns the users of disks, once the node has all its parts.
    fn users(&self) -> Option<&dyn DiskUsers> {
        self.users.get().map(Box::as_ref)
    }

    /// Returns the disk of this name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, name: &str) -> Result<Arc<Disk>, ErrorBody> {
        self.find(name).ok_or_else(|| {
            let shown: String = name.chars().take(128).collect();
            ErrorBody::new(
                ErrorCode::NotFound,
                format!("there is no disk {shown:?} on this node"),
            )
            .hint("see 'godwit disk list'")
        })
    }

    /// Returns the disk of this name, if any.
    pub fn find(&self, name: &str) -> Option<Arc<Disk>> {
        self.lock().get(name).cloned()
    }

    /// Returns all disks in the order of their names.
    pub fn all(&self) -> Vec<Arc<Disk>> {
        self.lock().values().cloned().collect()
    }

    /// Adds a disk with a free name.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`], or [`ErrorCode::Busy`] at the limit.
    pub fn insert(&self, disk: &Arc<Disk>) -> Result<(), ErrorBody> {
        let mut disks = self.lock();
        if disks.contains_key(&disk.name) {
            return Err(ErrorBody::new(
                ErrorCode::Exists,
                format!("a disk named {:?} exists on this node", disk.name),
            )
            .hint("choose another name, or remove the disk with 'godwit disk rm'"));
        }
        if disks.len() >= MAX_DISKS {
            return Err(ErrorBody::new(
                ErrorCode::Busy,
                format!("this node has {MAX_DISKS} disks, the most it can"),
            ));
        }
        disks.insert(disk.name.clone(), Arc::clone(disk));
        Ok(())
    }

    /// Frees the name of a disk.
    pub fn remove(&self, name: &str) {
        self.lock().remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Disk>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
