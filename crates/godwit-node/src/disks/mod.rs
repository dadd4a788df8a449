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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use disk::Disk;

use crate::api::{ErrorBody, ErrorCode};

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
