//! Frames that tell a network where a machine is now.
//!
//! A switch learns from any frame of the machine; hosts of the network that know the machine's addresses learn from
//! those that name them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::frame::packet::{TAGGED, sender, untagged};
use crate::frame::source::{ARP, IPV6, Source, Vlan};
use crate::mac::Mac;

/// EtherType of reverse ARP: what hypervisors announce machines with, since it names no IP address.
const RARP: u16 = 0x8035;

/// Shortest frame without its checksum.
const SHORTEST: usize = 60;

const BROADCAST: [u8; 6] = [0xff; 6];

/// The IPv6 multicast address of all nodes.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// What tells the announcement of a machine's move from what any station of the network might send: the former place
/// chooses it for each move, and nobody else knows it until the machine is announced.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Token(pub [u8; 16]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Bytes of a [`rarp`]'s message, behind which it has its token, in what makes the frame long enough.
const MESSAGE: usize = 28;

/// Says where the MAC address is.
pub fn rarp(mac: Mac, token: Token) -> Vec<u8> {
    let request = [
        &[0, 1, 8, 0, 6, 4, 0, 3][..],
        &mac.0,
        &[0; 4],
        &mac.0,
        &[0; 4],
        &token.0,
    ]
    .concat();
    frame(BROADCAST, mac, RARP, &request)
}

/// Whether a frame is [`rarp`] of this address and move, in any VLAN: the last that a switch brings to the machine's former
/// place.
pub fn is_rarp_of(frame: &[u8], mac: Mac, token: Token) -> bool {
    let Some((_, RARP, body)) = untagged(frame) else {
        return false;
    };
    let told = body.get(MESSAGE..).and_then(|rest| rest.first_chunk());
    sender(frame) == Some(mac) && told == Some(&token.0)
}

/// The frame in a VLAN.
pub fn tagged(frame: &[u8], vlan: Vlan) -> Vec<u8> {
    let (addresses, rest) = frame.split_at(frame.len().min(12));
    let tag = [TAGGED.to_be_bytes(), vlan.number().to_be_bytes()].concat();
    [addresses, &tag, rest].concat()
}

/// Says who has an IPv4 address.
pub fn gratuitous_arp(mac: Mac, address: Ipv4Addr) -> Vec<u8> {
    let octets = address.octets();
    let request = [
        &[0, 1, 8, 0, 6, 4, 0, 1][..],
        &mac.0,
        &octets,
        &[0; 6],
        &octets,
    ]
    .concat();
    frame(BROADCAST, mac, ARP, &request)
}

/// Says who has an IPv6 address: a neighbour advertisement that nobody asked for, and that overrides.
pub fn unsolicited_advertisement(mac: Mac, address: Ipv6Addr) -> Vec<u8> {
    let octets = address.octets();
    let message = [
        &[136, 0, 0, 0, 0x20, 0, 0, 0][..],
        &octets,
        // The link-layer address of who has it.
        &[2, 1],
        &mac.0,
    ]
    .concat();
    let length = message.len() as u16;
    let mut packet = [
        &[0x60, 0, 0, 0][..],
        &length.to_be_bytes(),
        &[58, 255],
        &octets,
        &ALL_NODES.octets(),
        &message,
    ]
    .concat();
    let pseudo = [
        &octets[..],
        &ALL_NODES.octets(),
        &u32::from(length).to_be_bytes(),
        &[0, 0, 0, 58],
        &message,
    ]
    .concat();
    packet[42..44].copy_from_slice(&internet_checksum(&pseudo).to_be_bytes());
    frame([0x33, 0x33, 0, 0, 0, 1], mac, IPV6, &packet)
}

/// Everything that is to be announced of a machine with these addresses. Switches may know its MAC address in each VLAN
/// apart.
pub fn all(mac: Mac, token: Token, sources: impl IntoIterator<Item = Source>) -> Vec<Vec<u8>> {
    let place = rarp(mac, token);
    let mut vlans = BTreeSet::new();
    let mut named = Vec::new();
    for Source { vlan, address } in sources {
        let frame = match address {
            IpAddr::V4(address) => gratuitous_arp(mac, address),
            IpAddr::V6(address) => unsolicited_advertisement(mac, address),
        };
        named.push(match vlan {
            Some(vlan) => tagged(&frame, vlan),
            None => frame,
        });
        vlans.extend(vlan);
    }
    let mut frames: Vec<Vec<u8>> = vlans.iter().map(|vlan| tagged(&place, *vlan)).collect();
    frames.insert(0, place);
    frames.extend(named);
    frames
}

fn frame(to: [u8; 6], from: Mac, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from.0, &kind.to_be_bytes(), body].concat();
    frame.resize(frame.len().max(SHORTEST), 0);
    frame
}

fn internet_checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([pair[0], low]))
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    #[test]
    fn announcements_come_from_the_machine_and_are_for_everybody() {
        let addresses = ["10.0.0.9", "fe80::9"].map(|text| text.parse::<IpAddr>().unwrap().into());
        let token = Token([7; 16]);
        let frames = all(MAC, token, addresses);
        assert_eq!(frames.len(), 3);
        for frame in &frames {
            assert_eq!(sender(frame), Some(MAC));
            assert_eq!(frame[0] & 1, 1, "{frame:?}");
            assert!(frame.len() >= SHORTEST);
        }
        assert!(is_rarp_of(&frames[0], MAC, token));
        assert!(!is_rarp_of(&frames[1], MAC, token));
        assert!(!is_rarp_of(&frames[0], Mac([2, 0, 0, 0, 0, 2]), token));
        let forged = rarp(MAC, Token([8; 16]));
        assert!(!is_rarp_of(&forged, MAC, token), "any station can say so");
    }

    #[test]
    fn addresses_in_a_vlan_are_announced_in_it_as_the_place_is() {
        let vlan = Vlan::new(5);
        let address = |text: &str| text.parse().unwrap();
        let sources = ["10.0.0.9", "fe80::9"].map(|text| Source {
            vlan,
            address: address(text),
        });
        let token = Token([7; 16]);
        let frames = all(MAC, token, sources);
        let vlans = frames.iter().map(|frame| untagged(frame).unwrap().0);
        assert_eq!(vlans.collect::<Vec<_>>(), [None, vlan, vlan, vlan]);
        assert!(
            frames[..2]
                .iter()
                .all(|frame| is_rarp_of(frame, MAC, token))
        );
        assert_eq!(crate::frame::source::source(&frames[2]), Some(sources[0]));
    }

    #[test]
    fn an_advertisement_has_a_valid_checksum() {
        let address: Ipv6Addr = "fe80::9".parse().unwrap();
        let frame = unsolicited_advertisement(MAC, address);
        let packet = &frame[14..];
        let length = u16::from_be_bytes([packet[4], packet[5]]);
        let message = &packet[40..40 + length as usize];
        let pseudo = [
            &packet[8..40],
            &u32::from(length).to_be_bytes(),
            &[0, 0, 0, 58],
            message,
        ]
        .concat();
        assert_eq!(internet_checksum(&pseudo), 0);
    }
}
