//! Why an image cannot be used.

use std::path::{Path, PathBuf};

use godwit_core::units::Bytes;
use rustix::io::Errno;

use super::format::ImageFormat;

/// Why an image cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The size is not one a disk can have.
    #[error(
        "{path} is {bytes} bytes long, and a raw image of a disk is a positive multiple of 512 bytes \
         long: it may be cut short, or no raw image",
        path = path.display()
    )]
    Size {
        /// Where the image is or was to be.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The file system cannot hold a file of this size.
    #[error(
        "{path} cannot be {size} long on its file system: choose a smaller size or another directory",
        path = path.display(),
        size = Bytes(*bytes)
    )]
    TooLarge {
        /// Where the image was to be.
        path: PathBuf,
        /// The size asked for.
        bytes: u64,
    },
    /// Something is where a new image was to be.
    #[error(
        "{path} exists already: choose another name, or move it away if it is not needed",
        path = path.display()
    )]
    Exists {
        /// Where.
        path: PathBuf,
    },
    /// Nothing is there.
    #[error("{path} does not exist: check the path", path = path.display())]
    Missing {
        /// Where.
        path: PathBuf,
    },
    /// What is there cannot hold an image.
    #[error(
        "{path} is neither a regular file nor a block device: give the path of a raw image",
        path = path.display()
    )]
    Kind {
        /// Where.
        path: PathBuf,
    },
    /// It is an image in a format that is not raw.
    #[error(
        "{path} is an image in the format {format}, and a disk's image is raw: if you trust whoever made \
         it, convert it with 'qemu-img convert -O raw {path} NEW'; if a node exported it or a guest wrote it, \
         these very bytes are the disk's content: say --format raw",
        path = path.display(),
        format = format.name()
    )]
    Format {
        /// Where.
        path: PathBuf,
        /// Which.
        format: ImageFormat,
    },
    /// The device takes no writes.
    #[error(
        "{path} can only be read: a disk has to be written to (`blockdev --setrw {path}` allows it)",
        path = path.display()
    )]
    ReadOnly {
        /// Where.
        path: PathBuf,
    },
    /// Somebody else uses the image.
    #[error(
        "{path} is in use by another node or process: stop the one that uses it \
         (`fuser -v {path}` names it)",
        path = path.display()
    )]
    Locked {
        /// Where.
        path: PathBuf,
    },
    /// The process may not use it.
    #[error(
        "may not {action} {path}: give the user that runs the node read and write permission",
        path = path.display()
    )]
    Permission {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
    },
    /// The file system is full.
    #[error(
        "no space is left to {action} {path}: free some, or use a directory on a larger file system",
        path = path.display()
    )]
    NoSpace {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
    },
    /// The image is not the one it was a moment ago.
    #[error(
        "{path} was replaced or cut short while it was being read: \
         stop what changes it and try again",
        path = path.display()
    )]
    Changed {
        /// Where.
        path: PathBuf,
    },
    /// The caller ended the copy. What had been copied is gone.
    #[error("the copy to {path} was cancelled; nothing is left of it", path = path.display())]
    Cancelled {
        /// Where the copy was to be.
        path: PathBuf,
    },
    /// The process, or the host, may open no more files.
    #[error("cannot {action} {path}", path = path.display())]
    OpenFiles {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The file system or device failed.
    #[error("could not {action} {path}: check the device and the kernel's log", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
}

impl ImageError {
    /// The error for what the kernel said when `action` (a verb) was tried on `path`.
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
