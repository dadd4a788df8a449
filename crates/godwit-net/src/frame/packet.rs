//! A packet as it crosses the device: virtio's header, then an Ethernet frame.

use std::borrow::Cow;

use crate::frame::vlan::Vlan;
use crate::mac::Mac;
use crate::state::stations::Station;

/// EtherType of a VLAN tag.
pub const TAGGED: u16 = 0x8100;

/// Bytes of virtio's header with the number of buffers (`virtio_net_hdr_v1`), which every packet has here.
pub const HEADER: usize = 12;

/// Bytes of the header of a driver without `VIRTIO_F_VERSION_1` and without mergeable buffers.
pub const SHORT_HEADER: usize = 10;

/// Offset of the header's number of buffers. While a packet waits, the field holds the packet's uplink queue instead
/// ([`queue_of`]).
pub const BUFFERS_AT: usize = 10;

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;

/// Fewest bytes of a packet.
pub const SMALLEST: usize = HEADER + ETHERNET;

/// Most bytes of a packet: an unsegmented IP packet of 64 KiB with a VLAN tag.
pub const LARGEST: usize = HEADER + ETHERNET + 4 + 65_535;

/// Returns the Ethernet frame of a packet; `None` if the packet is too short for a frame.
pub fn frame_of(packet: &[u8]) -> Option<&[u8]> {
    packet.get(HEADER..).filter(|frame| frame.len() >= ETHERNET)
}

/// Header flag of a packet whose checksum is not computed yet (`VIRTIO_NET_HDR_F_NEEDS_CSUM`). The checksum's field
/// then holds the sum of the pseudo-header.
const NEEDS_CHECKSUM: u8 = 1;

/// Returns the Ethernet frame of a packet with its checksum computed, as the kernel does for receivers that require
/// one; `None` if the packet is too short for a frame. A header pointing outside of the frame is ignored.
pub fn finished_frame_of(packet: &[u8]) -> Option<Cow<'_, [u8]>> {
    let frame = frame_of(packet)?;
    if packet[0] & NEEDS_CHECKSUM == 0 {
        return Some(Cow::Borrowed(frame));
    }
    let told = |at: usize| usize::from(u16::from_le_bytes([packet[at], packet[at + 1]]));
    let (start, place) = (told(6), told(6) + told(8));
    if place + 2 > frame.len() {
        return Some(Cow::Borrowed(frame));
    }
    let mut sum: u64 = frame[start..]
        .chunks(2)
        .map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // Zero would mean no checksum.
    let checksum = match !(sum as u16) {
        0 => 0xffff,
        other => other,
    };
    let mut frame = frame.to_vec();
    frame[place..place + 2].copy_from_slice(&checksum.to_be_bytes());
    Some(Cow::Owned(frame))
}

/// Returns the uplink queue of a waiting packet. The number may come from a peer and be out of range.
pub fn queue_of(packet: &[u8]) -> usize {
    let told = packet.get(BUFFERS_AT..).and_then(|rest| rest.first_chunk());
    usize::from(u16::from_le_bytes(told.copied().unwrap_or_default()))
}

/// Records the uplink queue of a packet; a packet too short for a header stays as it is.
pub fn set_queue(packet: &mut [u8], queue: u16) {
    if let Some(place) = packet.get_mut(BUFFERS_AT..HEADER) {
        place.copy_from_slice(&queue.to_le_bytes());
    }
}

/// Bytes at a frame's start that determine the sender: the addresses and a VLAN tag.
pub const TELLS_SENDER: usize = ETHERNET + 4;

/// Returns the destination address of a frame.
pub fn destination(frame: &[u8]) -> Option<Mac> {
    Some(Mac(*frame.first_chunk()?))
}

/// Returns the source address of a frame.
pub fn sender(frame: &[u8]) -> Option<Mac> {
    Some(Mac(*frame.get(6..)?.first_chunk()?))
}

/// Returns the station that sent a frame; `None` if the source address is a group's or zero.
pub fn station(frame: &[u8]) -> Option<Station> {
    let mac = sender(frame)?;
    let (vlan, ..) = untagged(frame)?;
    let is_ones = !mac.is_group() && mac != Mac::NOBODY;
    is_ones.then_some(Station { mac, vlan })
}

/// Returns the VLAN, the EtherType and the payload of a frame, after its VLAN tag if there is one.
pub fn untagged(frame: &[u8]) -> Option<(Option<Vlan>, u16, &[u8])> {
    let (kind, body) = number(frame.get(12..)?)?;
    if kind != TAGGED {
        return Some((None, kind, body));
    }
    let (tag, rest) = number(body)?;
    let (kind, body) = number(rest)?;
    Some((Vlan::new(tag & 0xfff), kind, body))
}

fn number(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u16::from_be_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A datagram of four bytes to a group, without checksum and with checksum.
    #[test]
    fn a_checksum_that_is_not_made_is_made() {
        let frame = |checksum: [u8; 2]| {
            let ethernet = [1, 0, 0x5e, 0x50, 0, 1, 2, 0, 0, 0, 0, 9, 8, 0];
            let ip = [
                0x45, 0, 0, 32, 0, 0, 0x40, 0, 1, 17, 0, 0, 10, 80, 0, 254, 239, 80, 0, 1,
            ];
            let udp = [0x9c, 0x40, 0x1c, 0x20, 0, 12];
            [&ethernet[..], &ip, &udp, &checksum, &[0, 0, 0, 18]].concat()
        };
        let header = |flags: u8, place: u8| [flags, 0, 0, 0, 0, 0, 34, 0, place, 0, 0, 0];
        // The sum of the pseudo-header: both addresses, the protocol and the length.
        let unfinished = frame([0xfa, 0xbc]);
        let sums = [0x9c40, 0x1c20, 12, 0xfabc, 18_u32].iter().sum::<u32>();
        let made = !((sums & 0xffff) + (sums >> 16)) as u16;
        let of = |header: [u8; 12]| {
            let packet = [&header[..], &unfinished].concat();
            finished_frame_of(&packet).map(Cow::into_owned)
        };
        assert_eq!(of(header(1, 6)), Some(frame(made.to_be_bytes())));
        assert_eq!(of(header(0, 6)), Some(unfinished.clone()), "is made");
        assert_eq!(of(header(1, 11)), Some(unfinished.clone()), "outside");
        assert_eq!(finished_frame_of(&header(1, 6)), None, "no frame");
    }

    #[test]
    fn a_frame_tells_as_which_station_it_was_sent() {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let frame = |mac: Mac, rest: &[u8]| [&[0xff; 6][..], &mac.0, rest].concat();
        let of = |vlan| Some(Station { mac, vlan });
        assert_eq!(station(&frame(mac, &[8, 0])), of(None));
        let in_vlan = frame(mac, &[0x81, 0, 0xe0, 7, 8, 0]);
        assert_eq!(station(&in_vlan), of(Vlan::new(7)));
        // A tag with only a priority names no VLAN.
        assert_eq!(station(&frame(mac, &[0x81, 0, 0xe0, 0, 8, 0])), of(None));
        for nobody in [Mac::NOBODY, Mac([1, 0, 0x5e, 0, 0, 1])] {
            assert_eq!(station(&frame(nobody, &[8, 0])), None);
        }
        assert_eq!(station(&in_vlan[..15]), None, "cut off");
    }
}
