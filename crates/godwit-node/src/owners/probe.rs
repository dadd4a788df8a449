//! Probes the peers.

use std::sync::Arc;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Purpose, TrafficClass};
use tokio::task::JoinSet;

use godwit_api::Peer;
use godwit_context::Context;
use godwit_peers::config::PeerConfig;
use godwit_peers::{PeerConnection, greeting};

/// A probed peer.
pub(crate) struct Met {
    pub(crate) peer: Peer,
    /// The connection, if the peer compares disks and machines on it.
    pub(crate) connection: Option<PeerConnection>,
}

/// Probes all peers at once.
pub(crate) async fn probe_all(context: &Arc<Context>) -> Vec<Met> {
    let mut probes = JoinSet::new();
    for peer in context.config.peers.clone() {
        let context = Arc::clone(context);
        probes.spawn(async move { probe(&context, peer).await });
    }
    let mut peers = probes.join_all().await;
    peers.sort_by(|a, b| a.peer.name.cmp(&b.peer.name));
    peers
}

async fn probe(context: &Arc<Context>, peer: PeerConfig) -> Met {
    let hello = greeting::hello(
        &context.config.name,
        "",
        TrafficClass::Control,
        Purpose::Resolve,
        MigrationId::default(),
    );
    let (connection, agreed, error) = match context.dialer.dial(&peer, hello).await {
        Ok((connection, agreed)) => {
            let compares = agreed.features.contain(Features::OWNERS);
            (Some(connection).filter(|_| compares), Some(agreed), None)
        }
        Err(error) => (None, None, Some(error.into_note(&peer.name))),
    };
    context.peer_health.set(&peer.name, error.is_none());
    let peer = Peer {
        name: peer.name,
        address: peer.address,
        reachable: error.is_none(),
        protocol_version: agreed.map(|agreed| agreed.version),
        data_encrypted: agreed.map(|agreed| {
            context.dialer.tls.is_some() && !agreed.features.contain(Features::CLEAR_DATA)
        }),
        compression: agreed.map(|agreed| agreed.features.contain(Features::COMPRESSION)),
        error,
    };
    Met { peer, connection }
}
