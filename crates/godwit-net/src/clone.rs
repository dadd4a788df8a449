//! The byte encoding of a NIC's state, which crosses from node to node (the ReNIC paper, section 3.1: clone interface).
//!
//! Ring positions are not included: QEMU moves the rings itself. All numbers are little-endian:
//!
//! ```text
//! "GWNIC" | version u8 | MAC 6 | counters: count u16, u64 each
//! | stations: count u16, each its VLAN u16 (0 is none), MAC 6, and seconds until it is forgotten u16
//! | queue pairs: count u8, each buffers that the guest has offered u16,
//!   and packets ahead of the guest: count u16, buffers of each u16
//! | token of the move 16 | packets: count u32, each length u32 and its bytes
//! | first 16 bytes of the BLAKE3 hash of everything before
//! ```
//!
//! Version 3 has IP addresses in the place of stations: count u8, each its VLAN u16, 4 or 6, and the address. Decoding
//! keeps only the VLANs of the addresses.

use std::time::Duration;

use godwit_vhost::features::MOST_RINGS;

use crate::frame::announce::Token;
use crate::frame::packet::{LARGEST, SMALLEST};
use crate::frame::vlan::Vlan;
use crate::mac::Mac;
use crate::state::counters::{COUNT, Counters};
use crate::state::held::{MOST_BYTES, MOST_PACKETS, Packet};
use crate::state::pace::{MOST_IN_RING, Pace};
use crate::state::stations::{MOST_STATIONS, REMEMBERED, Station};

/// Most queue pairs of a NIC.
pub const MOST_PAIRS: usize = MOST_RINGS as usize / 2;

const MAGIC: &[u8; 5] = b"GWNIC";

/// Version that this crate writes.
const VERSION: u8 = 4;

/// Oldest version that this crate reads.
const OLDEST: u8 = 3;

/// Most addresses in a state of version [`OLDEST`].
const MOST_ADDRESSES: u8 = 32;

const HASH: usize = 16;

/// Most bytes of an encoded state: the sum of the limits of all parts.
pub const MOST_STATE_BYTES: usize =
    MOST_BYTES + MOST_PACKETS * 4 + MOST_PAIRS * (4 + MOST_IN_RING * 2) + MOST_STATIONS * 10 + 4096;

/// The complete state of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// MAC address of the NIC.
    pub mac: Mac,
    /// Counters since the VM was started.
    pub counters: Counters,
    /// Stations from which the guest sent lately, the most recent first, each with the whole seconds until it is
    /// forgotten.
    pub stations: Vec<(Station, Duration)>,
    /// Packets not yet processed by the guest, by queue pair.
    pub paces: Vec<Pace>,
    /// Token of the move's announcement.
    pub token: Token,
    /// Packets waiting for the guest, in order.
    pub held: Vec<Packet>,
}

/// The reason why bytes cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloneError {
    /// The bytes do not begin with the format's magic number.
    #[error("the bytes are no state of a NIC")]
    Magic,
    /// An unknown version of the program wrote the bytes.
    #[error(
        "the state of a NIC has version {0}, and this node knows versions {OLDEST} to {VERSION}: run the same version of Godwit on both nodes"
    )]
    Version(u8),
    /// The bytes are cut off or too long.
    #[error("the state of a NIC is cut off or too long")]
    Length,
    /// The bytes were damaged in transit.
    #[error("the state of a NIC was damaged on its way")]
    Hash,
    /// A number is out of range.
    #[error("the state of a NIC is out of range: {0}")]
    Range(&'static str),
}

