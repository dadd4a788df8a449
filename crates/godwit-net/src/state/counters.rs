//! Counters of a NIC since its VM was started, over all moves.

/// Counters of packets and bytes, which only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets received by the guest.
    pub received_packets: u64,
    /// Bytes received by the guest, without virtio's header.
    pub received_bytes: u64,
    /// Packets sent by the guest and taken by the uplink.
    pub sent_packets: u64,
    /// Bytes of the sent packets, without virtio's header.
    pub sent_bytes: u64,
    /// Packets that were too large for the guest's buffers.
    pub receive_too_large: u64,
    /// Malformed packets from the guest, and packets refused by the uplink.
    pub send_refused: u64,
    /// Packets that were held for the guest during moves.
    pub held: u64,
    /// Packets that were lost because too many were held already.
    pub held_overflow: u64,
    /// Packets for many, dropped because a move brought them to both nodes.
    pub twins_dropped: u64,
    /// Moves that brought the NIC to another node.
    pub moves: u64,
}

/// Number of counters in [`Counters`].
pub const COUNT: usize = 10;

impl Counters {
    /// Returns the counters in an order that never changes.
    pub const fn to_array(self) -> [u64; COUNT] {
        [
            self.received_packets,
            self.received_bytes,
            self.sent_packets,
            self.sent_bytes,
            self.receive_too_large,
            self.send_refused,
            self.held,
            self.held_overflow,
            self.twins_dropped,
            self.moves,
        ]
    }

    /// Builds counters from an array of [`Self::to_array`].
    pub const fn from_array(numbers: [u64; COUNT]) -> Self {
        let [
            received_packets,
            received_bytes,
            sent_packets,
            sent_bytes,
            receive_too_large,
            send_refused,
            held,
            held_overflow,
            twins_dropped,
            moves,
        ] = numbers;
        Self {
            received_packets,
            received_bytes,
            sent_packets,
            sent_bytes,
            receive_too_large,
            send_refused,
            held,
            held_overflow,
            twins_dropped,
            moves,
        }
    }
}
