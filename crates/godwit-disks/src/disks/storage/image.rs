//! Images of disks, with errors for clients of the API.

use std::path::{Path, PathBuf};

use godwit_block::image::{Image, ImageError, free_space, refuse_formats};
use godwit_core::units::Bytes;

use godwit_api::{ErrorBody, ErrorCode, ImageFormat};

/// Space left free on the file system of the images, in bytes.
const SPACE_MARGIN: u64 = 8 << 20;

/// Returns the path of a managed disk's image.
pub fn managed_path(disks_dir: &Path, name: &str) -> PathBuf {
    disks_dir.join(format!("{name}.raw"))
}

/// Converts an image's error for the API. The text of the error contains the remedy.
pub fn error(disk: &str, error: &ImageError) -> ErrorBody {
    let code = match error {
        ImageError::Size { .. }
        | ImageError::TooLarge { .. }
        | ImageError::Kind { .. }
        | ImageError::Format { .. } => ErrorCode::Invalid,
        ImageError::Missing { .. } => ErrorCode::NotFound,
        ImageError::Exists { .. } => ErrorCode::Exists,
        ImageError::Locked { .. }
        | ImageError::Changed { .. }
        | ImageError::Cancelled { .. }
        | ImageError::ReadOnly { .. }
        | ImageError::Permission { .. } => ErrorCode::Conflict,
        ImageError::NoSpace { .. } => ErrorCode::NoSpace,
        ImageError::Io { .. } | ImageError::OpenFiles { .. } => ErrorCode::Internal,
    };
    let mut text = format!("disk {disk}: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    ErrorBody::new(code, text)
}

/// Checks that `needed` bytes fit into the folder's file system with a margin to spare.
///
/// # Errors
/// [`ErrorCode::NoSpace`] with the bytes needed and free.
pub fn check_space(node: &str, disk: &str, folder: &Path, needed: u64) -> Result<(), ErrorBody> {
    let free = free_space(folder)
        .map_err(|problem| error(disk, &problem))?
        .0;
    if needed.saturating_add(SPACE_MARGIN) <= free {
        return Ok(());
    }
    Err(ErrorBody::new(
        ErrorCode::NoSpace,
        format!(
            "node '{node}' has no space for disk {disk} in {}: it needs {} and {} to spare, {} are free",
            folder.display(),
            Bytes(needed),
            Bytes(SPACE_MARGIN),
            Bytes(free)
        ),
    )
    .hint("free space there, or use another node"))
}

/// Refuses an image in a format other than raw, unless the caller declares the image raw. Blocks.
pub(crate) fn check_format(
    disk: &str,
    path: &Path,
    format: Option<ImageFormat>,
) -> Result<(), ErrorBody> {
    match format {
        Some(ImageFormat::Raw) => Ok(()),
        None => refuse_formats(path).map_err(|problem| error(disk, &problem)),
    }
}

/// Creates an image. Blocks.
pub fn create(disk: &str, path: &Path, size: Bytes) -> Result<Image, ErrorBody> {
    Image::create(path, size).map_err(|problem| error(disk, &problem))
}

/// Enlarges an image file to this size. The added part reads as zeroes. Blocks.
///
/// # Errors
/// The file system's error.
pub(crate) fn grow(disk: &str, image: &Image, size: Bytes) -> Result<(), ErrorBody> {
    if size <= image.capacity.bytes() {
        return Ok(());
    }
    let grown =
        rustix::fs::ftruncate(&image.file, size.0).and_then(|()| rustix::fs::fsync(&image.file));
    grown.map_err(|error| {
        let path = image.path.display();
        let text = format!("disk {disk}: its image {path} cannot be made {size} long: {error}");
        ErrorBody::new(ErrorCode::Internal, text).hint("is there space for it on the file system?")
    })
}

/// Creates an image at node `node` with all of its storage allocated. Blocks.
///
/// # Errors
/// The errors of [`create`], and [`ErrorCode::NoSpace`] if the space is not free.
pub(crate) fn create_full(
    node: &str,
    disk: &str,
    path: &Path,
    size: Bytes,
) -> Result<Image, ErrorBody> {
    let folder = path.parent().unwrap_or(path);
    check_space(node, disk, folder, size.0)?;
    let image = Image::create_with_storage(path, size).map_err(|problem| error(disk, &problem))?;
    // Another writer may have taken the space since the check, or the file system may be unable to reserve any.
    if allocated(path).is_none_or(|allocated| allocated < size.0) {
        let text = format!(
            "disk {disk}: the file system of {} does not give {size} in advance",
            folder.display()
        );
        return Err(ErrorBody::new(ErrorCode::NoSpace, text)
            .hint("leave --preallocate out, or use another file system"));
    }
    Ok(image)
}

/// Creates an image at node `node` for a copy of an image with `allocated` bytes. The copy of a nearly full source gets
/// all of its storage at once, if enough is free. Chunks then need not wait for storage, and cannot run out of space.
/// The holes of other sources stay holes. Blocks.
pub(crate) fn create_copy(
    node: &str,
    disk: &str,
    path: &Path,
    size: Bytes,
    allocated: u64,
) -> Result<Image, ErrorBody> {
    let full = allocated >= size.0 / 8 * 7;
    let folder = path.parent().unwrap_or(path);
    if full && check_space(node, disk, folder, size.0).is_ok() {
        Image::create_with_storage(path, size).map_err(|problem| error(disk, &problem))
    } else {
        create(disk, path, size)
    }
}

/// Opens an image. Blocks.
pub fn open(disk: &str, path: &Path) -> Result<Image, ErrorBody> {
    Image::open(path).map_err(|problem| error(disk, &problem))
}

/// Deletes an image durably. A missing file is fine. Blocks.
pub fn delete(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match path.parent() {
        Some(folder) => std::fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Returns the bytes occupied by the image at `path`, if known.
pub fn allocated(path: &Path) -> Option<u64> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let metadata = std::fs::metadata(path).ok()?;
    if metadata.file_type().is_block_device() {
        None
    } else {
        Some(metadata.blocks() * 512)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_names_node_path_and_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        check_space("b", "root", folder.path(), 0).expect("nothing fits");
        let error = check_space("b", "root", folder.path(), 1 << 60).expect_err("too much");
        assert_eq!(error.code, ErrorCode::NoSpace);
        let path = folder.path().display().to_string();
        for part in [
            "node 'b'",
            "disk root",
            &path,
            "it needs 1 EiB and 8 MiB to spare",
            "are free",
        ] {
            assert!(error.message.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_copy_gets_its_storage_at_once_if_the_source_is_nearly_full_and_it_fits() {
        const SIZE: u64 = 8 << 20;
        let folder = tempfile::tempdir().expect("a folder");
        let taken = |disk, size, allocated| {
            let path = managed_path(folder.path(), disk);
            let image = create_copy("b", disk, &path, Bytes(size), allocated).expect("creates");
            image.allocated().expect("inspected").0
        };
        assert!(taken("full", SIZE, SIZE) >= SIZE);
        assert!(taken("nearly-full", SIZE, SIZE / 8 * 7) >= SIZE);
        assert!(taken("half-full", SIZE, SIZE / 2) < SIZE / 8);
        let much = 1 << 43;
        assert!(taken("too-large", much, much) < SIZE / 8);
    }

    #[test]
    fn deleting_twice_is_fine() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = managed_path(folder.path(), "root");
        drop(create("root", &path, Bytes(4096)).expect("creates"));
        delete(&path).expect("deletes");
        delete(&path).expect("is gone already");
        assert!(!path.exists());
    }
}
