//! The disks of this node.

pub(crate) mod client_places;
pub(crate) mod disk;
pub(crate) mod group;
pub(crate) mod jobs;
pub(crate) mod lifecycle;
pub(crate) mod storage;
pub(crate) mod vhost;
pub(crate) mod view;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use disk::Disk;
use godwit_core::event::Event;
use godwit_core::units::MigrationId;

use crate::node::Node;

use godwit_api::{ErrorBody, ErrorCode};

/// What a disk's engine says to those who use disks: moves and machines.
#[derive(Debug)]
pub(crate) enum Said {
    /// It serves, or will when it may.
    Started,
    /// Something happened to a migration, or to what is forwarded.
    Core(Event),
    /// The disk is elsewhere, and nothing leads to its owner.
    ForwardDown,
    /// An operator took it while this migration was not decided.
    Claimed(MigrationId),
    /// Its owner lacks a part of it, and no connection to that is up.
    PullDown,
    /// The image has no room for what a guest writes.
    OutOfSpace,
    /// A machine's request waits long for a part of the disk that is not here.
    WaitsLong,
    /// The engine ended by itself, and a migration with it that nobody else has to decide.
    EngineFailed {
        /// Which migration.
        migration: MigrationId,
        /// Why it ended.
        problem: String,
    },
}

/// Hears what engines say. The engine's next word waits until the future is ready.
pub(crate) type DiskUsers =
    fn(Arc<Node>, Arc<Disk>, Said) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// Most disks on one node.
const MAX_DISKS: usize = 4096;

/// The disks by name.
#[derive(Debug, Default)]
pub(crate) struct Disks {
    by_name: Mutex<BTreeMap<String, Arc<Disk>>>,
}

impl Disks {
    /// The disk of this name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Disk>, ErrorBody> {
        self.find(name).ok_or_else(|| {
            let shown: String = name.chars().take(128).collect();
            ErrorBody::new(
                ErrorCode::NotFound,
                format!("there is no disk {shown:?} on this node"),
            )
            .hint("see 'godwit disk list'")
        })
    }

    /// The disk of this name, if there is one.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Disk>> {
        self.lock().get(name).cloned()
    }

    /// All disks in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<Disk>> {
        self.lock().values().cloned().collect()
    }

    /// Adds a disk whose name is free.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`], or [`ErrorCode::Busy`] at the limit.
    pub(crate) fn insert(&self, disk: &Arc<Disk>) -> Result<(), ErrorBody> {
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

    /// Takes a disk out.
    pub(crate) fn remove(&self, name: &str) {
        self.lock().remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Disk>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
