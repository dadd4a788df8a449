//! What happened at a NIC since its machine was started, over all moves.

/// Counts packets and bytes; each only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets that the guest got.
    pub received_packets: u64,
    /// Their bytes, without virtio's header.
    pub received_bytes: u64,
    /// Packets that the guest sent and the uplink took.
    pub sent_packets: u64,
    /// Their bytes, without virtio's header.
    pub sent_bytes: u64,
    /// Packets for the guest that were too large for its buffers.
    pub receive_too_large: u64,
    /// Packets of the guest's that made no sense, or that the uplink did not take.
    pub send_refused: u64,
    /// Packets that were held for the guest while it moved.
    pub held: u64,
    /// Packets that were lost because too many were held already.
    pub held_overflow: u64,
    /// Packets for many that a move brought to both nodes, of which the guest got only one.
    pub twins_dropped: u64,
    /// Moves that brought the NIC to another node.
    pub moves: u64,
}

/// How many numbers [`Counters`] has.
pub const COUNT: usize = 10;

impl Counters {
    /// All of them in an order that does not change.
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

    /// From what [`Self::to_array`] gave.
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
