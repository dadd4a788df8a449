//! The packets of a protected machine that wait for the acknowledgement of their checkpoint.
//!
//! Paper 004 (section 3.1) leaves outbound packets in the guest's ring, up to a second tail. Here they are copied out of
//! the ring and completed: the sockets of a guest wait for the completion of their packets, and a connection whose packets
//! stay in the ring sends two large ones an epoch. The price is a copy, and that packets here are lost with the host, as
//! in any network.
//!
//! The machine runs in epochs, and stops between two of them. All packets taken before the stop leave once the checkpoint
//! at the end of the epoch is acknowledged. Packets that are still in a ring at the stop belong to a later epoch, since
//! the guest of the checkpoint offers them again.

use std::collections::VecDeque;

/// Most ends of epochs that are known for a queue. A primary waits for an acknowledgement long before.
const MOST_ENDS: usize = 8;
/// Most packets and bytes that wait. Further packets stay in the guest's rings.
const MOST_PACKETS: usize = 16_384;
const MOST_BYTES: usize = 32 << 20;

/// The waiting packets of a transmit ring, in order. Positions are counts of packets since the beginning.
#[derive(Clone, Debug, Default)]
struct Queue {
    packets: VecDeque<Box<[u8]>>,
    /// Position of the first waiting packet.
    first: u64,
    /// Position up to which packets may leave.
    limit: u64,
    /// Ends of the epochs whose checkpoints are not acknowledged: numbers and positions, in order.
    ends: VecDeque<(u64, u64)>,
}

impl Queue {
    fn end(&self) -> u64 {
        self.first + self.packets.len() as u64
    }

    fn end_epoch(&mut self, number: u64) {
        if self.ends.len() >= MOST_ENDS {
            // The last two epochs leave together.
            self.ends.pop_back();
        }
        self.ends.push_back((number, self.end()));
    }

    fn release(&mut self, number: u64) {
        while let Some((_, end)) = self.ends.pop_front_if(|(ended, _)| *ended <= number) {
            self.limit = end;
        }
    }
}

/// The gate of a NIC, open unless the NIC [holds packets back](Gate::hold).
#[derive(Clone, Debug)]
pub struct Gate {
    holds: bool,
    /// Number of the last epoch that has ended.
    last: u64,
    queues: Vec<Queue>,
    packets: usize,
    bytes: usize,
}

impl Gate {
    /// Creates the open gate of a NIC with this many transmit rings.
    pub fn new(rings: usize) -> Self {
        Self {
            holds: false,
            last: 0,
            queues: vec![Queue::default(); rings],
            packets: 0,
            bytes: 0,
        }
    }

    /// Holds packets back from now on, and forgets all epochs so far. Waiting packets leave with the next epoch.
    pub fn hold(&mut self) {
        self.holds = true;
        self.last = 0;
        self.queues.iter_mut().for_each(|queue| queue.ends.clear());
    }

    /// Lets all packets leave from now on.
    pub fn open(&mut self) {
        self.holds = false;
        for queue in &mut self.queues {
            queue.ends.clear();
            queue.limit = queue.end();
        }
    }

    /// Returns true if packets of the guest wait here instead of leaving.
    pub const fn holds(&self) -> bool {
        self.holds
    }

    /// Returns true if a packet may be taken from the guest.
    pub const fn has_room(&self) -> bool {
        !self.holds || self.packets < MOST_PACKETS && self.bytes < MOST_BYTES
    }

    /// Keeps a packet of a ring until its epoch is released.
    pub fn keep(&mut self, ring: usize, packet: Box<[u8]>) {
        self.packets += 1;
        self.bytes += packet.len();
        self.queues[ring].packets.push_back(packet);
    }

    /// Takes the next packet of a ring that may leave.
    pub fn next(&mut self, ring: usize) -> Option<Box<[u8]>> {
        let queue = &mut self.queues[ring];
        if queue.first >= queue.limit {
            return None;
        }
        let packet = queue.packets.pop_front()?;
        queue.first += 1;
        self.packets -= 1;
        self.bytes -= packet.len();
        Some(packet)
    }

    /// Ends an epoch while the rings stand still. Numbers grow; others are ignored.
    pub fn end_epoch(&mut self, number: u64) {
        if self.holds && number > self.last {
            self.last = number;
            let queues = self.queues.iter_mut();
            queues.for_each(|queue| queue.end_epoch(number));
        }
    }

    /// Lets the packets of an epoch and of earlier ones leave. An epoch that has not ended is ignored.
    pub fn release(&mut self, number: u64) {
        if number <= self.last {
            let queues = self.queues.iter_mut();
            queues.for_each(|queue| queue.release(number));
        }
    }

    /// Returns the number of waiting packets; `None` while the gate is open.
    pub fn held(&self) -> Option<usize> {
        self.holds.then_some(self.packets)
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
