//! Packets waiting for the guest, in the order of each uplink queue.

use std::collections::VecDeque;

use crate::frame::packet::{LARGEST, queue_of};

/// Most packets that are held for a guest.
pub const MOST_PACKETS: usize = 16_384;

/// Most bytes of packets that are held for a guest.
pub const MOST_BYTES: usize = 32 << 20;

/// A packet: virtio's header and an Ethernet frame.
pub type Packet = Box<[u8]>;

/// Packets in order of arrival, some of which may have been copied to another node. A packet waits only behind packets
/// of the same uplink queue.
#[derive(Clone, Debug)]
pub struct HeldPackets {
    /// Packets of each uplink queue, with places in the overall order.
    queues: Vec<VecDeque<(u64, Packet)>>,
    count: usize,
    bytes: usize,
    /// Place of the next packet to come.
    next: u64,
    /// Place below which the other node has all packets.
    copied: u64,
}

impl HeldPackets {
    /// Creates an empty collection for an uplink with this many queues, at least one.
    pub fn new(queues: usize) -> Self {
        Self {
            queues: vec![VecDeque::new(); queues],
            count: 0,
            bytes: 0,
            next: 0,
            copied: 0,
        }
    }

    /// Appends a packet to the queue in the packet's header ([`queue_of`]), modulo the number of queues, since a peer
    /// may have set any number. Returns false if there is no room for the packet.
    #[must_use]
    pub fn push(&mut self, packet: Packet) -> bool {
        if !self.has_room_for(packet.len()) {
            return false;
        }
        self.count += 1;
        self.bytes += packet.len();
        let queue = self.one_of(queue_of(&packet));
        self.queues[queue].push_back((self.next, packet));
        self.next += 1;
        true
    }

    /// Returns true if there is room for a packet of any size.
    pub fn has_room(&self) -> bool {
        self.has_room_for(LARGEST)
    }

    /// Returns true if there is room for a packet of this many bytes.
    pub const fn has_room_for(&self, bytes: usize) -> bool {
        self.count < MOST_PACKETS && self.bytes + bytes <= MOST_BYTES
    }

    /// Returns the wanted queue whose first packet is the oldest.
    pub fn first_queue(&self, is_wanted: impl Fn(usize) -> bool) -> Option<usize> {
        let firsts = self.queues.iter().enumerate().filter_map(|(queue, held)| {
            let (place, _) = held.front()?;
            Some((*place, queue))
        });
        let wanted = firsts.filter(|(_, queue)| is_wanted(*queue));
        wanted.min().map(|(_, queue)| queue)
    }

    /// Returns the oldest packet of a queue.
    pub fn first_mut(&mut self, queue: usize) -> Option<&mut Packet> {
        let first = self.queues[queue].front_mut();
        first.map(|(_, packet)| packet)
    }

    /// Takes the oldest packet of a queue.
    pub fn pop(&mut self, queue: usize) -> Option<Packet> {
        let (_, packet) = self.queues[queue].pop_front()?;
        self.count -= 1;
        self.bytes -= packet.len();
        Some(packet)
    }

    /// Returns true if no packet of this queue waits. The number is taken modulo the number of queues.
    pub fn has_none_of(&self, queue: usize) -> bool {
        self.queues[self.one_of(queue)].is_empty()
    }

    /// Returns the number of waiting packets.
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Returns true if no packet waits.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Copies the packets not copied before. The originals stay, since the move may fail.
    pub fn copy_new(&mut self) -> Vec<Packet> {
        let copied = self.copied;
        let new = self.queues.iter().flat_map(|held| {
            let first = held.partition_point(|(place, _)| *place < copied);
            held.range(first..)
        });
        let mut new: Vec<&(u64, Packet)> = new.collect();
        new.sort_unstable_by_key(|(place, _)| *place);
        let new = new.into_iter().map(|(_, packet)| packet.clone()).collect();
        self.copied = self.next;
        new
    }

    /// Copies all packets, including packets copied before: the destination may be another node now.
    pub fn copy_all(&mut self) -> Vec<Packet> {
        self.copied = 0;
        self.copy_new()
    }

    /// Takes all packets, in their order of arrival.
    pub fn take(&mut self) -> Vec<Packet> {
        self.count = 0;
        self.bytes = 0;
        let mut all: Vec<(u64, Packet)> = self.queues.iter_mut().flat_map(std::mem::take).collect();
        all.sort_unstable_by_key(|(place, _)| *place);
        all.into_iter().map(|(_, packet)| packet).collect()
    }

    /// Drops all packets, once a copy has replaced them for good.
    pub fn clear(&mut self) {
        self.take();
    }

    const fn one_of(&self, queue: usize) -> usize {
        queue % self.queues.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::packet::{HEADER, set_queue};

    fn packet(number: u32) -> Packet {
        number.to_le_bytes().into()
    }

    #[test]
    fn packets_are_bounded_and_in_order() {
        let mut held = HeldPackets::new(1);
        assert!(held.has_room());
        for number in 0..MOST_PACKETS as u32 {
            assert!(held.push(packet(number)));
        }
        assert!(
            !held.has_room() && !held.push(packet(0)),
            "there is no room"
        );
        for number in 0..MOST_PACKETS as u32 {
            assert_eq!(held.pop(0), Some(packet(number)));
        }
        assert!(held.push(vec![0; MOST_BYTES].into()));
        assert!(!held.has_room() && !held.push(packet(0)), "nor for bytes");
    }

    #[test]
    fn each_is_copied_once_and_stays() {
        let mut held = HeldPackets::new(1);
        assert!(held.push(packet(0)) && held.push(packet(1)));
        assert_eq!(held.copy_new(), [packet(0), packet(1)]);
        assert!(held.push(packet(2)));
        assert_eq!(held.pop(0), Some(packet(0)));
        assert_eq!(held.copy_new(), [packet(2)]);
        assert_eq!(held.copy_new(), [] as [Packet; 0]);
        assert_eq!(held.copy_all(), [packet(1), packet(2)]);
        assert_eq!(held.copy_new(), [] as [Packet; 0]);
        assert_eq!(held.take(), [packet(1), packet(2)]);
        assert!(held.push(packet(3)));
        assert_eq!(held.copy_new(), [packet(3)]);
    }

    fn of(queue: u16, number: u8) -> Packet {
        let mut packet = vec![number; HEADER];
        set_queue(&mut packet, queue);
        packet.into()
    }

    #[test]
    fn a_packet_waits_behind_those_of_its_queue_alone_and_all_move_in_order() {
        let mut held = HeldPackets::new(2);
        // The last packet's queue is out of range, as from a peer.
        let all = [of(1, 0), of(0, 1), of(1, 2), of(7, 3)];
        all.iter()
            .for_each(|packet| assert!(held.push(packet.clone())));
        assert_eq!(held.copy_new(), all);
        assert_eq!(held.first_queue(|_| true), Some(1));
        assert_eq!(held.first_queue(|queue| queue == 0), Some(0));
        assert_eq!(held.pop(0), Some(of(0, 1)));
        assert!(held.has_none_of(0) && !held.has_none_of(7));
        assert_eq!(held.first_queue(|queue| queue == 0), None);
        assert!(held.push(of(0, 4)));
        assert_eq!(held.copy_new(), [of(0, 4)]);
        assert_eq!(held.pop(1), Some(of(1, 0)));
        assert_eq!(held.take(), [of(1, 2), of(7, 3), of(0, 4)]);
        assert!(held.is_empty() && held.first_queue(|_| true).is_none());
    }
}
