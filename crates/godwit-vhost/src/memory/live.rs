//! The parts of files that this process's devices map as guest memory, until no device can write there.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::memory::relocated::Home;

/// The live mappings, by number.
#[derive(Debug, Default)]
struct Live {
    last: u64,
    mapped: HashMap<u64, Home>,
}

static LIVE: Mutex<Option<Live>> = Mutex::new(None);

fn all<R>(work: impl FnOnce(&mut Live) -> R) -> R {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    work(live.get_or_insert_default())
}

/// A record of mapped guest memory. Created before the memory is mapped, dropped after the memory is unmapped.
#[derive(Debug)]
pub(super) struct LiveMapping(u64);

impl LiveMapping {
    /// Records this part as mapped.
    pub(super) fn of(mapped: Home) -> Self {
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

/// Returns true if a device of this process maps a part of this memory. Requests under way keep the memory mapped until
/// they end, however long they take: a request to a stuck disk still writes there.
pub fn is_mapped(home: Home) -> bool {
    all(|live| {
        let mut regions = live.mapped.values();
        regions.any(|region| region.overlaps(home))
    })
}
