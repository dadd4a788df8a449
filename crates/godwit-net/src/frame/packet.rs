//! A packet as it crosses the device: virtio's header, then an Ethernet frame.

use crate::mac::Mac;

/// Bytes of virtio's header with the number of buffers (`virtio_net_hdr_v1`), which every packet has here.
pub const HEADER: usize = 12;

/// Bytes of the header that a guest's driver without `VIRTIO_F_VERSION_1` and without mergeable buffers uses.
pub const SHORT_HEADER: usize = 10;

/// Where a header says into how many buffers a packet was put.
pub const BUFFERS_AT: usize = 10;

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;

/// Fewest bytes of a packet.
pub const SMALLEST: usize = HEADER + ETHERNET;

/// Most bytes of a packet: an IP packet of 64 KiB that is to be cut, with a tag in its Ethernet header.
pub const LARGEST: usize = HEADER + ETHERNET + 4 + 65_535;

/// The Ethernet frame of a packet; nothing when it is too short to have one.
pub fn frame_of(packet: &[u8]) -> Option<&[u8]> {
    packet.get(HEADER..).filter(|frame| frame.len() >= ETHERNET)
}

/// Who a frame is for.
pub fn destination(frame: &[u8]) -> Option<Mac> {
    Some(Mac(*frame.first_chunk()?))
}

/// Who sent a frame.
pub fn sender(frame: &[u8]) -> Option<Mac> {
    Some(Mac(*frame.get(6..)?.first_chunk()?))
}

/// What a frame carries: its EtherType, without a look behind tags.
pub fn ether_type(frame: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(*frame.get(12..)?.first_chunk()?))
}
