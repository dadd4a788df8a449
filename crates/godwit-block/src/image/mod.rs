//! Disk images: raw, in a regular file or on a block device.

mod copy;
mod direct;
mod error;
pub(crate) mod extents;
pub(crate) mod fingerprint;
mod format;
pub mod notes;
mod open;

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use godwit_core::units::{Bytes, SECTOR_SIZE, Sectors};
use rustix::fs::{self, FallocateFlags};

pub use copy::{CopyProgress, export, import};
pub use error::ImageError;
pub use fingerprint::Fingerprint;
pub use format::{ImageFormat, refuse_formats};
pub use open::lock_file;

/// The kind of file that holds an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// An opened disk image, locked against every other node and process that opens it the same way.
///
/// The lock ends with `file`, which therefore must stay open as long as the disk is in use.
#[derive(Debug)]
pub struct Image {
    /// Open file, with `O_DIRECT` if `direct`.
    pub file: OwnedFd,
    /// The same file through the page cache, for requests that are not multiples of `alignment`; `None` if `file` takes
    /// all requests.
    ///
    /// The kernel writes dirty pages back before direct I/O to them and drops them afterwards, so both views agree as
    /// long as no two requests to the same `alignment` bytes are in flight at once. Syncing either makes the writes of
    /// both durable.
    pub buffered: Option<OwnedFd>,
    /// Size of the disk: at least one sector.
    pub capacity: Sectors,
    /// True if `file` bypasses the page cache. Its buffers must then be aligned to 4096 bytes in memory.
    pub direct: bool,
    /// Unit of offset and length of I/O on `file`, in bytes: 512 or 4096.
    pub alignment: u32,
    /// Unit of buffer addresses for `file`, in bytes: a power of two.
    pub memory_alignment: u32,
    /// Kind of file that holds the image.
    pub kind: ImageKind,
    /// Path of the image.
    pub path: PathBuf,
    /// True if the image was just created: nothing was ever written to it.
    pub made_new: bool,
}

impl Image {
    /// Creates an image of `size` bytes that reads as zeroes and takes no space yet, durably.
    ///
    /// # Errors
    /// [`ImageError::Size`] if the size is not a positive multiple of 512; [`ImageError::Exists`] if something is at
    /// `path`, which is then left alone; or the error of the file system.
    pub fn create(path: &Path, size: Bytes) -> Result<Self, ImageError> {
        let new = new_file(path, size)?;
        new.keep()?;
        Self::open_new(path)
    }

    fn open_new(path: &Path) -> Result<Self, ImageError> {
        let opened = Self::open(path)?;
        Ok(Self {
            made_new: true,
            ..opened
        })
    }

    /// Creates an image like [`Image::create`], with storage for all of its bytes, so that no write waits for storage
    /// or finds none left. If the file system cannot set that much aside, the image takes no space yet.
    ///
    /// # Errors
    /// The errors of [`Image::create`].
    pub fn create_with_storage(path: &Path, size: Bytes) -> Result<Self, ImageError> {
        let new = new_file(path, size)?;
        if fs::fallocate(new.as_fd(), FallocateFlags::empty(), 0, size.0).is_err() {
            // The file may have got a part of the storage; returns the part.
            set_size(&new, path, Bytes(0))?;
            set_size(&new, path, size)?;
        }
        new.keep()?;
        Self::open_new(path)
    }

    /// Opens an image for reading and writing, bypassing the page cache if possible.
    ///
    /// # Errors
    /// [`ImageError::Missing`], [`ImageError::Kind`] if neither a regular file nor a block device,
    /// [`ImageError::ReadOnly`], [`ImageError::Locked`] if in use, [`ImageError::Size`], or the error of the file
    /// system.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let kind = open::kind(path)?;
        open::refuse_read_only(path, kind)?;
        let opened = direct::open(path, kind)?;
        let size = open::size(opened.file.as_fd(), path, kind)?;
        Ok(Self {
            capacity: checked_capacity(path, size)?,
            file: opened.file,
            buffered: opened.buffered,
            direct: opened.direct,
            alignment: opened.alignment,
            memory_alignment: opened.memory_alignment,
            kind,
            path: path.to_owned(),
            made_new: false,
        })
    }

    /// Limits the capacity of a larger device to the end of the disk on it.
    pub fn leave_the_rest_of_a_device(&mut self, capacity: Sectors) {
        if self.kind == ImageKind::BlockDevice && self.capacity > capacity {
            self.capacity = capacity;
        }
    }

    /// Returns the bytes of storage that the image takes: for a sparse file, the written bytes.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn allocated(&self) -> Result<Bytes, ImageError> {
        match self.kind {
            ImageKind::BlockDevice => Ok(self.capacity.bytes()),
            ImageKind::File => fs::fstat(&self.file)
                .map(|stat| Bytes(u64::try_from(stat.st_blocks).unwrap_or(0) * SECTOR_SIZE))
                .map_err(|errno| ImageError::io("inspect", &self.path, errno)),
        }
    }
}

/// Returns the bytes that an unprivileged process may still store in the file system that holds `directory`.
///
/// # Errors
/// The error of the file system.
pub fn free_space(directory: &Path) -> Result<Bytes, ImageError> {
    fs::statvfs(directory)
        .map(|stat| Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
        .map_err(|errno| ImageError::io("ask for the free space of", directory, errno))
}

/// Creates a file of `size` bytes that are all holes.
fn new_file(path: &Path, size: Bytes) -> Result<open::NewFile, ImageError> {
    checked_capacity(path, size)?;
    let new = open::NewFile::create(path)?;
    set_size(&new, path, size)?;
    Ok(new)
}

fn set_size(new: &open::NewFile, path: &Path, size: Bytes) -> Result<(), ImageError> {
    fs::ftruncate(new.as_fd(), size.0).map_err(|errno| match errno {
        rustix::io::Errno::FBIG | rustix::io::Errno::INVAL => ImageError::TooLarge {
            path: path.to_owned(),
            bytes: size.0,
        },
        errno => ImageError::io("extend", path, errno),
    })
}

/// Returns the capacity of a disk of `size` bytes.
fn checked_capacity(path: &Path, size: Bytes) -> Result<Sectors, ImageError> {
    match size.sectors() {
        Some(sectors) if sectors > 0 => Ok(Sectors(sectors)),
        _ => Err(ImageError::Size {
            path: path.to_owned(),
            bytes: size.0,
        }),
    }
}
