//! Local keys of a process that has moved (the RDMA live-migration paper, section 3.3).
//!
//! An application knows a region by the local key that the device assigned at registration. Until the process moves,
//! this key is the device's key and nothing is translated. After a move each key is translated by two array accesses:
//! real keys are sparse, so a single array for all keys would take 16 GiB.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Keys in a leaf: a page of memory. Devices put an index into a key's upper 24 bits.
const LEAF_BITS: u32 = 10;
const LEAF: usize = 1 << LEAF_BITS;
/// Leaves: 32 MiB of address space, touched only as used.
const LEAVES: usize = 1 << (u32::BITS - LEAF_BITS);

type Leaf = [AtomicU32; LEAF];

/// A map from the application's local keys to the device's.
///
/// Arrays are made on demand and never move or go, so that the data path reads without a lock.
pub struct LocalKeys {
    leaves: AtomicPtr<AtomicPtr<Leaf>>,
    /// Held while a leaf is added.
    adding: Mutex<()>,
}

impl LocalKeys {
    /// Returns a table without keys.
    pub const fn new() -> Self {
        Self {
            leaves: AtomicPtr::new(ptr::null_mut()),
            adding: Mutex::new(()),
        }
    }

    /// Maps the application's key `known` to the device's key `physical`. Key 0 stays invalid for every device.
    pub fn set(&self, known: u32, physical: u32) {
        if known == 0 {
            return;
        }
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let mut leaves = self.leaves.load(Ordering::Acquire);
        if leaves.is_null() {
            // SAFETY: pointers and integers of zero are valid.
            let zeroed =
                unsafe { Box::<[AtomicPtr<Leaf>]>::new_zeroed_slice(LEAVES).assume_init() };
            leaves = Box::leak(zeroed).as_mut_ptr();
            self.leaves.store(leaves, Ordering::Release);
        }
        // SAFETY: the array has an entry for every upper part of a key, and is never freed.
        let place = unsafe { &*leaves.add((known >> LEAF_BITS) as usize) };
        let mut leaf = place.load(Ordering::Acquire);
        if leaf.is_null() {
            // SAFETY: as above.
            leaf = Box::into_raw(unsafe { Box::<Leaf>::new_zeroed().assume_init() });
            place.store(leaf, Ordering::Release);
        }
        // SAFETY: leaves are never freed.
        let leaf = unsafe { &*leaf };
        leaf[known as usize % LEAF].store(physical, Ordering::Release);
    }

    /// Forgets the key `known` of a region that is gone.
    pub fn forget(&self, known: u32) {
        if let Some(entry) = self.entry(known) {
            entry.store(0, Ordering::Release);
        }
    }

    /// Returns the device's key for `known`; 0, which no device accepts, for a key that is not in use.
    #[inline]
    pub fn physical(&self, known: u32) -> u32 {
        self.entry(known)
            .map_or(0, |entry| entry.load(Ordering::Relaxed))
    }

    #[inline]
    fn entry(&self, known: u32) -> Option<&AtomicU32> {
        let leaves = self.leaves.load(Ordering::Acquire);
        if leaves.is_null() {
            return None;
        }
        // SAFETY: the array has an entry for every upper part of a key, and is never freed.
        let leaf = unsafe { &*leaves.add((known >> LEAF_BITS) as usize) }.load(Ordering::Acquire);
        // SAFETY: leaves are never freed.
        unsafe { leaf.as_ref() }.map(|leaf| &leaf[known as usize % LEAF])
    }
}

impl Default for LocalKeys {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn a_key_that_is_not_in_use_reaches_nothing() {
        let keys = LocalKeys::new();
        assert_eq!((keys.physical(7), keys.physical(0)), (0, 0));
        keys.set(7, 70);
        keys.set(0, 71);
        keys.set(u32::MAX, 72);
        assert_eq!(
            [0, 6, 7, 8, u32::MAX].map(|key| keys.physical(key)),
            [0, 0, 70, 0, 72]
        );
        keys.forget(7);
        keys.forget(9 << LEAF_BITS);
        assert_eq!((keys.physical(7), keys.physical(u32::MAX)), (0, 72));
    }

    proptest! {
        /// After any sequence of `set` and `forget`, a key means its own region.
        #[test]
        fn a_key_means_its_region(steps in prop::collection::vec((any::<bool>(), 0u32..6, 0u32..4, 1u32..), 1..100)) {
            let keys = LocalKeys::new();
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (set, index, variant, physical) in steps {
                // Keys as devices assign them: an index, and a byte that varies.
                let known = index << 30 | index << 8 | variant;
                if set && known != 0 {
                    keys.set(known, physical);
                    model.insert(known, physical);
                } else {
                    keys.forget(known);
                    model.remove(&known);
                }
                for index in 0..6 {
                    for variant in 0..5 {
                        let known = index << 30 | index << 8 | variant;
                        prop_assert_eq!(keys.physical(known), model.get(&known).copied().unwrap_or(0));
                    }
                }
            }
        }
    }
}
