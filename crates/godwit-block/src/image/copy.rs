//! Raw images, copied into and out of a node's keeping.

use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use godwit_core::units::Bytes;
use rustix::fs::{self, OFlags, SeekFrom};
use rustix::io::{self, Errno};

use super::{Image, ImageError, ImageKind, checked_capacity, direct, open};

/// Bytes between two calls of the progress callback: the length of a read.
const STEP: usize = 4 << 20;

/// Bytes that must all be zero to be left out of the copy.
const BLOCK: usize = 4096;

/// The progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// Bytes of the image that are done, holes included.
    pub done: Bytes,
    /// Bytes of the image in all.
    pub total: Bytes,
}

/// Copies the raw image at `source` (a regular file or a block device) to a new one at `destination`, durably, and
/// opens the copy. Holes and zeroes take no space in the copy; if the file system can share blocks, no data is copied.
/// `progress` is called every few MiB and at the end. When `progress` breaks, the copy ends and is removed.
///
/// # Errors
/// The errors of [`Image::open`] about the source, the errors of [`Image::create`] about the destination,
/// [`ImageError::Changed`] if the source is cut short meanwhile, and [`ImageError::Cancelled`]. No destination is left
/// then.
pub fn import(
    source: &Path,
    destination: &Path,
    progress: impl FnMut(CopyProgress) -> ControlFlow<()>,
) -> Result<Image, ImageError> {
    let kind = open::kind(source)?;
    let file = open::open(source, kind, OFlags::RDONLY)
        .map_err(|errno| open::open_error(source, errno))?;
    // Refused while a node serves the source, because the node holds the source exclusively.
    open::lock(file.as_fd(), source, false)?;
    let size = open::size(file.as_fd(), source, kind)?;
    checked_capacity(source, size)?;
    let from = Source {
        file: file.as_fd(),
        path: source,
        kind,
        size,
    };
    copy(&from, destination, progress)?;
    Image::open(destination)
}

/// Copies an image without concurrent writes to a new raw image at `destination`, durably, in the way of [`import`].
///
/// # Errors
/// The errors of [`import`].
pub fn export(
    image: &Image,
    destination: &Path,
    progress: impl FnMut(CopyProgress) -> ControlFlow<()>,
) -> Result<(), ImageError> {
    // Direct I/O would need a whole number of its blocks, which the image's end need not be.
    let file = direct::open_again(&image.path, image.kind, &image.file)?;
    let from = Source {
        file: file.as_fd(),
        path: &image.path,
        kind: image.kind,
        size: image.capacity.bytes(),
    };
    copy(&from, destination, progress)
}

/// The source of a copy.
struct Source<'a> {
    file: BorrowedFd<'a>,
    path: &'a Path,
    kind: ImageKind,
    size: Bytes,
}

fn copy(
    source: &Source<'_>,
    destination: &Path,
    mut progress: impl FnMut(CopyProgress) -> ControlFlow<()>,
) -> Result<(), ImageError> {
    let new = open::NewFile::create(destination)?;
    let mut report = |done| match progress(CopyProgress {
        done: Bytes(done),
        total: source.size,
    }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(ImageError::Cancelled {
            path: destination.to_owned(),
        }),
    };
    if !share_blocks(source, new.as_fd())? {
        fs::ftruncate(new.as_fd(), source.size.0)
            .map_err(|errno| ImageError::io("extend", destination, errno))?;
        let mut buffer = vec![0; STEP];
        let mut done = 0;
        while let Some(data) = next_data(source, done)? {
            for start in data.clone().step_by(STEP) {
                let length = (data.end - start).min(STEP as u64) as usize;
                let piece = &mut buffer[..length];
                read_full(source, piece, start)?;
                write_nonzero(new.as_fd(), piece, start)
                    .map_err(|errno| ImageError::io("write", destination, errno))?;
                report(start + length as u64)?;
            }
            done = data.end;
        }
    }
    report(source.size.0)?;
    new.keep()
}

/// Makes the copy share the source's blocks. Returns false if not possible.
fn share_blocks(source: &Source<'_>, copy: BorrowedFd<'_>) -> Result<bool, ImageError> {
    if source.kind != ImageKind::File || fs::ioctl_ficlone(copy, source.file).is_err() {
        return Ok(false);
    }
    if open::size(copy, source.path, ImageKind::File)? == source.size {
        Ok(true)
    } else {
        Err(ImageError::Changed {
            path: source.path.to_owned(),
        })
    }
}

/// Returns the next bytes from `from` on that are not a hole.
fn next_data(source: &Source<'_>, from: u64) -> Result<Option<Range<u64>>, ImageError> {
    if from >= source.size.0 {
        return Ok(None);
    }
    let failed = |errno| ImageError::io("look for data in", source.path, errno);
    let start = match fs::seek(source.file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // Devices and some file systems know no holes: all of it is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(from..source.size.0)),
        Err(errno) => return Err(failed(errno)),
    };
    let end = fs::seek(source.file, SeekFrom::Hole(start)).map_err(failed)?;
    // A growing source is copied up to the old length.
    let data = start.max(from)..end.min(source.size.0);
    Ok(if data.is_empty() { None } else { Some(data) })
}

fn read_full(source: &Source<'_>, mut piece: &mut [u8], mut at: u64) -> Result<(), ImageError> {
    while !piece.is_empty() {
        match io::pread(source.file, &mut *piece, at) {
            Ok(0) => {
                return Err(ImageError::Changed {
                    path: source.path.to_owned(),
                });
            }
            Ok(count) => {
                piece = &mut piece[count..];
                at += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(ImageError::io("read", source.path, errno)),
        }
    }
    Ok(())
}

/// Writes the blocks of `piece` that are not all zeroes, neighbours together.
fn write_nonzero(copy: BorrowedFd<'_>, piece: &[u8], at: u64) -> Result<(), Errno> {
    let mut run = 0..0;
    for block in piece.chunks(BLOCK) {
        if block.iter().all(|&byte| byte == 0) {
            write_full(copy, &piece[run.clone()], at + run.start as u64)?;
            run = run.end + block.len()..run.end + block.len();
        } else {
            run.end += block.len();
        }
    }
    write_full(copy, &piece[run.clone()], at + run.start as u64)
}

fn write_full(copy: BorrowedFd<'_>, mut piece: &[u8], mut at: u64) -> Result<(), Errno> {
    while !piece.is_empty() {
        match io::pwrite(copy, piece, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                piece = &piece[count..];
                at += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
