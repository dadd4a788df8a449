//! Removes disks.

use std::sync::Arc;

use crate::disks::Disks;
use crate::disks::disk::{Activity, Disk, Inner};
use crate::disks::lifecycle::run;
use crate::disks::lifecycle::{create, lacking, older_copy};
use crate::disks::storage::image;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::store::Mark;

/// Removes a disk. The node deletes the file of a managed image and leaves other images alone.
///
/// # Errors
/// The disk is used by a VM, has another activity, has clients, is needed by its owner or is in doubt; `force`
/// overrides the last three.
pub async fn remove(disks: &Arc<Disks>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let disk = disks.get(name)?;
    no_machine_has(disks, name)?;
    let guard = disk.begin(Activity::Removing, |inner| allowed(&disk, inner, force))?;
    // From now on the start of a machine with this disk finds the disk being removed.
    no_machine_has(disks, name)?;
    run::stop(&disk).await;
    if let Err(error) = finish(disks, &disk).await {
        disk.lock().problem = Some(error.message.clone());
        return Err(error);
    }
    guard.keep();
    if let Some(users) = disks.users() {
        users.removed();
    }
    tracing::info!(disk = name, "removed the disk");
    Ok(())
}

fn no_machine_has(disks: &Disks, disk: &str) -> Result<(), ErrorBody> {
    let Some(vm) = disks.machine_with(disk) else {
        return Ok(());
    };
    let text = format!("disk {disk} is used by VM {vm}");
    Err(ErrorBody::new(ErrorCode::Conflict, text)
        .hint(format!("stop the VM first: godwit vm stop {vm}")))
}

fn allowed(disk: &Disk, inner: &Inner, force: bool) -> Result<(), ErrorBody> {
    if force {
        return Ok(());
    }
    let clients = disk.clients();
    if clients > 0 {
        return Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!("disk {} is used by {clients} clients", disk.name),
        )
        .hint("detach them, or remove it with --force: they will see I/O errors"));
    }
    if inner.record.owes().is_some() {
        let owner = inner.entry.moved_to.as_deref().unwrap_or("the other node");
        let text = format!(
            "disk {} is needed: node '{owner}' serves it and still lacks a part, which is here only",
            disk.name
        );
        return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
            "wait until node '{owner}' has all of it: godwit disk show {} tells; --force removes it all \
             the same, and what node '{owner}' lacks is lost",
            disk.name
        )));
    }
    if let Some(migration) = inner.in_doubt() {
        let other = inner
            .entry
            .counterpart
            .as_deref()
            .unwrap_or("the other node");
        return Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!(
                "disk {} is in doubt: migration {migration} with {other} is not decided, so this \
                 may be the only good copy",
                disk.name
            ),
        )
        .hint(format!(
            "bring {other} up; --force removes the copy here all the same"
        )));
    }
    Ok(())
}

/// Removes the entry and the image of a disk whose engine has ended. After a crash meanwhile, the mark makes the next
/// start go on.
pub async fn finish(disks: &Arc<Disks>, disk: &Arc<Disk>) -> Result<(), ErrorBody> {
    let (mut entry, record) = {
        let inner = disk.lock();
        (inner.entry.clone(), inner.record)
    };
    let stored = |error| create::stored_badly(disk, &error);
    if entry.managed {
        // A restart removes an unfinished disk without this mark. On a full file system nothing could be stored before
        // the image is deleted.
        let unfinished = matches!(
            entry.mark,
            Some(Mark::Creating | Mark::Receiving { new: true, .. })
        );
        if !unfinished {
            entry.mark = Some(Mark::Removing);
            disks
                .context
                .store
                .put_disk(&disk.name, &entry, record)
                .await
                .map_err(stored)?;
        }
        let path = entry.path.clone();
        blocking(move || image::delete(&path))
            .await?
            .map_err(|error| {
                ErrorBody::new(
                    ErrorCode::Internal,
                    format!(
                        "disk {}: cannot delete {}: {error}",
                        disk.name,
                        entry.path.display()
                    ),
                )
                .hint("remove the disk again once that is fixed")
            })?;
    }
    // The next disk of this name replaces a remaining socket.
    let _ = crate::disks::vhost::remove(&disks.context.config.vhost_socket(&disk.name));
    disks
        .context
        .store
        .remove_disk(&disk.name)
        .await
        .map_err(stored)?;
    lacking::forget(disks, disk).await;
    older_copy::forget(disks, disk).await;
    disks.remove(&disk.name);
    Ok(())
}
