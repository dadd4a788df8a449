//! The progress of a push or a pull.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::RepositoryError;

/// Counters that a display reads while a push or a pull runs.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
    moved: AtomicU64,
    waits_for: Mutex<Option<String>>,
}

impl Progress {
    /// Bytes of data to process, as far as known; holes do not count.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Bytes of data processed.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes sent to or fetched from the repository.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Returns the reason for a pause while requests are retried.
    pub fn waits(&self) -> Option<String> {
        self.lock().clone()
    }

    pub(crate) fn waits_for(&self, why: &RepositoryError) {
        *self.lock() = Some(why.to_string());
    }

    pub(crate) fn goes_on(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.waits_for
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn expect(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, done: u64, moved: u64) {
        self.done.fetch_add(done, Ordering::Relaxed);
        self.moved.fetch_add(moved, Ordering::Relaxed);
    }
}
