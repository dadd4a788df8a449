//! Uplinks that are made again while their NICs are served, and those that pass nothing yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::nics::links::{Changes, Links, Way};
use crate::nics::served::ServedNic;
use crate::node::Node;

/// How often it is looked when nothing tells of a change: the kernel may have had no room to tell.
const LOOK: Duration = Duration::from_secs(5);

/// How long changes gather: who makes a bridge again changes it several times.
const GATHER: Duration = Duration::from_millis(100);

/// How long packets may take to pass when a machine comes: a spanning tree listens and learns for 15 s each. The source waits
/// for 40 s.
const PASSES_WITHIN: Duration = Duration::from_secs(34);

/// How often a NIC is looked at that waits for that.
const WAITS: Duration = Duration::from_millis(200);

/// Follows the uplinks of all NICs until the node ends.
pub(crate) async fn follow(node: Arc<Node>) {
    let changes = Changes::open();
    if let Err(error) = &changes {
        tracing::warn!(%error, "the kernel does not tell of changed interfaces");
    }
    loop {
        let changed = async {
            match &changes {
                Ok(changes) => changes.next().await,
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            () = node.closed() => return,
            () = changed => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(LOOK) => {}
        }
        look(&node).await;
    }
}

async fn look(node: &Node) {
    let of_machines = node
        .vms
        .all()
        .into_iter()
        .flat_map(|vm| vm.lock().nics.clone());
    let named = node
        .nics
        .all()
        .into_iter()
        .filter_map(|nic| nic.served().ok());
    let nics: Vec<Arc<ServedNic>> = of_machines.chain(named).collect();
    if nics.is_empty() {
        return;
    }
    match Links::read().await {
        Ok(links) => {
            for nic in nics {
                nic.follow(&links).await;
            }
        }
        Err(error) => tracing::warn!(%error, "the kernel does not tell its interfaces"),
    }
}

/// Waits until packets of these NICs pass, or will not by themselves.
///
/// # Errors
/// Why they do not, in a sentence.
pub(crate) async fn until_passing(nics: &[Arc<ServedNic>]) -> Result<(), String> {
    let until = Instant::now() + PASSES_WITHIN;
    for (number, nic) in nics.iter().enumerate() {
        loop {
            let links = Links::read().await;
            let links = links
                .map_err(|error| format!("the kernel does not tell its interfaces: {error}"))?;
            match nic.follow(&links).await {
                Way::Begins | Way::Comes(_) if Instant::now() < until => {
                    tokio::time::sleep(WAITS).await;
                }
                Way::Comes(why) | Way::Blocked(why) => return Err(format!("NIC {number}: {why}")),
                Way::Begins => {
                    return Err(format!("NIC {number}: its bridge does not see its tap"));
                }
                Way::Passes | Way::Gone | Way::Unplugged => break,
            }
        }
    }
    Ok(())
}
