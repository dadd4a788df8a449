//! Lets an operator decide the owner of a disk when the other node cannot be asked.

use std::sync::Arc;

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::Epoch;

use crate::disks::Disks;
use crate::disks::Said;
use crate::disks::disk::{Activity, Disk};
use crate::disks::lifecycle::create;
use crate::disks::lifecycle::run;
use godwit_api::{ErrorBody, ErrorCode};

/// Makes this node the owner of a disk in doubt or of an outdated disk.
///
/// # Errors
/// The disk is neither in doubt nor outdated, has another activity, or `force` is missing.
pub async fn claim(disks: &Arc<Disks>, name: &str, force: bool) -> Result<Arc<Disk>, ErrorBody> {
    let disk = disks.get(name)?;
    let mut other = String::from("the other node");
    let mut undecided = None;
    let _guard = disk.begin(Activity::Claiming, |inner| {
        undecided = inner.in_doubt();
        if let Some(surpassed) = &inner.entry.surpassed {
            other.clone_from(&surpassed.by);
            if force {
                return Ok(());
            }
            let why = surpassed.why("the disk", inner.record.epoch.0);
            let text = format!(
                "disk {name} is held: {why}; claiming it here lets node '{other}' hold it instead"
            );
            return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
                "if what is here is right, and not what node '{other}' has, claim it with --force"
            )));
        }
        if undecided.is_none() {
            return Err(ErrorBody::new(
                ErrorCode::Conflict,
                format!(
                    "disk {name} is not in doubt: it is {}",
                    inner.state().name()
                ),
            )
            .hint("only a disk whose owner cannot be known can be claimed"));
        }
        if let Some(counterpart) = &inner.entry.counterpart {
            other.clone_from(counterpart);
        }
        if force {
            return Ok(());
        }
        Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!(
                "disk {name} is in doubt: if node '{other}' serves it, claiming it here makes two \
                 owners, and writes of one of them are lost"
            ),
        )
        .hint(format!(
            "make sure that {other} is down for good, then claim it with --force"
        )))
    })?;
    tracing::warn!(
        disk = name,
        other,
        "an operator claims the disk: if the other node serves it too, writes are lost"
    );
    run::stop(&disk).await;
    let (mut entry, record) = {
        let inner = disk.lock();
        (inner.entry.clone(), inner.record)
    };
    // The engine may have learned the answer while ending.
    if record.ownership != Ownership::Serving || entry.surpassed.is_some() {
        let epoch = match &entry.surpassed {
            Some(surpassed) => Epoch(surpassed.next(record.epoch.0)),
            None => record.epoch.next(),
        };
        let claimed = AuthorityRecord {
            epoch,
            ownership: Ownership::Serving,
            // Parts that were missing when this node accepted the disk are still missing.
            remainder: record.remainder.filter(|_| {
                matches!(
                    record.ownership,
                    Ownership::Accepted { .. } | Ownership::Serving
                )
            }),
        };
        entry.adopt(&claimed);
        if let Err(error) = disks.context.store.put_disk(name, &entry, claimed).await {
            run::open_and_start(disks, &disk).await;
            return Err(create::stored_badly(&disk, &error));
        }
        {
            let mut inner = disk.lock();
            inner.entry = entry;
            inner.record = claimed;
        }
        disks.owners.send_replace(());
        if let Some(migration) = undecided.filter(|_| record.ownership != Ownership::Serving) {
            let said = Said::Claimed(migration);
            disks.tell(&disk, said).await;
        }
    }
    run::open_and_start(disks, &disk).await;
    Ok(disk)
}
