//! The choice of a way around the page cache.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use godwit_core::units::SECTOR_SIZE;
use rustix::fs::{self, AtFlags, OFlags, StatxFlags};
use rustix::io::{self, Errno};

use super::{ImageError, ImageKind, open};

/// Largest alignment, of offsets and of memory, used for direct I/O.
const LARGEST_ALIGNMENT: u32 = 4096;

/// An image, open and locked.
pub(super) struct Opened {
    pub(super) file: OwnedFd,
    pub(super) buffered: Option<OwnedFd>,
    pub(super) direct: bool,
    pub(super) alignment: u32,
    pub(super) memory_alignment: u32,
}

/// Opens the image at `path`, with `O_DIRECT` if direct I/O works at offsets that are multiples of 512 or 4096 bytes.
pub(super) fn open(path: &Path, kind: ImageKind) -> Result<Opened, ImageError> {
    let claim = match kind {
        ImageKind::File => OFlags::empty(),
        ImageKind::BlockDevice => OFlags::EXCL,
    };
    match open::open(path, kind, OFlags::RDWR | OFlags::DIRECT | claim) {
        Ok(file) => {
            open::lock(file.as_fd(), path, true)?;
            let found = alignment(&file).map_err(|errno| ImageError::io("read", path, errno))?;
            if let Some((alignment, memory_alignment)) = found {
                let buffered = if u64::from(alignment) > SECTOR_SIZE {
                    Some(open_again(path, kind, &file)?)
                } else {
                    None
                };
                return Ok(Opened {
                    file,
                    buffered,
                    direct: true,
                    alignment,
                    memory_alignment,
                });
            }
        }
        // The answer of a file system without direct I/O.
        Err(Errno::INVAL) => {}
        Err(errno) => return Err(open::open_error(path, errno)),
    }
    let file = open::open(path, kind, OFlags::RDWR | claim)
        .map_err(|errno| open::open_error(path, errno))?;
    open::lock(file.as_fd(), path, true)?;
    Ok(Opened {
        file,
        buffered: None,
        direct: false,
        alignment: SECTOR_SIZE as u32,
        memory_alignment: 1,
    })
}

/// Opens the same image a second time, through the page cache.
pub(super) fn open_again(
    path: &Path,
    kind: ImageKind,
    file: &OwnedFd,
) -> Result<OwnedFd, ImageError> {
    let again =
        open::open(path, kind, OFlags::RDWR).map_err(|errno| open::open_error(path, errno))?;
    let identity = |file: &OwnedFd| fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino));
    match (identity(file), identity(&again)) {
        (Ok(first), Ok(second)) if first == second => Ok(again),
        (Ok(_), Ok(_)) => Err(ImageError::Changed {
            path: path.to_owned(),
        }),
        (Err(errno), _) | (_, Err(errno)) => Err(ImageError::io("inspect", path, errno)),
    }
}

/// Returns the alignments of offsets and of memory for direct I/O on `file`; `None` if no usable one works.
fn alignment(file: &OwnedFd) -> Result<Option<(u32, u32)>, Errno> {
    let (least, memory) = match fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(found) if found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            let needed = found.stx_dio_offset_align.max(found.stx_dio_mem_align);
            if needed == 0 || needed > LARGEST_ALIGNMENT {
                return Ok(None);
            }
            (found.stx_dio_offset_align, found.stx_dio_mem_align)
        }
        // Neither the kernel nor the file system tells: the trials below do.
        _ => (SECTOR_SIZE as u32, LARGEST_ALIGNMENT),
    };
    // Tried even when told: layered file systems have been wrong.
    let mut page = Box::new(Page([0; LARGEST_ALIGNMENT as usize]));
    for alignment in [SECTOR_SIZE as u32, LARGEST_ALIGNMENT] {
        if alignment < least {
            continue;
        }
        match io::pread(file, &mut page.0[..alignment as usize], 0) {
            Ok(_) => return Ok(Some((alignment, memory.max(SECTOR_SIZE as u32)))),
            Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
}

/// Memory for direct I/O.
#[repr(align(4096))]
struct Page([u8; LARGEST_ALIGNMENT as usize]);
