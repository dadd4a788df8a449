//! The space that thin disks may still need, compared with the free space of their file system.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_block::image::free_space;
use godwit_core::units::{Bytes, Sectors};

use crate::disks::Disks;
use crate::disks::disk::Disk;
use godwit_context::blocking;

/// An image file: its device number, the disk's size, and the allocated bytes.
struct Thin {
    device: u64,
    size: u64,
    allocated: u64,
}

/// Returns a warning if the file system of a new disk has less room than its disks may still need. Returns nothing for
/// a disk on a device.
pub async fn warning(disks: &Arc<Disks>, disk: &Arc<Disk>) -> Option<String> {
    let image = |disk: &Arc<Disk>| {
        let inner = disk.lock();
        (
            inner.entry.path.clone(),
            Sectors(inner.entry.sectors).bytes().0,
        )
    };
    let (path, size) = image(disk);
    let all: Vec<_> = disks.all().iter().map(image).collect();
    let asked = blocking(move || {
        let new = thin(&path, size)?;
        let others = all.iter().filter_map(|(path, size)| thin(path, *size));
        let missing = promised(new.device, others);
        let folder = path.parent().map_or(path.clone(), Path::to_path_buf);
        let free = free_space(&folder).ok()?.0;
        Some((folder, missing, free))
    });
    let (folder, missing, free) = asked.await.ok()??;
    words(&folder, missing, free)
}

fn thin(path: &PathBuf, size: u64) -> Option<Thin> {
    let metadata = std::fs::metadata(path)
        .ok()
        .filter(std::fs::Metadata::is_file)?;
    Some(Thin {
        device: metadata.dev(),
        size,
        allocated: metadata.blocks() * 512,
    })
}

/// Returns the bytes not yet occupied by the images of a file system.
fn promised(device: u64, images: impl Iterator<Item = Thin>) -> u64 {
    images
        .filter(|image| image.device == device)
        .fold(0, |sum: u64, image| {
            sum.saturating_add(image.size.saturating_sub(image.allocated))
        })
}

fn words(folder: &Path, missing: u64, free: u64) -> Option<String> {
    (missing > free).then(|| {
        format!(
            "the disks in the file system of {} may come to need {} more, and {} are free: when it is \
             full their machines stand still",
            folder.display(),
            Bytes(missing),
            Bytes(free)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_promised_and_not_there_on_this_file_system_counts() {
        let image = |device, size, allocated| Thin {
            device,
            size,
            allocated,
        };
        let images = [
            image(1, 100, 40),
            image(2, 1000, 0),
            image(1, 10, 16),
            image(1, 7, 0),
        ];
        assert_eq!(promised(1, images.into_iter()), 67);
        let folder = Path::new("/disks");
        assert_eq!(words(folder, 67, 67), None);
        let said = words(folder, 3 << 30, 1 << 30).expect("a warning");
        assert!(said.contains("3 GiB more, and 1 GiB are free"), "{said}");
    }
}