impl State {
    /// Encodes the state.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.mac.0);
        bytes.extend_from_slice(&(COUNT as u16).to_le_bytes());
        for number in self.counters.to_array() {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&(self.stations.len() as u16).to_le_bytes());
        for (Station { mac, vlan }, left) in &self.stations {
            bytes.extend_from_slice(&vlan.map_or(0, Vlan::number).to_le_bytes());
            bytes.extend_from_slice(&mac.0);
            // A partial second counts in full.
            let seconds = left.as_nanos().div_ceil(1_000_000_000) as u16;
            bytes.extend_from_slice(&seconds.to_le_bytes());
        }
        bytes.push(self.paces.len() as u8);
        for pace in &self.paces {
            bytes.extend_from_slice(&pace.offered_so_far().to_le_bytes());
            bytes.extend_from_slice(&(pace.ahead().len() as u16).to_le_bytes());
            for buffers in pace.ahead() {
                bytes.extend_from_slice(&buffers.to_le_bytes());
            }
        }
        bytes.extend_from_slice(&self.token.0);
        put_packets(&mut bytes, &self.held);
        seal(bytes)
    }

    /// Decodes a state. The bytes may come from a hostile peer.
    ///
    /// # Errors
    /// If the bytes are not a valid state.
    pub fn decode(bytes: &[u8]) -> Result<Self, CloneError> {
        let (version, mut reader) = open(bytes)?;
        let mac = Mac(reader.array()?);
        if mac.is_group() {
            return Err(CloneError::Range("the MAC address is a group's"));
        }
        if u16::from_le_bytes(reader.array()?) as usize != COUNT {
            return Err(CloneError::Range("it has another number of counters"));
        }
        let mut numbers = [0; COUNT];
        for number in &mut numbers {
            *number = u64::from_le_bytes(reader.array()?);
        }
        let stations = match version {
            OLDEST => reader.stations_of_addresses(mac)?,
            _ => reader.stations()?,
        };
        let [count] = reader.array()?;
        if !(1..=MOST_PAIRS).contains(&usize::from(count)) {
            return Err(CloneError::Range("it has no pair of queues, or too many"));
        }
        let paces = (0..count).map(|_| reader.pace());
        let paces = paces.collect::<Result<Vec<Pace>, CloneError>>()?;
        let token = Token(reader.array()?);
        let held = reader.packets()?;
        reader.end()?;
        Ok(Self {
            paces,
            token,
            mac,
            counters: Counters::from_array(numbers),
            stations,
            held,
        })
    }
}

/// Encodes packets without a state: packets that reached the source after the state was read.
pub fn encode_packets(packets: &[Packet]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(MAGIC);
    bytes.push(VERSION);
    put_packets(&mut bytes, packets);
    seal(bytes)
}

/// Decodes packets. The bytes may come from a hostile peer.
///
/// # Errors
/// If the bytes are not a valid encoding of packets.
pub fn decode_packets(bytes: &[u8]) -> Result<Vec<Packet>, CloneError> {
    let (_, mut reader) = open(bytes)?;
    let packets = reader.packets()?;
    reader.end()?;
    Ok(packets)
}

fn put_packets(bytes: &mut Vec<u8>, packets: &[Packet]) {
    bytes.extend_from_slice(&(packets.len() as u32).to_le_bytes());
    for packet in packets {
        bytes.extend_from_slice(&(packet.len() as u32).to_le_bytes());
        bytes.extend_from_slice(packet);
    }
}

fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let hash = blake3::hash(&bytes);
    bytes.extend_from_slice(&hash.as_bytes()[..HASH]);
    bytes
}

fn open(bytes: &[u8]) -> Result<(u8, Reader<'_>), CloneError> {
    if bytes.len() > MOST_STATE_BYTES {
        return Err(CloneError::Length);
    }
    let rest = bytes.strip_prefix(MAGIC).ok_or(CloneError::Magic)?;
    let version = *rest.first().ok_or(CloneError::Length)?;
    if !(OLDEST..=VERSION).contains(&version) {
        return Err(CloneError::Version(version));
    }
    let end = bytes.len().checked_sub(HASH).ok_or(CloneError::Length)?;
    let (content, hash) = bytes.split_at(end);
    let content_starts = MAGIC.len() + 1;
    let rest = content.get(content_starts..).ok_or(CloneError::Length)?;
    if blake3::hash(content).as_bytes()[..HASH] != *hash {
        return Err(CloneError::Hash);
    }
    Ok((version, Reader(rest)))
}

