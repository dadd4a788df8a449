//! The reasons for refusing an image.

use std::path::{Path, PathBuf};

use godwit_core::units::Bytes;
use rustix::io::Errno;

use super::format::ImageFormat;

/// The reason for refusing an image, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// No disk can have this size.
    #[error(
        "{path} is {bytes} bytes long, and a raw image of a disk is a positive multiple of 512 bytes \
         long: it may be cut short, or no raw image",
        path = path.display()
    )]
    Size {
        /// Path of the image, existing or new.
        path: PathBuf,
        /// Size of the image.
        bytes: u64,
    },
    /// The file system cannot hold a file of this size.
    #[error(
        "{path} cannot be {size} long on its file system: choose a smaller size or another directory",
        path = path.display(),
        size = Bytes(*bytes)
    )]
    TooLarge {
        /// Path of the new image.
        path: PathBuf,
        /// Requested size.
        bytes: u64,
    },
    /// Something is at the path of a new image.
    #[error(
        "{path} exists already: choose another name, or move it away if it is not needed",
        path = path.display()
    )]
    Exists {
        /// Path in use.
        path: PathBuf,
    },
    /// Nothing is at the path.
    #[error("{path} does not exist: check the path", path = path.display())]
    Missing {
        /// Missing path.
        path: PathBuf,
    },
    /// The file cannot hold an image.
    #[error(
        "{path} is neither a regular file nor a block device: give the path of a raw image",
        path = path.display()
    )]
    Kind {
        /// Path of the file.
        path: PathBuf,
    },
    /// The image has a format other than raw.
    #[error(
        "{path} is an image in the format {format}, and a disk's image is raw: if you trust whoever made \
         it, convert it with 'qemu-img convert -O raw {path} NEW'; if a node exported it or a guest wrote it, \
         these very bytes are the disk's content: say --format raw",
        path = path.display(),
        format = format.name()
    )]
    Format {
        /// Path of the image.
        path: PathBuf,
        /// Format of the image.
        format: ImageFormat,
    },
    /// The device takes no writes.
    #[error(
        "{path} can only be read: a disk has to be written to (`blockdev --setrw {path}` allows it)",
        path = path.display()
    )]
    ReadOnly {
        /// Path of the device.
        path: PathBuf,
    },
    /// Another process uses the image.
    #[error(
        "{path} is in use by another node or process: stop the one that uses it \
         (`fuser -v {path}` names it)",
        path = path.display()
    )]
    Locked {
        /// Path of the image.
        path: PathBuf,
    },
    /// The process may not use the file.
    #[error(
        "may not {action} {path}: give the user that runs the node read and write permission",
        path = path.display()
    )]
    Permission {
        /// Action that failed.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
    },
    /// The file system is full.
    #[error(
        "no space is left to {action} {path}: free some, or use a directory on a larger file system",
        path = path.display()
    )]
    NoSpace {
        /// Action that failed.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
    },
    /// The image was replaced or cut short a moment ago.
    #[error(
        "{path} was replaced or cut short while it was being read: \
         stop what changes it and try again",
        path = path.display()
    )]
    Changed {
        /// Path of the image.
        path: PathBuf,
    },
    /// The caller cancelled the copy. The copied part is gone.
    #[error("the copy to {path} was cancelled; nothing is left of it", path = path.display())]
    Cancelled {
        /// Path of the copy.
        path: PathBuf,
    },
    /// The process, or the host, may open no more files.
    #[error("cannot {action} {path}", path = path.display())]
    OpenFiles {
        /// Action that failed.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The file system or device failed.
    #[error("could not {action} {path}: check the device and the kernel's log", path = path.display())]
    Io {
        /// Action that failed.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

impl ImageError {
    /// Returns the error for the kernel's answer to `action` (a verb) on `path`.
    pub(super) fn io(action: &'static str, path: &Path, errno: Errno) -> Self {
        let path = path.to_owned();
        match errno {
            Errno::NOENT => Self::Missing { path },
            Errno::EXIST => Self::Exists { path },
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::Permission { action, path },
            Errno::NOSPC | Errno::DQUOT => Self::NoSpace { action, path },
            errno @ (Errno::MFILE | Errno::NFILE) => Self::OpenFiles {
                action,
                path,
                source: errno.into(),
            },
            errno => Self::Io {
                action,
                path,
                source: errno.into(),
            },
        }
    }
}
