//! Remote keys of a peer that has moved (the RDMA live-migration paper, section 3.3).
//!
//! A remote key travels from application to application past the library. Therefore a region's
//! virtual remote key is the physical one that it was registered with: a peer without Godwit can use
//! it, and a peer with Godwit has nothing to translate until the owner of the key has moved. When
//! it has, the mover hands every partner the whole table, so that the data path never asks anyone.

use serde::{Deserialize, Serialize};

/// A port's address: 16 bytes, an IPv6 address or an IPv4 one mapped into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Gid(pub [u8; 16]);

impl From<Gid> for String {
    fn from(gid: Gid) -> Self {
        std::net::Ipv6Addr::from(gid.0).to_string()
    }
}

impl TryFrom<String> for Gid {
    type Error = std::net::AddrParseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse::<std::net::Ipv6Addr>()
            .map(|address| Gid(address.octets()))
    }
}

impl std::fmt::Display for Gid {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::net::Ipv6Addr::from(self.0).fmt(formatter)
    }
}

/// From the remote keys that an application knows to those of the peer's present place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteKeys {
    /// Sorted by virtual key; only keys whose physical one differs.
    moved: Vec<(u32, u32)>,
}

impl RemoteKeys {
    /// The table for pairs of virtual and physical keys.
    pub fn new(mut pairs: Vec<(u32, u32)>) -> Self {
        pairs.retain(|(known, physical)| known != physical);
        pairs.sort_unstable();
        pairs.dedup_by_key(|pair| pair.0);
        Self { moved: pairs }
    }

    /// Whether every key means what it says.
    pub fn is_empty(&self) -> bool {
        self.moved.is_empty()
    }

    /// What the device of the peer knows `key` as.
    #[inline]
    pub fn physical(&self, key: u32) -> u32 {
        if self.moved.is_empty() {
            return key;
        }
        match self.moved.binary_search_by_key(&key, |pair| pair.0) {
            Ok(found) => self.moved[found].1,
            Err(_) => key,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_peer_that_never_moved_needs_no_translation() {
        assert_eq!(RemoteKeys::default().physical(0x2f3), 0x2f3);
        assert_eq!(RemoteKeys::new(vec![(5, 5)]), RemoteKeys::default());
    }

    #[test]
    fn a_gid_is_written_as_an_address() {
        let gid = Gid::try_from("::ffff:10.0.0.1".to_owned()).unwrap();
        assert_eq!(gid.0[10..], [0xff, 0xff, 10, 0, 0, 1]);
        assert_eq!(gid.to_string(), "::ffff:10.0.0.1");
        assert!(Gid::try_from("10.0.0.1/24".to_owned()).is_err());
    }

    proptest! {
        #[test]
        fn every_key_of_the_table_is_translated(pairs in prop::collection::btree_map(any::<u32>(), any::<u32>(), 0..64), other: u32) {
            let keys = RemoteKeys::new(pairs.clone().into_iter().collect());
            for (known, physical) in &pairs {
                prop_assert_eq!(keys.physical(*known), *physical);
            }
            if !pairs.contains_key(&other) {
                prop_assert_eq!(keys.physical(other), other);
            }
        }
    }
}
