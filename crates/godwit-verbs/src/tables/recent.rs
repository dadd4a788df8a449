//! Keys of regions that are gone.
//!
//! Before a move, the device refuses such a key until the device assigns the key again. After a move the process has
//! another device, which might know the key as another region of the same process.

use std::collections::{BTreeSet, VecDeque};

/// Most remembered keys: some applications register memory for every message.
const MOST: usize = 1 << 16;

/// The keys that were given back last.
#[derive(Debug, Default)]
pub struct Recent {
    order: VecDeque<u32>,
    keys: BTreeSet<u32>,
}

impl Recent {
    /// Returns an empty set.
    pub const fn new() -> Self {
        Self {
            order: VecDeque::new(),
            keys: BTreeSet::new(),
        }
    }

    /// Adds `key`, which was just given back. A device may assign one key many times.
    pub fn push(&mut self, key: u32) {
        if !self.keys.insert(key) {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.keys.remove(&oldest);
        }
    }

    /// Returns true if `key` is remembered.
    pub fn contains(&self, key: u32) -> bool {
        self.keys.contains(&key)
    }

    /// Returns the number of remembered keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns true if no key is remembered.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns true if a remembered key lies in `range`.
    pub fn any_in(&self, range: std::ops::RangeInclusive<u32>) -> bool {
        self.keys.range(range).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_keys_are_remembered_and_no_more() {
        let mut recent = Recent::new();
        for key in 0..=MOST as u32 {
            recent.push(key);
            recent.push(key);
        }
        assert!(!recent.contains(0));
        assert!(recent.contains(1) && recent.contains(MOST as u32));
        assert!(recent.any_in(0..=1) && !recent.any_in(MOST as u32 + 1..=u32::MAX));
        assert_eq!((recent.order.len(), recent.keys.len()), (MOST, MOST));
    }
}
