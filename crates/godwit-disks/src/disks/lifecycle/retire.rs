//! Ends the engines of departed disks without users here: threads, memory and connections are for served disks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_block::engine::FrontEndState;
use godwit_core::authority::Ownership;

use crate::disks::Disks;
use crate::disks::disk::{Activity, Disk, Inner};
use crate::disks::lifecycle::run;
use crate::disks::vhost;

/// Time between two looks at the disks.
const LOOK: Duration = Duration::from_secs(1);

/// Time from a disk's last use to the end of its engine. The last messages about the migration reach the other node
/// within this time.
const AFTER_USE: Duration = Duration::from_secs(4);

/// Shortest time from the node's start to the retirement of a disk found at the start. A QEMU that used the disk before
/// the restart connects again within this time.
const AFTER_START: Duration = Duration::from_secs(30);

/// Ends unused engines until the node closes.
pub async fn watch(disks: Arc<Disks>) {
    let later = Instant::now() + (AFTER_START - AFTER_USE);
    let found = disks.all();
    let mut unused: HashMap<String, Instant> = found
        .iter()
        .map(|disk| (disk.name.clone(), later))
        .collect();
    loop {
        let all = disks.all();
        let now = Instant::now();
        unused.retain(|name, _| all.iter().any(|disk| disk.name == *name));
        for disk in all {
            if !is_unused(&disks, &disk) {
                unused.remove(&disk.name);
                continue;
            }
            let since = *unused.entry(disk.name.clone()).or_insert(now);
            if now.duration_since(since) >= AFTER_USE {
                unused.remove(&disk.name);
                retire(&disks, &disk).await;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = disks.context.closed() => return,
        }
    }
}

/// Returns true if the disk's engine serves no user and is not about to.
fn is_unused(disks: &Disks, disk: &Disk) -> bool {
    let idle = is_idle(disk, &disk.lock());
    // Not under the disk's lock: a holder of the machines' lock may wait for the disk's.
    idle && disks.machine_with(&disk.name).is_none()
}

fn is_idle(disk: &Disk, inner: &Inner) -> bool {
    let Some(engine) = &inner.engine else {
        return false;
    };
    let elsewhere = matches!(
        inner.record.ownership,
        Ownership::Departed { .. } | Ownership::Vacant
    );
    let busy = inner.activity != Activity::Idle
        || inner.forwarding
        || inner.vhost_held
        || inner.record.remainder.is_some()
        || inner.group.is_some()
        || disk.clients() > 0
        || disk.places.taken() > 0;
    if !elsewhere || busy {
        return false;
    }
    let snapshot = engine.handle.snapshot();
    snapshot.record == inner.record
        && snapshot.clients == 0
        && snapshot.front_end == FrontEndState::Absent
        && snapshot.requests_in_flight == 0
}

/// Ends the disk's engine unless the disk is no longer idle. The disk's return starts an engine again.
async fn retire(disks: &Disks, disk: &Arc<Disk>) {
    let _ending = disk.ending.lock().await;
    let engine = {
        let mut inner = disk.lock();
        if !is_idle(disk, &inner) {
            return;
        }
        // Under the lock, before another engine can open a socket in the same place. A missing socket is fine.
        let _ = vhost::remove(&disks.context.config.vhost_socket(&disk.name));
        inner.engine.take()
    };
    if let Some(engine) = engine {
        run::end(disk, engine).await;
        tracing::debug!(disk = disk.name, "nobody uses the disk that has left");
    }
}
