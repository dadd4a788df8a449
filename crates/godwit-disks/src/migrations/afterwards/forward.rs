//! Keeps clients still connected to a departed disk: finds the owner and forwards to the owner.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::Ownership;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Hello, Purpose, Refusal, RefusalCode, TrafficClass};
use tokio::time::Instant;

use crate::disks::disk::Disk;
use crate::migrations::Migrations;
use godwit_peers::config::PeerConfig;
use godwit_peers::{PeerConnection, into_stream};

/// Time for which the owner may be out of reach before clients see errors.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// First wait between two attempts, doubled each time up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// Longest wait between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// Looks for the disk's owner, unless a task does already.
pub fn start(migrations: &Arc<Migrations>, disk: &Arc<Disk>) {
    {
        let mut inner = disk.lock();
        if inner.forwarding {
            return;
        }
        inner.forwarding = true;
    }
    godwit_context::spawn(connect(Arc::clone(migrations), Arc::clone(disk)));
}

async fn connect(migrations: Arc<Migrations>, disk: Arc<Disk>) {
    let deadline = Instant::now() + GIVE_UP_AFTER;
    let mut backoff = MIN_BACKOFF;
    loop {
        let elsewhere = matches!(
            disk.lock().record.ownership,
            Ownership::Departed { .. } | Ownership::Relinquished { .. } | Ownership::Vacant
        );
        if migrations.context.is_closing() || !elsewhere {
            disk.lock().forwarding = false;
            return;
        }
        for peer in candidates(&migrations, &disk) {
            let about = (TrafficClass::Sync, Purpose::Forward);
            match migrations
                .context
                .open_for(&disk.name, peer, about, MigrationId::default())
                .await
            {
                Ok(sync) => {
                    tracing::info!(
                        disk = disk.name,
                        owner = peer.name,
                        "forwarding to the owner"
                    );
                    let engine = disk.engine();
                    // Cleared before the engine has the connection: a loss may be reported at once.
                    disk.lock().forwarding = false;
                    if let Some(engine) = engine {
                        engine.forward(sync);
                    }
                    return;
                }
                Err(error) => {
                    tracing::debug!(disk = disk.name, peer = peer.name, error, "not the owner");
                }
            }
        }
        if Instant::now() + backoff >= deadline {
            break;
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
    tracing::error!(
        disk = disk.name,
        "no node served the disk for {} seconds: its clients here see errors",
        GIVE_UP_AFTER.as_secs()
    );
    let engine = disk.engine();
    disk.lock().forwarding = false;
    if let Some(engine) = engine {
        engine.fail_forwarded();
    }
}

/// Returns the peers to ask. The node that took the disk comes first, then all others, because the disk may have moved
/// on.
fn candidates<'a>(migrations: &'a Migrations, disk: &Disk) -> Vec<&'a PeerConfig> {
    let first = {
        let inner = disk.lock();
        inner
            .entry
            .moved_to
            .clone()
            .or_else(|| inner.entry.counterpart.clone())
    };
    let mut peers: Vec<_> = migrations.context.config.peers.iter().collect();
    peers.sort_by_key(|peer| Some(&peer.name) != first.as_ref());
    peers
}

/// Returns the disk to which another node may forward here.
///
/// # Errors
/// [`RefusalCode::Unknown`] if this node neither serves the disk nor is about to.
pub fn admit(migrations: &Arc<Migrations>, hello: &Hello) -> Result<Arc<Disk>, Refusal> {
    let refuse = |text| Refusal {
        code: RefusalCode::Unknown,
        text,
    };
    let name = &migrations.context.config.name;
    let disk = migrations
        .disks
        .find(&hello.disk)
        .ok_or_else(|| refuse(format!("node '{name}' has no disk named {:?}", hello.disk)))?;
    let inner = disk.lock();
    match inner.record.ownership {
        Ownership::Serving | Ownership::Accepted { .. } => {
            drop(inner);
            Ok(disk)
        }
        _ => {
            let owner = inner.entry.moved_to.as_deref().unwrap_or("an unknown node");
            Err(refuse(format!(
                "node '{name}' does not serve disk {}: it moved to {owner}",
                hello.disk
            )))
        }
    }
}

/// Serves requests forwarded by the other node on this connection, whose hello was welcomed.
pub async fn serve(disk: Arc<Disk>, sync: PeerConnection, peer: String) {
    let Some(engine) = disk.engine() else { return };
    match into_stream(sync).await {
        Ok(sync) => {
            tracing::info!(
                disk = disk.name,
                peer,
                "serving clients that stayed at the other node"
            );
            engine.serve_forwarded(peer, sync);
        }
        Err(error) => tracing::debug!(disk = disk.name, peer, %error, "the forwarder is gone"),
    }
}
