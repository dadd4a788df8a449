//! Receives that were posted and have not completed, to be posted again on a new queue.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi::ibv_sge;

/// A receive as the application posted it, with the application's local keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receive {
    /// The application's name of the receive.
    pub wr_id: u64,
    /// The pieces of memory for the data.
    pub sges: Vec<ibv_sge>,
}

/// The shadow of a receive queue: a ring with one writer (the poster) and one reader (the poller).
///
/// The counters run on without end. A receive lies at its number modulo the ring's length. The holder of the queue
/// pair's gate writes `head`, and the holder of the completion queue's gate writes `tail`, so that neither waits for
/// the other.
pub struct ReceiveQueue {
    head: AtomicU32,
    tail: AtomicU32,
    sges_each: usize,
    /// The length of `noted` minus one; the length is a power of two.
    mask: usize,
    /// Receives at their places.
    noted: Box<[UnsafeCell<Noted>]>,
    /// The pieces of each receive except the first.
    others: Box<[UnsafeCell<ibv_sge>]>,
}

#[derive(Clone, Copy, Default)]
struct Noted {
    wr_id: u64,
    pieces: u32,
    first: ibv_sge,
}

// SAFETY: cells between `tail` and `head` are read, others are written; `head` is published with release and read with
// acquire, and each counter has one writer (see the type's description).
unsafe impl Sync for ReceiveQueue {}
// SAFETY: nothing in the queue belongs to a thread.
unsafe impl Send for ReceiveQueue {}

impl ReceiveQueue {
    /// Returns a queue for `length` receives of at most `sges_each` pieces each.
    pub fn new(length: u32, sges_each: u32) -> Self {
        // An extra cell beyond the device's queue: a completion can be polled, and its place used again, before the
        // completed receive was recorded here.
        let length = (length as usize + 1).next_power_of_two();
        let sges_each = sges_each.max(1) as usize;
        Self {
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            sges_each,
            mask: length - 1,
            noted: (0..length)
                .map(|_| UnsafeCell::new(Noted::default()))
                .collect(),
            others: (0..length * (sges_each - 1))
                .map(|_| UnsafeCell::new(ibv_sge::default()))
                .collect(),
        }
    }

    #[inline]
    fn place(&self, number: u32) -> usize {
        number as usize & self.mask
    }

    /// Returns the pieces of the receive at `place` except the first.
    fn others(&self, place: usize, count: usize) -> &[UnsafeCell<ibv_sge>] {
        &self.others[place * (self.sges_each - 1)..][..count]
    }

    /// Records a receive. Requires [`ReceiveQueue::room`]. Pieces beyond the queue's limit are left out; a device
    /// refuses such a request beforehand.
    #[inline]
    pub fn push(&self, wr_id: u64, sges: &[ibv_sge]) {
        let head = self.head.load(Ordering::Relaxed);
        let place = self.place(head);
        // SAFETY: `place` is masked to be below the length. This cell is not between tail and head, because there is
        // room, and the caller is the only writer.
        let noted = unsafe { &mut *self.noted.get_unchecked(place).get() };
        noted.wr_id = wr_id;
        if let [first] = sges {
            (noted.pieces, noted.first) = (1, *first);
        } else {
            self.note_pieces(place, noted, sges);
        }
        self.head.store(head.wrapping_add(1), Ordering::Release);
    }

    #[inline(never)]
    fn note_pieces(&self, place: usize, noted: &mut Noted, sges: &[ibv_sge]) {
        let sges = &sges[..sges.len().min(self.sges_each)];
        noted.pieces = sges.len() as u32;
        let Some((first, others)) = sges.split_first() else {
            return;
        };
        noted.first = *first;
        for (piece, cell) in others.iter().zip(self.others(place, others.len())) {
            // SAFETY: as in `push`.
            unsafe { *cell.get() = *piece };
        }
    }

    /// Removes the oldest receive, which has completed.
    #[inline]
    pub fn complete_one(&self) {
        let tail = self.tail.load(Ordering::Relaxed);
        self.tail.store(tail.wrapping_add(1), Ordering::Release);
    }

    /// Returns the number of receives completed since the queue pair was made; wraps around.
    pub fn completed(&self) -> u32 {
        self.tail.load(Ordering::Acquire)
    }

    /// Returns the number of receives that have not completed, at most the number of places; 0 while a completion
    /// precedes the record of its receive.
    #[inline]
    pub fn waiting(&self) -> u32 {
        let tail = self.tail.load(Ordering::Acquire);
        let count = self.head.load(Ordering::Acquire).wrapping_sub(tail);
        if count as usize > self.noted.len() {
            0
        } else {
            count
        }
    }

    /// Returns the number of receives that can still be recorded before one completes.
    #[inline]
    pub fn room(&self) -> u32 {
        self.noted.len() as u32 - self.waiting()
    }

    /// Returns the receives that have not completed, oldest first. The caller holds both gates.
    pub fn outstanding(&self) -> Vec<Receive> {
        let tail = self.tail.load(Ordering::Acquire);
        (0..self.waiting())
            .map(|step| {
                let place = self.place(tail.wrapping_add(step));
                // SAFETY: between tail and head nobody writes while the caller holds the gates.
                let noted = unsafe { *self.noted[place].get() };
                let others = self.others(place, (noted.pieces as usize).saturating_sub(1));
                // SAFETY: as above.
                let others = others.iter().map(|cell| unsafe { *cell.get() });
                let first = (noted.pieces > 0).then_some(noted.first);
                Receive {
                    wr_id: noted.wr_id,
                    sges: first.into_iter().chain(others).collect(),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn a_completion_may_be_seen_before_its_receive_was_noted() {
        let queue = ReceiveQueue::new(2, 1);
        queue.complete_one();
        assert_eq!(queue.outstanding(), []);
        queue.push(1, &[]);
        assert_eq!(queue.outstanding(), []);
        queue.push(2, &[]);
        assert_eq!(
            queue.outstanding(),
            [Receive {
                wr_id: 2,
                sges: Vec::new()
            }]
        );
    }

    #[test]
    fn a_full_queue_has_no_room() {
        let queue = ReceiveQueue::new(3, 1);
        for wr_id in 0..4 {
            assert_eq!(queue.room(), 4 - wr_id);
            queue.push(wr_id.into(), &[]);
        }
        assert_eq!((queue.room(), queue.waiting()), (0, 4));
        queue.complete_one();
        assert_eq!(queue.room(), 1);
    }

    proptest! {
        /// The outstanding receives are the posted ones without a completion, in order, with their pieces.
        #[test]
        fn outstanding_receives_are_those_not_completed(
            length in 1u32..20,
            steps in prop::collection::vec((any::<bool>(), any::<u64>(), 0usize..4), 0..300),
        ) {
            let queue = ReceiveQueue::new(length, 3);
            let mut model: VecDeque<Receive> = VecDeque::new();
            for (post, wr_id, pieces) in steps {
                if post && model.len() < length as usize {
                    let sges: Vec<_> = (0..pieces as u32)
                        .map(|piece| ibv_sge { addr: wr_id ^ u64::from(piece), length: piece, lkey: 7 })
                        .collect();
                    queue.push(wr_id, &sges);
                    model.push_back(Receive { wr_id, sges });
                } else if !post && model.pop_front().is_some() {
                    queue.complete_one();
                }
                prop_assert_eq!(queue.waiting() as usize, model.len());
                prop_assert_eq!(queue.outstanding(), Vec::from(model.clone()));
            }
        }
    }
}
