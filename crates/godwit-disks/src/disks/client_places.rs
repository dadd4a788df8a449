//! The places of a disk's NBD connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of a disk's connections: counted from the promise of a place until the connection's memory is freed.
#[derive(Debug, Default)]
pub struct Places(Arc<AtomicU32>);

/// The place of one connection, freed on drop.
#[derive(Debug)]
pub struct Place(Arc<AtomicU32>);

impl Places {
    /// Returns a place unless `most` places are taken.
    pub fn take(&self, most: u32) -> Option<Place> {
        let more = |taken: u32| (taken < most).then_some(taken + 1);
        self.0
            .try_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Place(Arc::clone(&self.0)))
    }

    /// Returns the number of taken places.
    pub fn taken(&self) -> u32 {
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
