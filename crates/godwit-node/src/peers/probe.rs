//! Probes the peers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, TrafficClass};
use tokio::task::JoinSet;

use super::greeting;
use crate::config::PeerConfig;
use crate::node::Node;
use crate::peers::PeerConnection;
use godwit_api::Peer;

/// The results of the last probes.
#[derive(Debug, Default)]
pub(crate) struct PeerHealth {
    up: Mutex<BTreeMap<String, bool>>,
}

impl PeerHealth {
    /// Returns the probed peers, each with true if it answered.
    pub(crate) fn all(&self) -> BTreeMap<String, bool> {
        self.up
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, peer: &str, up: bool) {
        self.up
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(peer.to_owned(), up);
    }
}

/// A probed peer.
pub(crate) struct Met {
    pub(crate) peer: Peer,
    /// The connection, if the peer compares disks and machines on it.
    pub(crate) connection: Option<PeerConnection>,
}

/// Probes all peers at once.
pub(crate) async fn probe_all(node: &Arc<Node>) -> Vec<Met> {
    let mut probes = JoinSet::new();
    for peer in node.config.peers.clone() {
        let node = Arc::clone(node);
        probes.spawn(async move { probe(&node, peer).await });
    }
    let mut peers = probes.join_all().await;
    peers.sort_by(|a, b| a.peer.name.cmp(&b.peer.name));
    peers
}

async fn probe(node: &Arc<Node>, peer: PeerConfig) -> Met {
    let hello = greeting::hello(
        &node.config.name,
        "",
        TrafficClass::Control,
        Purpose::Resolve,
        MigrationId::default(),
    );
    let (connection, agreed, error) = match node.dialer.dial(&peer, hello).await {
        Ok((connection, agreed)) => {
            let compares = agreed.features.contain(Features::OWNERS);
            (Some(connection).filter(|_| compares), Some(agreed), None)
        }
        Err(error) => (None, None, Some(error.into_note(&peer.name))),
    };
    node.peer_health.set(&peer.name, error.is_none());
    let peer = Peer {
        name: peer.name,
        address: peer.address,
        reachable: error.is_none(),
        protocol_version: agreed.map(|agreed| agreed.version),
        data_encrypted: agreed.map(|agreed| {
            node.dialer.tls.is_some() && !agreed.features.contain(Features::CLEAR_DATA)
        }),
        compression: agreed.map(|agreed| agreed.features.contain(Features::COMPRESSION)),
        error,
    };
    Met { peer, connection }
}
