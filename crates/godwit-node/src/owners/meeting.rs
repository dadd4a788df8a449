//! Meetings with all peers, at which both nodes compare their disks and machines.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::Peer;

use crate::node::Node;
use crate::owners::probe::{Met, probe_all};
use crate::owners::{compare, look_at_memory};

/// Time between two probes for the metrics.
const PROBE_EVERY: Duration = Duration::from_secs(15);

/// Asks all peers at once, and compares disks and machines with each peer that answers.
pub(crate) async fn meet_all(node: &Arc<Node>) -> Vec<Peer> {
    let met = probe_all(&node.context).await.into_iter();
    met.map(|Met { peer, connection }| {
        if let Some(connection) = connection {
            let (node, name) = (Arc::clone(node), peer.name.clone());
            godwit_context::spawn(async move {
                if let Err(error) = compare(&node, &name, connection).await {
                    tracing::debug!(peer = name, %error, "what both nodes have was not compared");
                }
            });
        }
        peer
    })
    .collect()
}

/// Asks the peers from time to time until the node ends.
pub(crate) async fn watch(node: Arc<Node>) {
    let mut ticks = tokio::time::interval(PROBE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = node.context.closed() => return,
        }
        meet_all(&node).await;
        look_at_memory(&node).await;
    }
}
