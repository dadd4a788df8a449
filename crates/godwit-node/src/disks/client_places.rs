//! The places of a disk's NBD connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many connections a disk has, from the moment they are promised to the end of their memory.
#[derive(Debug, Default)]
pub(crate) struct Places(Arc<AtomicU32>);

/// One connection's place; free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicU32>);

impl Places {
    /// A place, unless `most` are taken.
    pub(crate) fn take(&self, most: u32) -> Option<Place> {
        let more = |taken: u32| (taken < most).then_some(taken + 1);
        self.0
            .try_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Place(Arc::clone(&self.0)))
    }

    /// Places that are taken.
    pub(crate) fn taken(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_taken_until_it_is_dropped() {
        let places = Places::default();
        let one = places.take(2).expect("a place");
        let two = places.take(2);
        assert!(two.is_some() && places.take(2).is_none());
        drop(one);
        assert_eq!(places.taken(), 1);
        assert!(places.take(2).is_some());
    }
}
