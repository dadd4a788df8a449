//! Probes the peers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, TrafficClass};
use tokio::task::JoinSet;

use super::greeting;
use crate::config::PeerConfig;
use crate::node::Node;
use crate::owners;
use godwit_api::Peer;

/// Time between two probes for the metrics.
const PROBE_EVERY: Duration = Duration::from_secs(15);

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

/// Probes all peers at once.
pub(crate) async fn probe_all(node: &Arc<Node>) -> Vec<Peer> {
    let mut probes = JoinSet::new();
    for peer in node.config.peers.clone() {
        let node = Arc::clone(node);
        probes.spawn(async move { probe(&node, peer).await });
    }
    let mut peers = probes.join_all().await;
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    peers
}

async fn probe(node: &Arc<Node>, peer: PeerConfig) -> Peer {
    let hello = greeting::hello(
        &node.config.name,
        "",
        TrafficClass::Control,
        Purpose::Resolve,
        MigrationId::default(),
    );
    let (agreed, error) = match node.dialer.dial(&peer, hello).await {
        Ok((connection, agreed)) => {
            if agreed.features.contain(Features::OWNERS) {
                let (node, peer) = (Arc::clone(node), peer.name.clone());
                tokio::spawn(async move {
                    if let Err(error) = owners::compare(&node, &peer, connection).await {
                        tracing::debug!(peer, %error, "what both nodes have was not compared");
                    }
                });
            }
            (Some(agreed), None)
        }
        Err(error) => (None, Some(error.into_note(&peer.name))),
    };
    node.peer_health.set(&peer.name, error.is_none());
    Peer {
        name: peer.name,
        address: peer.address,
        reachable: error.is_none(),
        protocol_version: agreed.map(|agreed| agreed.version),
        data_encrypted: agreed.map(|agreed| {
            node.dialer.tls.is_some() && !agreed.features.contain(Features::CLEAR_DATA)
        }),
        compression: agreed.map(|agreed| agreed.features.contain(Features::COMPRESSION)),
        error,
    }
}

/// Probes the peers from time to time until the node ends.
pub(crate) async fn watch(node: Arc<Node>) {
    let mut ticks = tokio::time::interval(PROBE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = node.closed() => return,
        }
        probe_all(&node).await;
        owners::look_at_memory(&node).await;
    }
}
