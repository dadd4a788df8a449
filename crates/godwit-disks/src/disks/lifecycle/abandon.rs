//! Lets a disk go on without its missing parts, after an operator has declared the node with these parts lost for good.

use std::sync::Arc;

use crate::disks::Disks;
use crate::disks::disk::Disk;
use crate::disks::lifecycle::create;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::store::DiskEntry;

/// Makes requests for the disk's missing parts fail with an I/O error instead of waiting, across restarts too. If the
/// other node comes back after all, pulling goes on as before.
///
/// # Errors
/// The other node is connected, the disk lacks nothing but parts of its base image, or `lost` is false.
pub async fn abandon(disks: &Arc<Disks>, name: &str, lost: bool) -> Result<Arc<Disk>, ErrorBody> {
    let disk = disks.get(name)?;
    let refused =
        |text: String, hint: String| Err(ErrorBody::new(ErrorCode::Conflict, text).hint(hint));
    let (lacks, engine, other) = {
        let inner = disk.lock();
        let (entry, record) = (&inner.entry, &inner.record);
        let lacks = record.lacks().is_some() && entry.fetches(record).is_none();
        let engine = inner.engine.as_ref().map(|engine| engine.handle.clone());
        (lacks, engine, entry.counterpart.clone().unwrap_or_default())
    };
    let Some(engine) = engine.filter(|_| lacks) else {
        return refused(
            format!("disk {name} lacks nothing that only another node has"),
            String::from("see 'godwit disk show'"),
        );
    };
    let snapshot = engine.snapshot();
    let left = snapshot
        .missing
        .map_or_else(|| String::from("a part"), |left| left.to_string());
    if snapshot.missing_is_owed {
        return refused(
            format!(
                "node '{other}' is connected, and {left} of disk {name} is being pulled from there"
            ),
            String::from("wait until all of it is here, or stop that node for good first"),
        );
    }
    if !lost {
        return refused(
            format!(
                "{left} of disk {name} is at node '{other}' only: to go on without it makes reads of that fail, and \
                 the guest sees a broken disk there"
            ),
            format!("make sure that {other} is lost for good, then abandon it with --lost"),
        );
    }
    tracing::warn!(
        disk = name,
        other,
        %left,
        "an operator goes on without what the disk lacks: reads of that fail"
    );
    // Pulled parts may be stored meanwhile, so only this field is changed.
    let give_up = |entry: &mut DiskEntry| entry.abandoned = true;
    if let Err(error) = disks.context.store.change_disk(name, give_up).await {
        return Err(create::stored_badly(&disk, &error));
    }
    disk.lock().entry.abandoned = true;
    engine.abandon_missing();
    Ok(disk)
}
