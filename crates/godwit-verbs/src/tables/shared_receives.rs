//! Receives of a shared receive queue that were posted and have not completed.
//!
//! Several queue pairs take from the queue, and completions come in any order. So each receive gets a place, and the
//! device gets the place's number instead of the application's name of the receive.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::Receive;
use crate::abi::ibv_sge;

/// Marks a place's number. A failed completion does not tell receives from sends, so the mark does.
const MARK: u64 = 0x6764_7773_0000_0000;
const MARKED: u64 = 0xffff_ffff_0000_0000;

/// The shadow of a shared receive queue, with one poster at a time (the holder of the queue's gate) and any number of
/// completers, each with its own receive.
pub struct SharedReceives {
    places: Box<[Place]>,
    sges: Box<[UnsafeCell<ibv_sge>]>,
    sges_each: usize,
    /// Begin of the search for a free place; the poster's own.
    next: AtomicU32,
    /// The number of the next receive, from 1; the poster's own.
    order: AtomicU64,
}

struct Place {
    /// The receive's number; 0 if the place is free.
    order: AtomicU64,
    noted: UnsafeCell<(u64, u32)>,
}

// SAFETY: the poster writes only free places and publishes each with release; a completer reads a place before freeing
// it with release, and the poster looks with acquire.
unsafe impl Sync for SharedReceives {}
// SAFETY: nothing in the queue belongs to a thread.
unsafe impl Send for SharedReceives {}

impl SharedReceives {
    /// Returns the shadow of a queue of `length` receives of at most `sges_each` pieces each.
    pub fn new(length: u32, sges_each: u32) -> Self {
        // Completed receives that were not polled yet occupy places, while the device's queue has room again.
        let length = (length as usize + 1).next_power_of_two() * 2;
        let sges_each = sges_each.max(1) as usize;
        Self {
            places: (0..length)
                .map(|_| Place {
                    order: AtomicU64::new(0),
                    noted: UnsafeCell::new((0, 0)),
                })
                .collect(),
            sges: (0..length * sges_each)
                .map(|_| UnsafeCell::new(ibv_sge::default()))
                .collect(),
            sges_each,
            next: AtomicU32::new(0),
            order: AtomicU64::new(1),
        }
    }

    /// Records a receive. Returns the device's name of the receive; none if no place is free or the receive has too
    /// many pieces.
    pub fn push(&self, wr_id: u64, sges: &[ibv_sge]) -> Option<u64> {
        if sges.len() > self.sges_each {
            return None;
        }
        let from = self.next.load(Ordering::Relaxed) as usize;
        let place = (0..self.places.len())
            .map(|step| (from + step) % self.places.len())
            .find(|place| self.places[*place].order.load(Ordering::Acquire) == 0)?;
        // SAFETY: the place is free, and the caller is the only poster.
        unsafe { *self.places[place].noted.get() = (wr_id, sges.len() as u32) };
        for (piece, cell) in sges.iter().zip(&self.sges[place * self.sges_each..]) {
            // SAFETY: as above.
            unsafe { *cell.get() = *piece };
        }
        let order = self.order.load(Ordering::Relaxed);
        self.order.store(order + 1, Ordering::Relaxed);
        self.places[place].order.store(order, Ordering::Release);
        self.next.store(place as u32 + 1, Ordering::Relaxed);
        Some(MARK | place as u64)
    }

    /// Removes the receive with the device's name `name`, which has completed or was refused. Returns the application's
    /// name; none if `name` belongs to no waiting receive.
    #[inline]
    pub fn complete(&self, name: u64) -> Option<u64> {
        if name & MARKED != MARK {
            return None;
        }
        let place = self.places.get((name & !MARKED) as usize)?;
        if place.order.load(Ordering::Acquire) == 0 {
            return None;
        }
        // SAFETY: the place is not free, and no other completion belongs to the place.
        let (wr_id, _) = unsafe { *place.noted.get() };
        place.order.store(0, Ordering::Release);
        Some(wr_id)
    }

    /// Returns the number of receives that have not completed.
    pub fn waiting(&self) -> usize {
        let waiting = |place: &&Place| place.order.load(Ordering::Acquire) != 0;
        self.places.iter().filter(waiting).count()
    }

    /// Returns the receives that have not completed, in the order of posting, with the device's name for each. The
    /// caller holds the queue's gate, and nothing completes meanwhile.
    pub fn outstanding(&self) -> Vec<(u64, Receive)> {
        let mut found: Vec<(u64, usize)> = self
            .places
            .iter()
            .enumerate()
            .map(|(place, noted)| (noted.order.load(Ordering::Acquire), place))
            .filter(|(order, _)| *order != 0)
            .collect();
        found.sort_unstable();
        found
            .into_iter()
            .map(|(_, place)| {
                // SAFETY: nobody writes while the caller holds the gate.
                let (wr_id, pieces) = unsafe { *self.places[place].noted.get() };
                let sges = self.sges[place * self.sges_each..][..pieces as usize]
                    .iter()
                    // SAFETY: as above.
                    .map(|cell| unsafe { *cell.get() })
                    .collect();
                (MARK | place as u64, Receive { wr_id, sges })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_no_receive_completes_nothing() {
        let queue = SharedReceives::new(2, 1);
        let name = queue.push(7, &[]).unwrap();
        for other in [0, 7, MARK | 99, name + 1, name ^ 1 << 63] {
            assert_eq!(queue.complete(other), None);
        }
        assert_eq!(queue.complete(name), Some(7));
        assert_eq!(queue.complete(name), None);
        assert_eq!(queue.push(8, &[ibv_sge::default(); 2]), None);
    }

    proptest! {
        /// After completions in any order, the rest is outstanding, in the order of posting.
        #[test]
        fn outstanding_receives_are_those_not_completed(
            length in 1u32..8,
            steps in prop::collection::vec((any::<bool>(), 0u64..5, 0usize..16), 0..200),
        ) {
            let queue = SharedReceives::new(length, 2);
            let mut model: Vec<(u64, Receive)> = Vec::new();
            for (post, wr_id, which) in steps {
                if post && model.len() < length as usize {
                    let sges = vec![ibv_sge { addr: wr_id, length: which as u32, lkey: 1 }; which % 3];
                    let name = queue.push(wr_id, &sges).unwrap();
                    prop_assert!(model.iter().all(|(other, _)| *other != name));
                    model.push((name, Receive { wr_id, sges }));
                } else if !post && !model.is_empty() {
                    let (name, receive) = model.remove(which % model.len());
                    prop_assert_eq!(queue.complete(name), Some(receive.wr_id));
                }
                prop_assert_eq!(queue.waiting(), model.len());
                prop_assert_eq!(queue.outstanding(), model.clone());
            }
        }
    }
}
