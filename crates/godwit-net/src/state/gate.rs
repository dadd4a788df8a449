//! The packets of a protected machine that wait for the acknowledgement of their checkpoint.
//!
//! Paper 004 (section 3.1) buffers outbound packets by a second tail: the guest's tail goes on, the device's does not.
//! Here the device's tail is a limit for each transmit ring, up to which packets may leave. The machine runs in epochs,
//! and stops between two of them, when each ring tells how many packets the guest has offered. These positions are the
//! next limits, once the checkpoint at the end of the epoch is acknowledged. Packets stay in the ring meanwhile: a
//! machine that goes on from a checkpoint elsewhere offers them there, and some may leave twice.
//!
//! ```text
//!            left       limit          end of epoch 7      offered
//!   ring ─────┼───────────┼───────────────────┼───────────────┼────►
//!              may leave    leave with 7        leave with 8
//! ```
//!
//! All positions in a ring are counts of packets, modulo 65536.

use std::collections::VecDeque;

use godwit_vhost::rings::split::RingLayout;

/// Most ends of epochs that are known for a ring. A primary waits for an acknowledgement long before.
const MOST_ENDS: usize = 8;

/// A transmit ring as found at a stop or a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Addresses and size of the ring.
    pub layout: RingLayout,
    /// Packets that have left.
    pub left: u16,
    /// Packets that the guest has offered.
    pub offered: u16,
}

impl Offered {
    /// Returns the number of packets in the ring. A ring with more than its size is invalid, and counts as empty.
    pub const fn waiting(&self) -> u16 {
        match self.offered.wrapping_sub(self.left) {
            waiting if waiting <= self.layout.size => waiting,
            _ => 0,
        }
    }

    /// Returns true if this ring, at its start, may be the same as `before`, which stopped.
    fn continues(&self, before: &Self) -> bool {
        let is_there = self.layout == before.layout && self.left == before.left;
        is_there && self.waiting() >= before.waiting()
    }
}

/// A transmit ring.
#[derive(Clone, Debug, Default)]
struct Ring {
    /// Position up to which packets may leave.
    limit: u16,
    /// Ends of the epochs whose checkpoints are not acknowledged: numbers and positions, in order.
    ends: VecDeque<(u64, u16)>,
    /// The ring at its last stop, unless started since.
    stopped: Option<Offered>,
    /// True if an epoch has ended since the stop.
    in_checkpoint: bool,
}

impl Ring {
    /// Holds all packets after this position back until an epoch ends.
    fn hold_from(&mut self, left: u16) {
        self.ends.clear();
        self.limit = left;
    }

    fn end_epoch(&mut self, number: u64) {
        // A running ring has nothing in this epoch: nobody knows when its packets were offered.
        if let Some(stopped) = &self.stopped {
            if self.ends.len() >= MOST_ENDS {
                // The last two epochs leave together.
                self.ends.pop_back();
            }
            let end = stopped.left.wrapping_add(stopped.waiting());
            self.ends.push_back((number, end));
            self.in_checkpoint = true;
        }
    }

    fn release(&mut self, number: u64) {
        while let Some((_, end)) = self.ends.pop_front_if(|(ended, _)| *ended <= number) {
            self.limit = end;
        }
    }
}

/// The transmit rings of a NIC, open unless the NIC [holds packets back](Gate::hold).
#[derive(Clone, Debug)]
pub struct Gate {
    holds: bool,
    /// Number of the last epoch that has ended.
    last: u64,
    rings: Vec<Ring>,
}

impl Gate {
    /// Creates the open gate of a NIC with this many transmit rings.
    pub fn new(rings: usize) -> Self {
        Self {
            holds: false,
            last: 0,
            rings: vec![Ring::default(); rings],
        }
    }

    /// Holds packets back from now on, and forgets all epochs so far. `left` has the packets that have left a running
    /// ring.
    pub fn hold(&mut self, left: impl Fn(usize) -> Option<u16>) {
        self.holds = true;
        self.last = 0;
        for (pair, ring) in self.rings.iter_mut().enumerate() {
            let stopped = ring.stopped.as_ref().map(|stopped| stopped.left);
            ring.in_checkpoint = false;
            ring.hold_from(left(pair).or(stopped).unwrap_or_default());
        }
    }

    /// Lets all packets leave from now on.
    pub fn open(&mut self) {
        self.holds = false;
    }

    /// Records that a ring has stopped.
    pub fn stopped(&mut self, pair: usize, ring: Offered) {
        self.rings[pair].stopped = Some(ring);
        self.rings[pair].in_checkpoint = false;
    }

    /// Records that a ring starts. A ring goes on after a checkpoint. A ring that stopped for another reason may be a
    /// new driver's: none of its packets belongs to an epoch that has ended.
    pub fn started(&mut self, pair: usize, ring: Offered) {
        let state = &mut self.rings[pair];
        let stopped = state.stopped.take().filter(|_| state.in_checkpoint);
        if !stopped.is_some_and(|before| ring.continues(&before)) {
            state.hold_from(ring.left);
        }
    }

    /// Ends an epoch, between the stop of the rings and their start. Numbers grow; others are ignored.
    pub fn end_epoch(&mut self, number: u64) {
        if self.holds && number > self.last {
            self.last = number;
            self.rings
                .iter_mut()
                .for_each(|ring| ring.end_epoch(number));
        }
    }

    /// Lets the packets of an epoch and of earlier ones leave. An epoch that has not ended is ignored.
    pub fn release(&mut self, number: u64) {
        if number <= self.last {
            self.rings.iter_mut().for_each(|ring| ring.release(number));
        }
    }

    /// Returns the number of packets that may leave a running ring now, after `left` have.
    pub fn sendable(&self, pair: usize, left: u16) -> usize {
        if !self.holds {
            return usize::MAX;
        }
        match self.rings[pair].limit.wrapping_sub(left) {
            // A limit that the ring has passed.
            0x8000.. => 0,
            sendable => usize::from(sendable),
        }
    }

    /// Returns the number of packets in the rings; `None` while the gate is open. `running` has each running ring.
    pub fn held(&self, running: impl Fn(usize) -> Option<Offered>) -> Option<usize> {
        let rings = self.rings.iter().enumerate();
        let now = rings.filter_map(|(pair, ring)| running(pair).or(ring.stopped));
        self.holds
            .then(|| now.map(|ring| usize::from(ring.waiting())).sum())
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
