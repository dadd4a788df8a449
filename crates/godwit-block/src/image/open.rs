//! Safe opening and creation of image files.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_core::units::Bytes;
use rustix::fs::{self, FileType, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::{ImageError, ImageKind};

/// Number of attempts to lock an image in use, and the pause in between: together longer than a program takes from its
/// fork to its first instruction.
const LOCK_TRIES: u32 = 25;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Returns the kind of file at `path`, without opening it: opening a pipe or a tape has effects.
pub(super) fn kind(path: &Path) -> Result<ImageKind, ImageError> {
    let stat = fs::stat(path).map_err(|errno| ImageError::io("inspect", path, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(ImageKind::File),
        FileType::BlockDevice => Ok(ImageKind::BlockDevice),
        _ => Err(ImageError::Kind {
            path: path.to_owned(),
        }),
    }
}

/// Refuses a block device that takes no writes: the kernel lets some of them be opened for writing anyway, and fails
/// the first write.
pub(super) fn refuse_read_only(path: &Path, kind: ImageKind) -> Result<(), ImageError> {
    if kind == ImageKind::File {
        return Ok(());
    }
    let device = fs::stat(path)
        .map_err(|errno| ImageError::io("inspect", path, errno))?
        .st_rdev;
    let (major, minor) = (fs::major(device), fs::minor(device));
    let told = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
    // Without this file in sysfs, the first write tells.
    if told.is_ok_and(|text| text.trim() == "1") {
        return Err(ImageError::ReadOnly {
            path: path.to_owned(),
        });
    }
    Ok(())
}

/// Opens a file that was found to be of this kind. With `O_EXCL`, a block device that is mounted or otherwise claimed
/// refuses.
pub(super) fn open(path: &Path, kind: ImageKind, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = fs::open(path, flags, Mode::empty())?;
    let expected = match kind {
        ImageKind::File => FileType::RegularFile,
        ImageKind::BlockDevice => FileType::BlockDevice,
    };
    if FileType::from_raw_mode(fs::fstat(&file)?.st_mode) == expected {
        Ok(file)
    } else {
        Err(Errno::STALE)
    }
}

/// Locks an open image until it is closed; shared locks exclude exclusive ones only.
pub(super) fn lock(file: BorrowedFd<'_>, path: &Path, exclusive: bool) -> Result<(), ImageError> {
    lock_file(file, exclusive).map_err(|errno| match errno {
        Errno::WOULDBLOCK => ImageError::Locked {
            path: path.to_owned(),
        },
        errno => ImageError::io("lock", path, errno),
    })
}

/// Locks an open file until it is closed. A program that this process is just starting keeps its locks for a moment,
/// even of files that are closed here, so a file in use is retried for as long, by blocking for up to 250 ms.
///
/// # Errors
/// `WOULDBLOCK` if another one has the lock, or the error of the system call.
pub fn lock_file(file: BorrowedFd<'_>, exclusive: bool) -> Result<(), Errno> {
    let operation = if exclusive {
        FlockOperation::NonBlockingLockExclusive
    } else {
        FlockOperation::NonBlockingLockShared
    };
    let mut tries = LOCK_TRIES;
    loop {
        match fs::flock(file, operation) {
            Err(Errno::WOULDBLOCK) if tries > 0 => {
                tries -= 1;
                std::thread::sleep(LOCK_PAUSE);
            }
            ended => return ended,
        }
    }
}

/// Returns the size of an open image.
pub(super) fn size(
    file: BorrowedFd<'_>,
    path: &Path,
    kind: ImageKind,
) -> Result<Bytes, ImageError> {
    let size = match kind {
        ImageKind::File => fs::fstat(file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0)),
        // A device's stat has no size; a seek to the end tells.
        ImageKind::BlockDevice => fs::seek(file, SeekFrom::End(0)),
    };
    size.map(Bytes)
        .map_err(|errno| ImageError::io("ask for the size of", path, errno))
}

/// Returns the error for an image that could not be opened.
pub(super) fn open_error(path: &Path, errno: Errno) -> ImageError {
    match errno {
        Errno::BUSY | Errno::TXTBSY => ImageError::Locked {
            path: path.to_owned(),
        },
        Errno::STALE => ImageError::Changed {
            path: path.to_owned(),
        },
        Errno::ISDIR | Errno::NXIO | Errno::NODEV => ImageError::Kind {
            path: path.to_owned(),
        },
        errno => ImageError::io("open", path, errno),
    }
}

/// A new regular file, removed again unless kept.
#[derive(Debug)]
pub(super) struct NewFile {
    file: OwnedFd,
    path: PathBuf,
    kept: bool,
}

impl NewFile {
    /// Creates the file, locked for this process. Nothing may be at the path.
    pub(super) fn create(path: &Path) -> Result<Self, ImageError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
            // The file itself is new, so its directory is missing.
            Errno::NOENT => ImageError::Missing {
                path: directory_of(path).to_owned(),
            },
            errno => ImageError::io("create", path, errno),
        })?;
        let new = Self {
            file,
            path: path.to_owned(),
            kept: false,
        };
        lock(new.as_fd(), path, true)?;
        Ok(new)
    }

    /// Makes the file and its name durable.
    pub(super) fn keep(mut self) -> Result<(), ImageError> {
        fs::fsync(&self.file).map_err(|errno| ImageError::io("sync", &self.path, errno))?;
        let directory = directory_of(&self.path);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        fs::open(directory, flags, Mode::empty())
            .and_then(fs::fsync)
            .map_err(|errno| ImageError::io("sync", directory, errno))?;
        self.kept = true;
        Ok(())
    }
}

impl AsFd for NewFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = fs::unlink(&self.path)
        {
            tracing::warn!(
                path = %self.path.display(), %error,
                "a file that was not finished could not be removed: remove it by hand"
            );
        }
    }
}

/// Returns the directory that holds `path`.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
