//! Packets that wait for the guest, in order.

use std::collections::VecDeque;

use crate::frame::packet::LARGEST;

/// Most packets that are held for a guest.
pub const MOST_PACKETS: usize = 16_384;

/// Most bytes of packets that are held for a guest.
pub const MOST_BYTES: usize = 32 << 20;

/// A packet: virtio's header and an Ethernet frame.
pub type Packet = Box<[u8]>;

/// Packets in the order in which they came, of which the first some may have been copied to another node.
#[derive(Clone, Debug, Default)]
pub struct HeldPackets {
    packets: VecDeque<Packet>,
    bytes: usize,
    /// How many of them the other node has.
    copied: usize,
}

impl HeldPackets {
    /// Appends a packet. False when there is no room for it.
    #[must_use]
    pub fn push(&mut self, packet: Packet) -> bool {
        if self.packets.len() >= MOST_PACKETS || self.bytes + packet.len() > MOST_BYTES {
            return false;
        }
        self.bytes += packet.len();
        self.packets.push_back(packet);
        true
    }

    /// Whether there is room for any packet.
    pub fn has_room(&self) -> bool {
        self.packets.len() < MOST_PACKETS && self.bytes + LARGEST <= MOST_BYTES
    }

    /// The one that came first.
    pub fn first_mut(&mut self) -> Option<&mut Packet> {
        self.packets.front_mut()
    }

    /// Takes the one that came first.
    pub fn pop(&mut self) -> Option<Packet> {
        let packet = self.packets.pop_front()?;
        self.bytes -= packet.len();
        self.copied = self.copied.saturating_sub(1);
        Some(packet)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Copies of those that were not copied before. All stay: the move may fail.
    pub fn copy_new(&mut self) -> Vec<Packet> {
        let new = self.packets.range(self.copied..).cloned().collect();
        self.copied = self.packets.len();
        new
    }

    /// Copies of all, whatever was copied before: for another node than then.
    pub fn copy_all(&mut self) -> Vec<Packet> {
        self.copied = 0;
        self.copy_new()
    }

    /// Takes all.
    pub fn take(&mut self) -> VecDeque<Packet> {
        self.bytes = 0;
        self.copied = 0;
        std::mem::take(&mut self.packets)
    }

    /// Takes what stays behind after a copy went elsewhere for good.
    pub fn clear(&mut self) {
        self.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(number: u32) -> Packet {
        number.to_le_bytes().into()
    }

    #[test]
    fn packets_are_bounded_and_in_order() {
        let mut held = HeldPackets::default();
        assert!(held.has_room());
        for number in 0..MOST_PACKETS as u32 {
            assert!(held.push(packet(number)));
        }
        assert!(
            !held.has_room() && !held.push(packet(0)),
            "there is no room"
        );
        for number in 0..MOST_PACKETS as u32 {
            assert_eq!(held.pop(), Some(packet(number)));
        }
        assert!(held.push(vec![0; MOST_BYTES].into()));
        assert!(!held.has_room() && !held.push(packet(0)), "nor for bytes");
    }

    #[test]
    fn each_is_copied_once_and_stays() {
        let mut held = HeldPackets::default();
        assert!(held.push(packet(0)) && held.push(packet(1)));
        assert_eq!(held.copy_new(), [packet(0), packet(1)]);
        assert!(held.push(packet(2)));
        assert_eq!(held.pop(), Some(packet(0)));
        assert_eq!(held.copy_new(), [packet(2)]);
        assert_eq!(held.copy_new(), [] as [Packet; 0]);
        assert_eq!(held.copy_all(), [packet(1), packet(2)]);
        assert_eq!(held.copy_new(), [] as [Packet; 0]);
        assert_eq!(held.take(), [packet(1), packet(2)]);
        assert!(held.push(packet(3)));
        assert_eq!(held.copy_new(), [packet(3)]);
    }
}
