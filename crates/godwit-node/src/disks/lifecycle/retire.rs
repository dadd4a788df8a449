//! Ends the engines of disks that have left and that nobody uses here any more: their threads, memory and
//! connections are for those that are served.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_block::engine::FrontEndState;
use godwit_core::authority::Ownership;

use crate::disks::disk::{Activity, Disk, Inner};
use crate::disks::lifecycle::run;
use crate::disks::vhost;
use crate::node::Node;

/// How often disks are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// How long a disk is left as it is after its last user: what the other node is still told of the migration
/// has arrived by then.
const AFTER_USE: Duration = Duration::from_secs(4);

/// How long after the node's start the disks that it found are left as they are: a QEMU that used one when the
/// node ended connects again.
const AFTER_START: Duration = Duration::from_secs(30);

/// Ends engines that nobody needs until the node is about to end.
pub(crate) async fn watch(node: Arc<Node>) {
    let later = Instant::now() + (AFTER_START - AFTER_USE);
    let found = node.disks.all();
    let mut unused: HashMap<String, Instant> = found
        .iter()
        .map(|disk| (disk.name.clone(), later))
        .collect();
    loop {
        let disks = node.disks.all();
        let now = Instant::now();
        unused.retain(|name, _| disks.iter().any(|disk| disk.name == *name));
        for disk in disks {
            if !is_unused(&node, &disk) {
                unused.remove(&disk.name);
                continue;
            }
            let since = *unused.entry(disk.name.clone()).or_insert(now);
            if now.duration_since(since) >= AFTER_USE {
                unused.remove(&disk.name);
                retire(&node, &disk).await;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = node.closed() => return,
        }
    }
}

/// Whether the disk's engine serves nobody and is not about to.
fn is_unused(node: &Node, disk: &Disk) -> bool {
    let idle = is_idle(disk, &disk.lock());
    // Not under the disk's lock, which whoever has that of the machines may wait for.
    idle && node.vms.user_of(&disk.name, None).is_none()
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

/// Ends the disk's engine, unless somebody needs it after all. The disk's return starts it again.
async fn retire(node: &Node, disk: &Arc<Disk>) {
    let _ending = disk.ending.lock().await;
    let engine = {
        let mut inner = disk.lock();
        if !is_idle(disk, &inner) {
            return;
        }
        // While nobody can have opened another in its place. That it is gone already is fine.
        let _ = vhost::remove(&node.config.vhost_socket(&disk.name));
        inner.engine.take()
    };
    if let Some(engine) = engine {
        run::end(disk, engine).await;
        tracing::debug!(disk = disk.name, "nobody uses the disk that has left");
    }
}