/// The bytes that are still to be read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], CloneError> {
        let (here, rest) = self.0.split_first_chunk().ok_or(CloneError::Length)?;
        self.0 = rest;
        Ok(*here)
    }

    fn bytes(&mut self, length: usize) -> Result<&'a [u8], CloneError> {
        let (here, rest) = self.0.split_at_checked(length).ok_or(CloneError::Length)?;
        self.0 = rest;
        Ok(here)
    }

    fn vlan(&mut self) -> Result<Option<Vlan>, CloneError> {
        match u16::from_le_bytes(self.array()?) {
            0 => Ok(None),
            number => match Vlan::new(number) {
                None => Err(CloneError::Range("there is no such VLAN")),
                vlan => Ok(vlan),
            },
        }
    }

    fn stations(&mut self) -> Result<Vec<(Station, Duration)>, CloneError> {
        let count = u16::from_le_bytes(self.array()?);
        if usize::from(count) > MOST_STATIONS {
            return Err(CloneError::Range("it has too many stations"));
        }
        let station = |_| {
            let vlan = self.vlan()?;
            let mac = Mac(self.array()?);
            let left = Duration::from_secs(u16::from_le_bytes(self.array()?).into());
            if mac.is_group() || left > REMEMBERED {
                return Err(CloneError::Range("there is no such station"));
            }
            Ok((Station { mac, vlan }, left))
        };
        (0..count).map(station).collect()
    }

    /// Reads the IP addresses that version [`OLDEST`] has in the place of stations.
    fn stations_of_addresses(&mut self, mac: Mac) -> Result<Vec<(Station, Duration)>, CloneError> {
        let [count] = self.array()?;
        if count > MOST_ADDRESSES {
            return Err(CloneError::Range("it has too many addresses"));
        }
        let mut stations = Vec::new();
        for _ in 0..count {
            let vlan = self.vlan()?;
            let length = match self.array()? {
                [4] => 4,
                [6] => 16,
                _ => return Err(CloneError::Range("an address is of no known kind")),
            };
            self.bytes(length)?;
            let told = (Station { mac, vlan }, REMEMBERED);
            if !stations.contains(&told) {
                stations.push(told);
            }
        }
        Ok(stations)
    }

    fn pace(&mut self) -> Result<Pace, CloneError> {
        const BEHIND: CloneError = CloneError::Range("no guest is so far behind");
        let offered = u16::from_le_bytes(self.array()?);
        let count = u16::from_le_bytes(self.array()?);
        if usize::from(count) > MOST_IN_RING {
            return Err(BEHIND);
        }
        let ahead = (0..count).map(|_| Ok(u16::from_le_bytes(self.array()?)));
        let ahead = ahead.collect::<Result<Vec<u16>, CloneError>>()?;
        Pace::from_told(ahead, offered).ok_or(BEHIND)
    }

    fn packets(&mut self) -> Result<Vec<Packet>, CloneError> {
        let count = u32::from_le_bytes(self.array()?) as usize;
        if count > MOST_PACKETS {
            return Err(CloneError::Range("it has too many packets"));
        }
        // The count is not trusted: no capacity is reserved for packets yet to be read.
        let mut packets = Vec::new();
        let mut total = 0;
        for _ in 0..count {
            let length = u32::from_le_bytes(self.array()?) as usize;
            if !(SMALLEST..=LARGEST).contains(&length) {
                return Err(CloneError::Range("a packet is too short or too long"));
            }
            total += length;
            if total > MOST_BYTES {
                return Err(CloneError::Range("its packets are too long together"));
            }
            packets.push(self.bytes(length)?.into());
        }
        Ok(packets)
    }

    fn end(&self) -> Result<(), CloneError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(CloneError::Length)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn states() -> impl Strategy<Value = State> {
        let packets =
            prop::collection::vec(prop::collection::vec(any::<u8>(), SMALLEST..200), 0..20);
        let left = 1..=REMEMBERED.as_secs();
        let stations = prop::collection::vec((0_u16..4095, any::<[u8; 6]>(), left), 0..40);
        let pace = (prop::collection::vec(1_u16.., 0..300), any::<u16>());
        let paces = prop::collection::vec(pace, 1..=MOST_PAIRS);
        let others = (paces, any::<[u8; 16]>());
        (
            any::<[u8; 6]>(),
            any::<[u64; COUNT]>(),
            stations,
            packets,
            others,
        )
            .prop_map(|(mut mac, numbers, found, packets, (paces, token))| {
                mac[0] &= 0xfe;
                let station = |(vlan, mut mac, left): (u16, [u8; 6], u64)| {
                    mac[0] &= 0xfe;
                    let (mac, vlan) = (Mac(mac), Vlan::new(vlan));
                    (Station { mac, vlan }, Duration::from_secs(left))
                };
                let paces = paces.into_iter();
                let paces = paces.map(|(ahead, offered)| Pace::from_told(ahead, offered));
                State {
                    mac: Mac(mac),
                    counters: Counters::from_array(numbers),
                    stations: found.into_iter().map(station).collect(),
                    paces: paces.map(|pace| pace.expect("can be")).collect(),
                    token: Token(token),
                    held: packets.into_iter().map(Into::into).collect(),
                }
            })
    }

    proptest! {
        #[test]
        fn a_state_survives_its_way(state in states()) {
            prop_assert_eq!(State::decode(&state.encode()), Ok(state.clone()));
            let packets = encode_packets(&state.held);
            prop_assert_eq!(decode_packets(&packets), Ok(state.held));
        }

        #[test]
        fn a_state_that_was_cut_or_changed_is_refused(
            state in states(), at in any::<prop::sample::Index>(), bit in 0_u8..8,
        ) {
            let bytes = state.encode();
            let at = at.index(bytes.len());
            prop_assert!(State::decode(&bytes[..at]).is_err());
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            prop_assert!(State::decode(&changed).is_err());
            let longer = [&bytes[..], &[0]].concat();
            prop_assert!(State::decode(&longer).is_err());
        }

        #[test]
        fn garbage_is_refused_also_when_its_hash_is_right(garbage in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(State::decode(&garbage).is_err());
            let sealed = seal([&MAGIC[..], &[VERSION], &garbage].concat());
            // Decoding stays within the bytes, whatever their content.
            if let Ok(state) = State::decode(&sealed) {
                prop_assert_eq!(state.encode(), sealed.clone());
            }
            let _ = decode_packets(&sealed);
        }
    }

    #[test]
    fn numbers_out_of_their_range_are_refused() {
        let state = State {
            mac: Mac([2, 0, 0, 0, 0, 1]),
            counters: Counters::default(),
            stations: Vec::new(),
            paces: vec![Pace::default()],
            token: Token::default(),
            held: Vec::new(),
        };
        let content = |state: &State| {
            let bytes = state.encode();
            bytes[..bytes.len() - HASH].to_vec()
        };
        let sealed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = content(&state);
            change(&mut bytes);
            State::decode(&seal(bytes))
        };
        let places = content(&state).len();
        let (stations, pairs, ahead, packets) = (places - 27, places - 25, places - 22, places - 4);
        assert!(matches!(
            sealed(&|bytes| bytes[5] = 9),
            Err(CloneError::Version(9))
        ));
        assert!(matches!(
            sealed(&|bytes| bytes[6] = 1),
            Err(CloneError::Range(_))
        ));
        assert!(matches!(
            sealed(&|bytes| bytes[12] = 0xff),
            Err(CloneError::Range(_))
        ));
        assert!(matches!(
            sealed(&|bytes| bytes[stations + 1] = 0xff),
            Err(CloneError::Range(_))
        ));
        for count in [0, MOST_PAIRS as u8 + 1] {
            let odd = |bytes: &mut Vec<u8>| bytes[pairs] = count;
            assert!(matches!(sealed(&odd), Err(CloneError::Range(_))), "{count}");
        }
        for (count, buffers) in [(1, 0), (MOST_IN_RING as u16 + 1, 1)] {
            let behind = |bytes: &mut Vec<u8>| {
                bytes[ahead..ahead + 2].copy_from_slice(&u16::to_le_bytes(count));
                let each = vec![u16::to_le_bytes(buffers); usize::from(count)].concat();
                bytes.splice(ahead + 2..ahead + 2, each);
            };
            assert!(
                matches!(sealed(&behind), Err(CloneError::Range(_))),
                "{count}"
            );
        }
        for odd in [
            [0xff, 0xff, 2, 0, 0, 0, 0, 1, 9, 0],
            [0, 0, 1, 0, 0, 0, 0, 1, 9, 0],
            [0, 0, 2, 0, 0, 0, 0, 1, 9, 9],
        ] {
            let station = |bytes: &mut Vec<u8>| {
                bytes[stations] = 1;
                bytes.splice(stations + 2..stations + 2, odd);
            };
            assert!(matches!(sealed(&station), Err(CloneError::Range(_))));
        }
        // A node of an earlier version sends IP addresses.
        let older = |bytes: &mut Vec<u8>| {
            bytes[5] = OLDEST;
            let addresses = [2, 0, 0, 4, 10, 0, 0, 9, 5, 0, 4, 10, 0, 0, 9];
            bytes.splice(stations..stations + 2, addresses);
        };
        let told = [None, Vlan::new(5)].map(|vlan| {
            (
                Station {
                    mac: state.mac,
                    vlan,
                },
                REMEMBERED,
            )
        });
        assert_eq!(
            sealed(&older).map(|state| state.stations),
            Ok(told.to_vec())
        );
        let many = |bytes: &mut Vec<u8>| bytes[packets..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(sealed(&many), Err(CloneError::Range(_))));
        let missing = |bytes: &mut Vec<u8>| bytes[packets] = 1;
        assert!(matches!(sealed(&missing), Err(CloneError::Length)));
        let long = |bytes: &mut Vec<u8>| {
            bytes[packets] = 1;
            bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        };
        assert!(matches!(sealed(&long), Err(CloneError::Range(_))));
        assert_eq!(
            State::decode(&vec![0; MOST_STATE_BYTES + 1]),
            Err(CloneError::Length)
        );
    }
}
