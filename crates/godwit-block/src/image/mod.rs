//! Disk images on the local machine.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use godwit_core::units::Sectors;

/// What holds an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// An opened disk image.
#[derive(Debug)]
pub struct Image {
    /// The open file, with `O_DIRECT` when `direct`.
    pub file: OwnedFd,
    /// The disk's size.
    pub capacity: Sectors,
    /// Whether `file` bypasses the page cache.
    pub direct: bool,
    /// What direct I/O must be a multiple of, in bytes: 512 or 4096.
    pub alignment: u32,
    /// What holds the image.
    pub kind: ImageKind,
    /// Where it is.
    pub path: PathBuf,
}
