//! Which IP address the sender of a frame uses, and in which VLAN.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::frame::packet::{ETHERNET, sender, untagged};

/// EtherType of IPv4.
pub const IPV4: u16 = 0x0800;
/// EtherType of the address resolution protocol.
pub const ARP: u16 = 0x0806;
/// EtherType of IPv6.
pub const IPV6: u16 = 0x86dd;

/// Bytes from a frame's start that have to be known to tell its sender's address: the headers, a VLAN's tag between them.
pub const ENOUGH: usize = ETHERNET + 4 + 40;

/// A VLAN, 1 to 4094.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vlan(u16);

impl Vlan {
    /// The VLAN of this number; nothing when there is none.
    pub const fn new(number: u16) -> Option<Self> {
        match number {
            1..=4094 => Some(Self(number)),
            _ => None,
        }
    }

    /// Its number.
    pub const fn number(self) -> u16 {
        self.0
    }
}

/// An address that somebody uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The VLAN in which it is used; nothing without a tag.
    pub vlan: Option<Vlan>,
    /// The address.
    pub address: IpAddr,
}

impl From<IpAddr> for Source {
    /// One that is used without a tag.
    fn from(address: IpAddr) -> Self {
        Self {
            vlan: None,
            address,
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.address.fmt(f)?;
        match self.vlan {
            Some(vlan) => write!(f, " in VLAN {}", vlan.number()),
            None => Ok(()),
        }
    }
}

/// The address from which a frame was sent, by what it says itself; nothing when it says none, or one that is
/// nobody's, or has more than one tag.
pub fn source(frame: &[u8]) -> Option<Source> {
    let (vlan, kind, body) = untagged(frame)?;
    let found: IpAddr = match kind {
        IPV4 if body.first()? >> 4 == 4 => v4(body, 12)?.into(),
        // Ethernet and IPv4, with the frame's own sender as the one that has the address.
        ARP if body.get(..6)? == [0, 1, 8, 0, 6, 4] && body.get(8..14)? == sender(frame)?.0 => {
            v4(body, 14)?.into()
        }
        IPV6 if body.first()? >> 4 == 6 => {
            Ipv6Addr::from(*body.get(8..)?.first_chunk::<16>()?).into()
        }
        _ => return None,
    };
    let nobody = match found {
        IpAddr::V4(address) => address.is_broadcast() || address.is_loopback(),
        IpAddr::V6(address) => address.is_loopback(),
    };
    let is_somebodys = !nobody && !found.is_unspecified() && !found.is_multicast();
    is_somebodys.then_some(Source {
        vlan,
        address: found,
    })
}

fn v4(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    Some(Ipv4Addr::from(*bytes.get(at..)?.first_chunk::<4>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::announce;
    use crate::mac::Mac;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn address(frame: &[u8]) -> Option<IpAddr> {
        let found = source(frame)?;
        assert_eq!(found.vlan, None);
        Some(found.address)
    }

    #[test]
    fn a_frame_in_a_vlan_tells_the_address_and_the_vlan() {
        let address = Ipv4Addr::new(10, 0, 0, 9);
        let frame = announce::tagged(&announce::gratuitous_arp(MAC, address), Vlan(7));
        let found = source(&frame).expect("tells one");
        assert_eq!((found.vlan, found.address), (Some(Vlan(7)), address.into()));
        assert_eq!(found.to_string(), "10.0.0.9 in VLAN 7");
        // A tag with a priority alone is no VLAN's.
        let mut frame = frame;
        frame[14..16].copy_from_slice(&[0xe0, 0]);
        assert_eq!(source(&frame), Some(IpAddr::from(address).into()));
    }

    fn frame(kind: u16, body: &[u8]) -> Vec<u8> {
        [&[0xff; 6][..], &MAC.0, &kind.to_be_bytes(), body].concat()
    }

    #[test]
    fn a_frame_tells_its_senders_address() {
        let mut v4 = [0; 20];
        v4[0] = 0x45;
        v4[12..16].copy_from_slice(&[10, 0, 0, 7]);
        assert_eq!(
            address(&frame(IPV4, &v4)),
            Some("10.0.0.7".parse().unwrap())
        );
        let mut v6 = [0; 40];
        v6[0] = 0x60;
        let six: Ipv6Addr = "fd00::7".parse().unwrap();
        v6[8..24].copy_from_slice(&six.octets());
        assert_eq!(address(&frame(IPV6, &v6)), Some(six.into()));
        let arp = announce::gratuitous_arp(MAC, Ipv4Addr::new(10, 0, 0, 9));
        assert_eq!(address(&arp), Some("10.0.0.9".parse().unwrap()));
    }

    #[test]
    fn what_tells_none_or_somebody_elses_is_not_believed() {
        let mut arp = announce::gratuitous_arp(MAC, Ipv4Addr::new(10, 0, 0, 9));
        arp[ETHERNET + 8] ^= 2;
        assert_eq!(address(&arp), None, "another's hardware address");
        for source in [[0; 4], [255; 4], [127, 0, 0, 1], [224, 0, 0, 1]] {
            let mut v4 = [0; 20];
            v4[0] = 0x45;
            v4[12..16].copy_from_slice(&source);
            assert_eq!(address(&frame(IPV4, &v4)), None, "{source:?}");
        }
        assert_eq!(
            address(&frame(0x8100, &[0; 40])),
            None,
            "tagged, and nothing in it"
        );
        let arp = announce::gratuitous_arp(MAC, Ipv4Addr::new(10, 0, 0, 9));
        let twice = announce::tagged(&announce::tagged(&arp, Vlan(7)), Vlan(8));
        assert_eq!(source(&twice), None, "two tags");
        let short = frame(IPV6, &[0x60; 20]);
        for length in 0..short.len() {
            assert_eq!(address(&short[..length]), None);
        }
    }
}
