//! Frames that announce a VM's location to the network: a switch learns from any frame of the VM. The guest announces
//! its IP addresses itself.

use crate::frame::packet::{TAGGED, untagged};
use crate::frame::vlan::Vlan;
use crate::mac::Mac;
use crate::state::stations::Station;

/// EtherType of reverse ARP, with which hypervisors announce VMs, since it names no IP address.
const RARP: u16 = 0x8035;

/// Length of the shortest frame without its checksum.
const SHORTEST: usize = 60;

const BROADCAST: [u8; 6] = [0xff; 6];

/// A secret that distinguishes the announcement of a move from forged frames. The source chooses a token for each move,
/// and no other station knows the token before the announcement.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Token(pub [u8; 16]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Bytes of a [`rarp`]'s message. The token follows in the padding of the frame.
const MESSAGE: usize = 28;

/// Returns the announcement of a station.
pub fn rarp(Station { mac, vlan }: Station, token: Token) -> Vec<u8> {
    let request = [
        &[0, 1, 8, 0, 6, 4, 0, 3][..],
        &mac.0,
        &[0; 4],
        &mac.0,
        &[0; 4],
        &token.0,
    ]
    .concat();
    let frame = frame(BROADCAST, mac, RARP, &request);
    match vlan {
        Some(vlan) => tagged(&frame, vlan),
        None => frame,
    }
}

/// Returns true if a frame is the [`rarp`] of this move, in any VLAN: the last frame for the VM brought to the source
/// by a switch.
pub fn is_rarp_of(frame: &[u8], token: Token) -> bool {
    let Some((_, RARP, body)) = untagged(frame) else {
        return false;
    };
    body.get(MESSAGE..).and_then(|rest| rest.first_chunk()) == Some(&token.0)
}

fn tagged(frame: &[u8], vlan: Vlan) -> Vec<u8> {
    let (addresses, rest) = frame.split_at(frame.len().min(12));
    let tag = [TAGGED.to_be_bytes(), vlan.number().to_be_bytes()].concat();
    [addresses, &tag, rest].concat()
}

fn frame(to: [u8; 6], from: Mac, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from.0, &kind.to_be_bytes(), body].concat();
    frame.resize(frame.len().max(SHORTEST), 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::packet::sender;

    #[test]
    fn an_announcement_comes_from_its_station_and_is_for_everybody() {
        let (mac, token) = (Mac([2, 0, 0, 0, 0, 1]), Token([7; 16]));
        for vlan in [None, Vlan::new(5)] {
            let frame = rarp(Station { mac, vlan }, token);
            assert_eq!(sender(&frame), Some(mac));
            assert_eq!(frame[..6], BROADCAST);
            assert!(frame.len() >= SHORTEST);
            assert_eq!(untagged(&frame).map(|(vlan, ..)| vlan), Some(vlan));
            assert!(is_rarp_of(&frame, token));
            assert!(
                !is_rarp_of(&frame, Token([8; 16])),
                "any station can say so"
            );
        }
    }
}
