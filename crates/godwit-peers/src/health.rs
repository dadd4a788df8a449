//! The peers' recent reachability.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The results of the last probes.
#[derive(Debug, Default)]
pub struct PeerHealth {
    up: Mutex<BTreeMap<String, bool>>,
}

impl PeerHealth {
    /// Returns the probed peers, each with true if it answered.
    pub fn all(&self) -> BTreeMap<String, bool> {
        self.up
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Notes whether the peer answered.
    pub fn set(&self, peer: &str, up: bool) {
        self.up
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(peer.to_owned(), up);
    }
}
