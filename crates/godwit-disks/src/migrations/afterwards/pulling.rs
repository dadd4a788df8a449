//! Keeps up a connection on which a disk's owner pulls the parts still owed by this node after a move.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::AuthorityRecord;
use godwit_core::units::MigrationId;
use godwit_core::wire::{Features, Hello, Message, Purpose, Refusal, RefusalCode, TrafficClass};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::disks::disk::Disk;
use crate::migrations::Migrations;
use godwit_context::failpoint;
use godwit_peers::{PeerConnection, into_stream};

/// The traffic class and purpose of the connection.
const PULLED: (TrafficClass, Purpose) = (TrafficClass::Pull, Purpose::Pull);
/// Time before a lost connection is opened again, to bound the cost of a connection that always fails.
const AFTER_LOSS: Duration = Duration::from_millis(250);
/// First wait between two attempts, doubled each time up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(50);
/// Longest wait between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Time for a source that is no longer needed to store this, before its connection is closed.
const STORES_WITHIN: Duration = Duration::from_secs(2);

/// Connects to the owner of a disk just moved, unless a task does already.
pub fn start(migrations: &Arc<Migrations>, disk: &Arc<Disk>) {
    begin(migrations, disk, Duration::ZERO);
}

/// The same after a connection was lost, or the node has started.
pub fn start_again(migrations: &Arc<Migrations>, disk: &Arc<Disk>) {
    begin(migrations, disk, AFTER_LOSS);
}

fn begin(migrations: &Arc<Migrations>, disk: &Arc<Disk>, wait: Duration) {
    {
        let mut inner = disk.lock();
        if inner.connecting_owner {
            return;
        }
        inner.connecting_owner = true;
    }
    godwit_context::spawn(connect(Arc::clone(migrations), Arc::clone(disk), wait));
}

async fn connect(migrations: Arc<Migrations>, disk: Arc<Disk>, wait: Duration) {
    tokio::time::sleep(wait).await;
    let mut backoff = MIN_BACKOFF;
    let mut told = false;
    failpoint::reach(String::from("pull::connect")).await;
    loop {
        let (owed, owner) = {
            let mut inner = disk.lock();
            let owed = inner
                .record
                .owes()
                .filter(|_| !migrations.context.is_closing());
            inner.connecting_owner = owed.is_some();
            let entry = &inner.entry;
            let owner = entry.moved_to.clone().or_else(|| entry.counterpart.clone());
            (owed, owner)
        };
        let (Some(migration), Some(owner)) = (owed, owner) else {
            disk.lock().connecting_owner = false;
            return;
        };
        let opened = match migrations.context.peer(&owner) {
            Ok(peer) => {
                migrations
                    .context
                    .open_for(&disk.name, peer, PULLED, migration)
                    .await
            }
            Err(error) => Err(error.message),
        };
        match opened {
            Ok(stream) => {
                tracing::info!(disk = disk.name, owner, "the owner pulls what it lacks");
                let engine = disk.engine();
                // Cleared before the engine has the connection: a loss may be reported at once.
                disk.lock().connecting_owner = false;
                if let Some(engine) = engine {
                    engine.owe(stream);
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
            () = migrations.context.closed() => {}
        }
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Returns the disk of which the other node still owes a part to this node, according to the hello.
///
/// # Errors
/// This node has no such disk, cannot use the disk now, or lacks a part that another node has: the data on the
/// connection becomes the disk's content.
pub fn admit(migrations: &Arc<Migrations>, hello: &Hello) -> Result<Arc<Disk>, Refusal> {
    let (name, disk) = (&migrations.context.config.name, &hello.disk);
    let refuse = |code, text| Err(Refusal { code, text });
    let Some(found) = migrations.disks.find(disk) else {
        let text = format!("node '{name}' has no disk named {disk:?}");
        return refuse(RefusalCode::Unknown, text);
    };
    let (record, from, runs) = {
        let inner = found.lock();
        let runs = inner.engine.is_some();
        (inner.record, inner.entry.counterpart.clone(), runs)
    };
    if has_passed_on(&record, hello.migration) {
        return Ok(found);
    }
    let lacks = record.remainder;
    if !runs {
        let text = format!("disk {disk} cannot be used at node '{name}' now");
        return refuse(RefusalCode::Busy, text);
    }
    let expected = lacks.is_none_or(|migration| migration == hello.migration)
        && (lacks.is_none() || from.as_deref() == Some(&hello.node));
    if !expected {
        let text = format!(
            "what disk {disk} lacks at node '{name}' is not at node '{}'",
            hello.node
        );
        return refuse(RefusalCode::Invalid, text);
    }
    Ok(found)
}

/// Returns true if this node lacks nothing of the migration, because the disk has left since and this node owes a part
/// to the next owner. The engine's connection is then the one to the next owner.
fn has_passed_on(record: &AuthorityRecord, migration: MigrationId) -> bool {
    record.owes().is_some_and(|owed| owed != migration)
}

/// Tells the node at the other end that nothing is owed any more, and waits until the other end hangs up.
async fn release(mut connection: PeerConnection, migration: MigrationId) -> std::io::Result<()> {
    let (header, inline, length) = Message::Whole { migration }.encode();
    let mut frame = header.encode().to_vec();
    frame.extend_from_slice(&inline[..length]);
    connection.write_all(&frame).await?;
    connection.flush().await?;
    let mut said = [0; 256];
    let hangs_up = async {
        // The other node repeats its offer of the owed part until the new state is stored.
        while connection.read(&mut said).await? > 0 {}
        Ok(())
    };
    // A source too slow to store this connects again and is told again.
    (tokio::time::timeout(STORES_WITHIN, hangs_up).await).unwrap_or(Ok(()))
}

/// Lets the disk's engine pull on this connection, whose hello was welcomed.
pub async fn serve(disk: Arc<Disk>, connection: PeerConnection, hello: Hello) {
    let shows_life = hello.features.contain(Features::OWNER_BEATS);
    let (peer, migration) = (hello.node, hello.migration);
    let record = disk.lock().record;
    if has_passed_on(&record, migration) {
        tracing::info!(disk = disk.name, peer, %migration, "that node owes nothing any more");
        if let Err(error) = release(connection, migration).await {
            tracing::debug!(disk = disk.name, peer, %error, "that node is gone");
        }
        return;
    }
    let Some(engine) = disk.engine() else { return };
    match into_stream(connection).await {
        Ok(stream) => {
            tracing::info!(disk = disk.name, peer, "pulling what the disk lacks");
            engine.pull(stream, shows_life);
        }
        Err(error) => tracing::debug!(disk = disk.name, peer, %error, "that node is gone"),
    }
}
