//! Makes disks larger.
//!
//! The new size is stored as under way. Then the image is enlarged, then the disk's entry. After a restart, the size of
//! the image tells how far the change came. The engine is started anew. The virtual machine takes this for a restart of
//! the node: requests wait, and none is lost.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_block::image::{Image, ImageKind};
use godwit_core::authority::Ownership;
use godwit_core::units::{Bytes, Sectors};

use crate::disks::Disks;
use crate::disks::disk::{Activity, Disk};
use crate::disks::lifecycle::{create, run};
use crate::disks::storage::image;
use godwit_api::{ErrorBody, ErrorCode, ResizeDisk};
use godwit_context::blocking;
use godwit_context::store::{DiskEntry, Mark};

/// Makes a disk as large as requested, or as large as its image is by now.
///
/// # Errors
/// The disk would become smaller, is not whole, or is in use in a forbidden way, or the image cannot be larger. The
/// disk is then served as before.
pub async fn resize(
    disks: &Arc<Disks>,
    name: &str,
    request: ResizeDisk,
) -> Result<Arc<Disk>, ErrorBody> {
    let disk = disks.get(name)?;
    let _guard = disk.begin(Activity::Resizing, |inner| {
        if inner.record.ownership != Ownership::Serving {
            let text = format!("disk {name} is {} here", inner.state().name());
            return Err(ErrorBody::new(ErrorCode::Conflict, text)
                .hint("only the node that serves a disk makes it larger"));
        }
        inner.is_whole(name, "made larger")?;
        allowed(
            name,
            Sectors(inner.entry.sectors).bytes(),
            request.size_bytes,
        )
    })?;
    if disks
        .users()
        .is_some_and(|users| users.arrives_with_machine(name))
    {
        let text = format!("disk {name}: the memory of its machine is still on its way here");
        return Err(ErrorBody::new(ErrorCode::Conflict, text).hint("try again when it is here"));
    }
    let clients = disk.places.taken();
    if clients > 0 {
        let text =
            format!("disk {name} has {clients} NBD clients, which cannot be told of another size");
        return Err(ErrorBody::new(ErrorCode::Conflict, text)
            .hint("detach them, and attach them again when the disk is larger"));
    }
    run::stop(&disk).await;
    let grown = grow(disks, &disk, request.size_bytes).await;
    run::open_and_start(disks, &disk).await;
    grown?;
    let size = Sectors(disk.lock().entry.sectors).bytes();
    tracing::info!(disk = name, %size, "the disk is larger now");
    Ok(disk)
}

/// Checks the requested size of a disk.
fn allowed(name: &str, now: Bytes, wanted: Option<u64>) -> Result<(), ErrorBody> {
    let refused = |text: String, hint: String| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("disk {name} {text}")).hint(hint))
    };
    match wanted {
        Some(wanted) if wanted < now.0 => refused(
            format!("has {now}, and does not become smaller"),
            String::from(
                "copy what is needed to a smaller disk: what is behind its end would be lost",
            ),
        ),
        Some(wanted) if wanted == now.0 => refused(
            format!("has {now} already"),
            String::from("name a larger size"),
        ),
        Some(wanted) if !wanted.is_multiple_of(512) => refused(
            format!("cannot have {wanted} bytes"),
            match wanted.checked_next_multiple_of(512) {
                Some(next) => format!("the next size that fits is {next} bytes"),
                None => String::from("choose a smaller size"),
            },
        ),
        _ => Ok(()),
    }
}

/// Makes the image and the entry larger. The disk is not served meanwhile.
async fn grow(disks: &Arc<Disks>, disk: &Arc<Disk>, wanted: Option<u64>) -> Result<(), ErrorBody> {
    let (name, path) = (disk.name.clone(), disk.lock().entry.path.clone());
    let opened = open(name.clone(), path.clone()).await?;
    let has = opened.capacity.bytes();
    let now = Sectors(disk.lock().entry.sectors).bytes();
    let wanted = Bytes(wanted.unwrap_or(has.0));
    let refused = |text: String, hint: &str| {
        let text = format!("disk {name}: its image {} {text}", path.display());
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(hint))
    };
    if wanted <= now {
        return refused(
            format!("has {has}, no more than the disk"),
            "make it larger first, or name a size",
        );
    }
    if wanted < has {
        return refused(
            format!("has {has} already"),
            "leave the size out: the disk then takes all of it",
        );
    }
    if wanted > has && opened.kind == ImageKind::BlockDevice {
        return refused(
            format!("is a device of {has}"),
            "make the device larger first (lvextend, for instance), then the disk without naming a size",
        );
    }
    let sectors = wanted.0 / 512;
    store(disks, disk, Some(Mark::Resizing { sectors }), None).await?;
    let grown = blocking(move || image::grow(&name, &opened, wanted))
        .await
        .flatten();
    if let Err(error) = grown {
        store(disks, disk, None, None).await?;
        return Err(error);
    }
    store(disks, disk, None, Some(sectors)).await
}

/// Finishes an interrupted change after a restart. The size of the image tells whether the image was enlarged.
pub(super) async fn finish(
    disks: &Arc<Disks>,
    disk: &Arc<Disk>,
    image: &Image,
) -> Result<(), ErrorBody> {
    let mark = disk.lock().entry.mark.clone();
    let Some(Mark::Resizing { sectors }) = mark else {
        return Ok(());
    };
    let grown = (image.capacity == Sectors(sectors)).then_some(sectors);
    tracing::info!(
        disk = disk.name,
        grown = grown.is_some(),
        "finished to make the disk larger"
    );
    store(disks, disk, None, grown).await
}

async fn open(name: String, path: PathBuf) -> Result<Image, ErrorBody> {
    blocking(move || image::open(&name, &path)).await.flatten()
}

/// Stores the mark of the disk, and its size if given.
async fn store(
    disks: &Arc<Disks>,
    disk: &Arc<Disk>,
    mark: Option<Mark>,
    sectors: Option<u64>,
) -> Result<(), ErrorBody> {
    let change = move |entry: &mut DiskEntry| {
        entry.mark.clone_from(&mark);
        entry.sectors = sectors.unwrap_or(entry.sectors);
    };
    let stored = disks
        .context
        .store
        .change_disk(&disk.name, change.clone())
        .await;
    stored.map_err(|error| create::stored_badly(disk, &error))?;
    change(&mut disk.lock().entry);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_becomes_larger_only_and_by_whole_sectors() {
        let now = Bytes(8 << 20);
        for wanted in [None, Some((8 << 20) + 512)] {
            allowed("d", now, wanted).expect("is allowed");
        }
        for wanted in [0, (8 << 20) - 512, 8 << 20, (8 << 20) + 1, u64::MAX] {
            let refused = allowed("d", now, Some(wanted)).expect_err("is refused");
            assert!(refused.hint.is_some(), "{wanted}");
        }
    }
}
