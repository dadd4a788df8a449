//! Follows uplinks made again while their NICs are served, and uplinks that pass no packets yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::nics::links::{Changes, Links, Way};
use crate::nics::named::NamedNics;
use crate::nics::served::ServedNic;

/// Time between two looks without a notification: the kernel drops notifications if its buffer is full.
const LOOK: Duration = Duration::from_secs(5);

/// Time to gather changes: making a bridge again causes several.
const GATHER: Duration = Duration::from_millis(100);

/// Time limit for packets to pass when a machine arrives: a spanning tree listens and learns for 15 s each. The source
/// waits for 40 s.
const PASSES_WITHIN: Duration = Duration::from_secs(34);

/// Time between two looks at a NIC that passes no packets yet.
const WAITS: Duration = Duration::from_millis(200);

/// Follows the uplinks of all NICs until the node ends.
pub async fn follow(nics: Arc<NamedNics>) {
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
            () = nics.context.closed() => return,
            () = changed => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(LOOK) => {}
        }
        look(&nics).await;
    }
}

async fn look(nics: &NamedNics) {
    // A NIC that is adopted meanwhile is in both lists rather than in none.
    let named = nics.all().into_iter().filter_map(|nic| nic.served().ok());
    let of_machines = nics.of_machines().into_iter().flat_map(|vm| vm.served);
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

/// Waits until packets of these NICs pass, or will not without help.
///
/// # Errors
/// The reason why packets do not pass, in a sentence.
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
