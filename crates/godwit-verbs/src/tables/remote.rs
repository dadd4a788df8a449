//! Remote keys of a peer that has moved (the RDMA live-migration paper, section 3.3).
//!
//! A remote key travels from application to application past the library. Therefore a region's virtual remote key is
//! the physical key from the registration. A peer without Godwit can use the key, and a peer with Godwit translates
//! nothing until the owner of the key has moved. Then the mover hands every partner the whole table, so that the data
//! path never asks.

use serde::{Deserialize, Serialize};

use super::windows::TAG_BITS;

/// A port's address: 16 bytes, an IPv6 address or a mapped IPv4 address.
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

/// The device's key for a remote key of a process. In JSON a pair of numbers, or `{"window": 5, "physical": 9}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RemoteKey {
    /// The key of a region: the application's and the device's.
    Region(u32, u32),
    /// All keys of a memory window: the upper 24 bits of the application's and the device's keys. Both have the same
    /// lowest byte, regardless of the binding.
    Window {
        /// The application's name.
        window: u32,
        /// The device's name.
        physical: u32,
    },
}

impl RemoteKey {
    /// Returns true if the device's key differs from the application's.
    pub fn differs(&self) -> bool {
        match *self {
            RemoteKey::Region(known, physical) => known != physical,
            RemoteKey::Window { window, physical } => window != physical,
        }
    }
}

/// A map from the application's remote keys to the keys at the peer's present place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteKeys {
    /// Regions, sorted by virtual key; only keys with a different physical key.
    moved: Vec<(u32, u32)>,
    /// Names of windows, likewise.
    windows: Vec<(u32, u32)>,
}

impl RemoteKeys {
    /// Returns the table of these keys.
    pub fn new(keys: &[RemoteKey]) -> Self {
        let (mut moved, mut windows) = (Vec::new(), Vec::new());
        for key in keys.iter().filter(|key| key.differs()) {
            match *key {
                RemoteKey::Region(known, physical) => moved.push((known, physical)),
                RemoteKey::Window { window, physical } => windows.push((window, physical)),
            }
        }
        for table in [&mut moved, &mut windows] {
            table.sort_unstable();
            table.dedup_by_key(|pair| pair.0);
        }
        Self { moved, windows }
    }

    /// Returns true if no key is translated.
    pub fn is_empty(&self) -> bool {
        self.moved.is_empty() && self.windows.is_empty()
    }

    /// Returns the peer's device's key for `key`.
    #[inline]
    pub fn physical(&self, key: u32) -> u32 {
        if self.is_empty() {
            return key;
        }
        match self.moved.binary_search_by_key(&key, |pair| pair.0) {
            Ok(found) => self.moved[found].1,
            Err(_) if self.windows.is_empty() => key,
            Err(_) => self.of_window(key),
        }
    }

    #[inline(never)]
    fn of_window(&self, key: u32) -> u32 {
        let name = key >> TAG_BITS;
        match self.windows.binary_search_by_key(&name, |pair| pair.0) {
            Ok(found) => self.windows[found].1 << TAG_BITS | key & ((1 << TAG_BITS) - 1),
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
        let same = [
            RemoteKey::Region(5, 5),
            RemoteKey::Window {
                window: 6,
                physical: 6,
            },
        ];
        assert_eq!(RemoteKeys::new(&same), RemoteKeys::default());
    }

    #[test]
    fn keys_are_written_as_they_were_before_there_were_windows() {
        let keys = [
            RemoteKey::Region(5, 6),
            RemoteKey::Window {
                window: 7,
                physical: 8,
            },
        ];
        let text = serde_json::to_string(&keys).unwrap();
        assert_eq!(text, r#"[[5,6],{"window":7,"physical":8}]"#);
        assert_eq!(serde_json::from_str::<Vec<RemoteKey>>(&text).unwrap(), keys);
    }

    #[test]
    fn a_gid_is_written_as_an_address() {
        let gid = Gid::try_from("::ffff:10.0.0.1".to_owned()).unwrap();
        assert_eq!(gid.0[10..], [0xff, 0xff, 10, 0, 0, 1]);
        assert_eq!(gid.to_string(), "::ffff:10.0.0.1");
        assert!(Gid::try_from("10.0.0.1/24".to_owned()).is_err());
    }

    proptest! {
        /// For any table of a peer, even a senseless one: a region's key is translated, a window's name covers all of
        /// its 256 keys, and other keys stay the same.
        #[test]
        fn every_key_of_the_table_is_translated(
            regions in prop::collection::btree_map(any::<u32>(), any::<u32>(), 0..64),
            windows in prop::collection::btree_map(0u32..1 << 24, any::<u32>(), 0..8),
            tag: u8,
            other: u32,
        ) {
            let keys = RemoteKeys::new(&regions.iter().map(|(known, physical)| RemoteKey::Region(*known, *physical))
                .chain(windows.iter().map(|(window, physical)| RemoteKey::Window { window: *window, physical: *physical }))
                .collect::<Vec<_>>());
            for (known, physical) in &regions {
                if known != physical {
                    prop_assert_eq!(keys.physical(*known), *physical);
                }
            }
            for (window, physical) in &windows {
                let known = window << 8 | u32::from(tag);
                if !regions.contains_key(&known) {
                    prop_assert_eq!(keys.physical(known), physical << 8 | u32::from(tag));
                }
            }
            if !regions.contains_key(&other) && !windows.contains_key(&(other >> 8)) {
                prop_assert_eq!(keys.physical(other), other);
            }
        }
    }
}
