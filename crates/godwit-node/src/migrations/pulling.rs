//! Keeps a connection up on which a disk's owner pulls what this node owes: the disk has moved, and not all of it.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::wire::{Hello, Purpose, Refusal, RefusalCode, TrafficClass};

use crate::disks::disk::Disk;
use crate::failpoint;
use crate::node::Node;
use crate::peers::{PeerConnection, greeting, into_stream};

/// First wait between two attempts; it doubles up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(50);
/// Longest wait between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// Connects to the disk's owner, unless that is being done.
pub(crate) fn start(node: &Arc<Node>, disk: &Arc<Disk>) {
    {
        let mut inner = disk.lock();
        if inner.connecting_owner {
            return;
        }
        inner.connecting_owner = true;
    }
    tokio::spawn(connect(Arc::clone(node), Arc::clone(disk)));
}

async fn connect(node: Arc<Node>, disk: Arc<Disk>) {
    let mut backoff = MIN_BACKOFF;
    let mut told = false;
    failpoint::reach(String::from("pull::connect")).await;
    loop {
        let (owed, owner) = {
            let mut inner = disk.lock();
            let owed = inner.record.owes().filter(|_| !node.is_closing());
            inner.connecting_owner = owed.is_some();
            let entry = &inner.entry;
            let owner = entry.moved_to.clone().or_else(|| entry.counterpart.clone());
            (owed, owner)
        };
        let (Some(migration), Some(owner)) = (owed, owner) else {
            disk.lock().connecting_owner = false;
            return;
        };
        match dial(&node, &disk, &owner, migration).await {
            Ok(stream) => {
                tracing::info!(disk = disk.name, owner, "the owner pulls what it lacks");
                let engine = disk.engine();
                // Before the engine has it: it may be lost and reported at once.
                disk.lock().connecting_owner = false;
                if let Some(engine) = engine {
                    engine.pull(stream);
                }
                return;
            }
            Err(error) if !std::mem::replace(&mut told, true) => {
                tracing::warn!(
                    disk = disk.name,
                    owner,
                    error,
                    "the owner needs a part of the disk from here and cannot be reached; trying on"
                );
            }
            Err(error) => tracing::debug!(disk = disk.name, owner, error, "still not reached"),
        }
        tokio::select! {
            () = tokio::time::sleep(backoff) => {}
            () = node.closed() => {}
        }
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

async fn dial(
    node: &Arc<Node>,
    disk: &Disk,
    owner: &str,
    migration: MigrationId,
) -> Result<godwit_block::engine::PeerStream, String> {
    let peer = node.peer(owner).map_err(|error| error.message)?;
    let hello = greeting::hello(
        &node.config.name,
        &disk.name,
        TrafficClass::Pull,
        Purpose::Pull,
        migration,
    );
    let (stream, _) = node
        .dialer
        .dial(peer, hello)
        .await
        .map_err(|error| error.to_string())?;
    into_stream(stream).await.map_err(|error| error.to_string())
}

/// The disk that another node owes a part of here.
///
/// # Errors
/// [`RefusalCode::Unknown`] when this node has no such disk.
pub(crate) fn admit(node: &Arc<Node>, hello: &Hello) -> Result<Arc<Disk>, Refusal> {
    node.disks.find(&hello.disk).ok_or_else(|| Refusal {
        code: RefusalCode::Unknown,
        text: format!(
            "node '{}' has no disk named {:?}",
            node.config.name, hello.disk
        ),
    })
}

/// Lets the disk's engine pull on this connection, whose hello was welcomed.
pub(crate) async fn serve(disk: Arc<Disk>, connection: PeerConnection, peer: String) {
    let Some(engine) = disk.engine() else { return };
    match into_stream(connection).await {
        Ok(stream) => {
            tracing::info!(disk = disk.name, peer, "pulling what the disk lacks");
            engine.pull(stream);
        }
        Err(error) => tracing::debug!(disk = disk.name, peer, %error, "that node is gone"),
    }
}
