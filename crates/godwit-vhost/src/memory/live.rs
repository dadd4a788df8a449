//! Which parts of which files the devices of this process map as guest memory, until nothing of them can be written there.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::memory::relocated::Home;

/// The mappings that live, by a number of each.
#[derive(Debug, Default)]
struct Live {
    last: u64,
    mapped: HashMap<u64, Vec<Home>>,
}

static LIVE: Mutex<Option<Live>> = Mutex::new(None);

fn all<R>(work: impl FnOnce(&mut Live) -> R) -> R {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    work(live.get_or_insert_default())
}

/// Says that guest memory is mapped, for as long as it lives. It is made before the memory is mapped, and ends after it.
#[derive(Debug)]
pub(super) struct LiveMapping(u64);

impl LiveMapping {
    /// Says so of these parts.
    pub(super) fn of(mapped: Vec<Home>) -> Self {
        Self(all(|live| {
            live.last += 1;
            live.mapped.insert(live.last, mapped);
            live.last
        }))
    }
}

impl Drop for LiveMapping {
    fn drop(&mut self) {
        all(|live| live.mapped.remove(&self.0));
    }
}

/// Whether a device of this process maps a part of this memory. What a device has begun keeps it mapped until that has
/// ended, however long that takes: a request to a disk that does not answer still writes there.
pub fn is_mapped(home: Home) -> bool {
    all(|live| {
        let mut regions = live.mapped.values().flatten();
        regions.any(|region| region.overlaps(home))
    })
}
