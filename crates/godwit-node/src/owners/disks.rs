//! Finds this node's disks with a later owner.

use std::collections::HashMap;
use std::sync::Arc;

use godwit_core::authority::Ownership;

use super::{Kind, Shown};
use crate::node::Node;
use godwit_context::store::DiskEntry;
use godwit_context::store::surpassed::Surpassed;
use godwit_disks::disks::disk::Disk;

/// Returns this node's disks, as far as known here.
pub(super) fn owned(node: &Node) -> Vec<Shown> {
    let disks = node.disks.all();
    let shown = disks.iter().filter_map(|disk| {
        let inner = disk.lock();
        let owns = inner.record.ownership == Ownership::Serving;
        let id = inner.entry.id.filter(|_| owns)?;
        Some(Shown::new(Kind::Disk, id.to_string(), &inner.record))
    });
    shown.collect()
}

/// Returns this node's records of another node's disks.
pub(super) fn known(node: &Node, theirs: &[Shown]) -> Vec<Shown> {
    let asked = theirs.iter().filter(|shown| shown.kind == Kind::Disk);
    let asked: Vec<&str> = asked.map(|shown| shown.id.as_str()).collect();
    if asked.is_empty() {
        return Vec::new();
    }
    let disks = by_id(node);
    let shown = asked.into_iter().filter_map(|id| {
        let record = disks.get(id)?.lock().record;
        Some(Shown::new(Kind::Disk, id.to_owned(), &record))
    });
    shown.collect()
}

fn by_id(node: &Node) -> HashMap<String, Arc<Disk>> {
    let disks = node.disks.all().into_iter();
    let named = disks.filter_map(|disk| {
        let id = disk.lock().entry.id?;
        Some((id.to_string(), disk))
    });
    named.collect()
}

/// Holds the I/O of the disks surpassed by these records.
pub(super) async fn judge(node: &Arc<Node>, peer: &str, theirs: &[Shown]) {
    let mut shown = theirs.iter().filter(|shown| shown.kind == Kind::Disk);
    let Some(first) = shown.next() else { return };
    let disks = by_id(node);
    for shown in std::iter::once(first).chain(shown) {
        if let Some(disk) = disks.get(&shown.id) {
            judge_one(node, disk, peer, shown).await;
        }
    }
}

async fn judge_one(node: &Arc<Node>, disk: &Arc<Disk>, peer: &str, shown: &Shown) {
    let theirs = shown.record();
    let surpassed = Surpassed {
        by: peer.to_owned(),
        epoch: shown.epoch,
    };
    let (engine, own) = {
        let mut inner = disk.lock();
        // The disk may have been given away, or held, since.
        if inner.entry.surpassed.is_some() || !inner.record.is_surpassed_by(&theirs) {
            return;
        }
        inner.entry.surpassed = Some(surpassed.clone());
        let engine = inner.engine.as_ref().map(|engine| engine.handle.clone());
        (engine, inner.record.epoch.0)
    };
    if let Some(engine) = engine {
        engine.surpass();
    }
    let why = surpassed.why("the disk", own);
    tracing::error!(disk = disk.name, peer, why, "the disk's I/O is held");
    let keep = move |entry: &mut DiskEntry| entry.surpassed = Some(surpassed.clone());
    if let Err(error) = node.context.store.change_disk(&disk.name, keep).await {
        tracing::error!(disk = disk.name, %error, "a restart would not know at once that the disk is to be held");
    }
}
