//! Virtual local keys (the RDMA live-migration paper, section 3.3): handed out one by one, so that translation is one
//! array access.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// No key is free: the application has as many memory regions as the table has entries.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// From the local key that an application knows to the one that the device knows.
///
/// The array is made once and never moves, so that the data path reads it without a lock. Entry 0
/// is never given out: an application that forgot to set a key is refused by the device, as ever.
pub struct LocalKeys {
    physical: Box<[AtomicU32]>,
    unused: Mutex<Unused>,
}

struct Unused {
    /// The first entry that was never given out.
    fresh: u32,
    returned: VecDeque<u32>,
}

impl LocalKeys {
    /// A table for `entries` memory regions.
    pub fn new(entries: usize) -> Self {
        Self {
            physical: (0..=entries).map(|_| AtomicU32::new(0)).collect(),
            unused: Mutex::new(Unused {
                fresh: 1,
                returned: VecDeque::new(),
            }),
        }
    }

    /// Gives out a virtual key for `physical`.
    ///
    /// # Errors
    /// [`Full`] when every key is in use.
    pub fn give(&self, physical: u32) -> Result<u32, Full> {
        // Fresh keys first: a key that was returned is given out again as late as possible, so
        // that its use after deregistration fails instead of reaching another region.
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        let key = if (unused.fresh as usize) < self.physical.len() {
            unused.fresh += 1;
            unused.fresh - 1
        } else {
            unused.returned.pop_front().ok_or(Full)?
        };
        self.physical[key as usize].store(physical, Ordering::Release);
        Ok(key)
    }

    /// The region behind `key` has another physical key now.
    pub fn change(&self, key: u32, physical: u32) {
        if let Some(entry) = self.physical.get(key as usize) {
            entry.store(physical, Ordering::Release);
        }
    }

    /// The region behind `key` is gone.
    pub fn take_back(&self, key: u32) {
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        // No device's key is 0, so an entry that has one is in use.
        if key > 0
            && key < unused.fresh
            && self.physical[key as usize].swap(0, Ordering::AcqRel) != 0
        {
            unused.returned.push_back(key);
        }
    }

    /// What the device knows `key` as; 0, which no device accepts, for a key that is not in use.
    #[inline]
    pub fn physical(&self, key: u32) -> u32 {
        match self.physical.get(key as usize) {
            Some(entry) => entry.load(Ordering::Relaxed),
            None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn keys_are_dense_and_zero_is_never_one() {
        let keys = LocalKeys::new(3);
        assert_eq!(
            [keys.give(70), keys.give(71), keys.give(72)],
            [Ok(1), Ok(2), Ok(3)]
        );
        assert_eq!(keys.give(73), Err(Full));
        assert_eq!(
            (keys.physical(0), keys.physical(4), keys.physical(u32::MAX)),
            (0, 0, 0)
        );
    }

    #[test]
    fn a_key_taken_back_reaches_nothing_and_is_given_out_last() {
        let keys = LocalKeys::new(2);
        let first = keys.give(70).unwrap();
        keys.take_back(first);
        keys.take_back(first);
        assert_eq!(keys.physical(first), 0);
        assert_eq!(
            (keys.give(71), keys.give(72), keys.give(73)),
            (Ok(2), Ok(1), Err(Full))
        );
    }

    proptest! {
        /// Whatever is given out, changed and taken back: a key always means its own region.
        #[test]
        fn a_key_means_its_region(steps in prop::collection::vec((0u8..3, 1u32.., 0usize..8), 1..200)) {
            let keys = LocalKeys::new(16);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (step, physical, which) in steps {
                let chosen = model.keys().copied().nth(which);
                match (step, chosen) {
                    (0, _) => match keys.give(physical) {
                        Ok(key) => prop_assert!(model.insert(key, physical).is_none()),
                        Err(Full) => prop_assert_eq!(model.len(), 16),
                    },
                    (1, Some(key)) => {
                        keys.change(key, physical);
                        model.insert(key, physical);
                    }
                    (_, Some(key)) => {
                        keys.take_back(key);
                        model.remove(&key);
                    }
                    _ => {}
                }
                for key in 0..20 {
                    prop_assert_eq!(keys.physical(key), model.get(&key).copied().unwrap_or(0));
                }
            }
        }
    }
}
