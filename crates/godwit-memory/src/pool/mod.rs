//! Memory pools: a folder with one file for each guest's memory, or a device or file of which each guest's memory is a
//! part. Several nodes may map the same pool.
//!
//! In a folder, the segment `web` consists of the files `web.memory`, mapped by QEMU, and `web.segment`, the header. In
//! a [`device`], a segment is a record of the table at the device's start.

pub mod device;
mod header;
mod page;
pub mod proof;
pub mod segment;

use std::io;
use std::path::{Path, PathBuf};

use crate::pool::device::Device;
use crate::pool::device::space::Extent;
use crate::pool::segment::{MEMORY, SEGMENT, Segment};

/// Bytes of a page, except on hugetlbfs.
pub const PAGE_BYTES: u64 = 4096;

/// The reason why a pool or a segment cannot be used. Each message completes a sentence that begins with the pool's
/// name.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The folder, device or file does not exist.
    #[error("{0} does not exist")]
    Missing(PathBuf),
    /// The path is neither a folder, a DAX device nor an ordinary file.
    #[error("{0} is neither a folder, nor a DAX device, nor an ordinary file")]
    NotMemory(PathBuf),
    /// This node may not write to the path.
    #[error("this node may not write to {0}")]
    Forbidden(PathBuf),
    /// The device or file was not formatted as a pool.
    #[error("{0} was not made a pool yet")]
    NotFormatted(PathBuf),
    /// The device or file begins with other data.
    #[error("{0} holds something else: it does not begin as a pool does")]
    Foreign(PathBuf),
    /// The path is a folder, which needs no format.
    #[error("{0} is a folder, which is a pool as it is")]
    IsFolder(PathBuf),
    /// The device or file is a pool already.
    #[error("{path} is a pool already, with the memory of {segments} machines")]
    IsPool {
        /// Path of the pool.
        path: PathBuf,
        /// Number of VMs that have memory in the pool, or are about to.
        segments: usize,
    },
    /// The device or file has no room for a VM.
    #[error("{path} has {bytes} bytes, and a pool has at least {least}")]
    TooSmall {
        /// Path of the device or file.
        path: PathBuf,
        /// Bytes of the device or file.
        bytes: u64,
        /// Bytes of the table and one VM.
        least: u64,
    },
    /// The device's table is invalid.
    #[error("the table in {path} cannot be used: {why}")]
    Table {
        /// Path of the device.
        path: PathBuf,
        /// Description of the damage.
        why: String,
    },
    /// The device's table is full.
    #[error("it has the memory of {0} machines, the most that it can have")]
    TooMany(usize),
    /// Other nodes allocate in the pool all the time.
    #[error("other nodes allocate there all the time")]
    Busy,
    /// Another process is formatting the path.
    #[error("somebody is making {0} a pool just now")]
    BeingFormatted(PathBuf),
    /// The file has holes, and its file system has no room for them.
    #[error("the file {0} has holes, and its file system has no room to fill them")]
    Sparse(PathBuf),
    /// The free space is sufficient, but fragmented.
    #[error(
        "the largest piece of it that is free has {largest} bytes, and {wanted} are needed in one"
    )]
    InPieces {
        /// Bytes of the largest free piece.
        largest: u64,
        /// Requested bytes.
        wanted: u64,
    },
    /// Another process has changed a record of this process.
    #[error(
        "its record in the table of {0} is not what this process made it: another process of this node, or one of the same \
         name, runs"
    )]
    Changed(PathBuf),
    /// This process is ending.
    #[error("this node is ending")]
    Ending,
    /// The size is not a multiple of the pool's page size.
    #[error("its pages have {page} bytes, and {wanted} bytes are no number of whole ones")]
    PageSize {
        /// Bytes of a page.
        page: u64,
        /// Requested bytes of memory.
        wanted: u64,
    },
    /// The free space is insufficient.
    #[error("it has {free} bytes free, and {wanted} are needed")]
    Full {
        /// Free bytes.
        free: u64,
        /// Requested bytes.
        wanted: u64,
    },
    /// A segment of this name exists.
    #[error("it has a segment named {name} already, which belongs to node '{owner}'")]
    Exists {
        /// Name of the segment.
        name: String,
        /// Owner of the segment.
        owner: String,
    },
    /// No segment has this name.
    #[error("it has no segment named {0}")]
    NoSegment(String),
    /// The segment's header is invalid.
    #[error("the header of its segment {name} makes no sense: {why}")]
    Damaged {
        /// Name of the segment.
        name: String,
        /// Description of the damage.
        why: &'static str,
    },
    /// The title cannot change.
    #[error("its segment {name} does not change hands: {why}")]
    Refused {
        /// Name of the segment.
        name: String,
        /// Reason.
        why: crate::ownership::Refused,
    },
    /// The other node sees other memory under the same name.
    #[error("it is other memory there: what one node writes the other does not read")]
    OtherMemory,
    /// The system refuses.
    #[error("cannot use {path}: {source}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl PoolError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// The size of a pool in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Total bytes.
    pub total: u64,
    /// Free bytes.
    pub free: u64,
}

/// The place of a segment's memory: a whole file, or a part of a device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Path of the file or device.
    pub path: PathBuf,
    /// Part of the file or device.
    pub extent: Extent,
    /// Alignment of mappings for a part of a shared device or file; `None` for a file of the segment's own. A part
    /// keeps its room, and is neither punched nor removed.
    pub align: Option<u64>,
}

/// A memory pool as seen by one node.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Path of the folder or device.
    path: PathBuf,
    /// Bytes of the pool's pages.
    page: u64,
    device: Option<Device>,
}

impl Pool {
    /// Opens a pool: a folder, or a device or file formatted as a pool.
    ///
    /// # Errors
    /// [`PoolError`] if this node cannot use the pool.
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        let found = std::fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => PoolError::Missing(path.to_owned()),
            io::ErrorKind::PermissionDenied => PoolError::Forbidden(path.to_owned()),
            _ => PoolError::io(path)(error),
        })?;
        match found.is_dir() {
            true => Self::open_folder(path),
            false => Device::open(path).map(Self::of_device),
        }
    }

    /// Formats a device or file as an empty pool. One node does so for all nodes that map the pool.
    ///
    /// # Errors
    /// [`PoolError`] if the path is a folder, if the device or file is too small or holds memory of VMs, or if other
    /// data is present and `overwrite` is not set.
    pub fn format(path: &Path, overwrite: bool) -> Result<Self, PoolError> {
        if path.is_dir() {
            return Err(PoolError::IsFolder(path.to_owned()));
        }
        Device::format(path, overwrite).map(Self::of_device)
    }

    fn of_device(device: Device) -> Self {
        Self {
            path: device.path().to_owned(),
            page: device.align(),
            device: Some(device),
        }
    }

    fn open_folder(folder: &Path) -> Result<Self, PoolError> {
        let access = rustix::fs::Access::READ_OK
            | rustix::fs::Access::WRITE_OK
            | rustix::fs::Access::EXEC_OK;
        rustix::fs::access(folder, access).map_err(|error| match error {
            rustix::io::Errno::ACCESS | rustix::io::Errno::ROFS => {
                PoolError::Forbidden(folder.to_owned())
            }
            error => PoolError::io(folder)(error.into()),
        })?;
        let system = rustix::fs::statfs(folder)
            .map_err(io::Error::from)
            .map_err(PoolError::io(folder))?;
        // Files of hugetlbfs are mapped in blocks of the file system; files of other file systems are not.
        const HUGETLBFS: u64 = 0x9584_58f6;
        let page = match system.f_type as u64 {
            HUGETLBFS => (system.f_bsize as u64).max(PAGE_BYTES),
            _ => PAGE_BYTES,
        };
        Ok(Self {
            path: folder.to_owned(),
            page,
            device: None,
        })
    }

    /// Returns the unit of VMs' memory in bytes: more than [`PAGE_BYTES`] on hugetlbfs and in devices.
    pub const fn page_bytes(&self) -> u64 {
        self.page
    }

    const fn is_huge(&self) -> bool {
        self.page > PAGE_BYTES
    }

    /// Returns the path of the folder or device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true for a device or file, false for a folder.
    pub const fn is_device(&self) -> bool {
        self.device.is_some()
    }

    const fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Returns true if memory can move out of the pool and back while a guest runs. The mover needs write protection
    /// (userfaultfd) of pages of [`PAGE_BYTES`]. Linux offers write protection for tmpfs and hugetlbfs, and not for DAX
    /// devices.
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn lets_memory_move(&self) -> Result<bool, PoolError> {
        const TMPFS: u64 = 0x0102_1994;
        // Device files are on tmpfs too.
        if self.device.as_ref().is_some_and(Device::is_device) {
            return Ok(false);
        }
        let system = rustix::fs::statfs(&self.path)
            .map_err(io::Error::from)
            .map_err(PoolError::io(&self.path))?;
        Ok(system.f_type as u64 == TMPFS)
    }

    /// Returns the size of the pool. Free room of the file system that segments may use again does not count as free.
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn room(&self) -> Result<Room, PoolError> {
        if let Some(device) = &self.device {
            return device.room();
        }
        let room = self.file_system_room()?;
        let free = room.free.saturating_sub(self.owed(None)?);
        Ok(Room { free, ..room })
    }

    /// Checks that the folder has room for `wanted` bytes beside the holes of all segments. The holes of the segment
    /// `uncounted` are left to the caller.
    ///
    /// # Errors
    /// [`PoolError::Full`] if the room is missing.
    fn has_room(&self, uncounted: Option<&str>, wanted: u64) -> Result<(), PoolError> {
        let (has, owed) = (self.file_system_room()?.free, self.owed(uncounted)?);
        match owed.saturating_add(wanted) <= has {
            true => Ok(()),
            false => Err(PoolError::Full {
                free: has.saturating_sub(owed),
                wanted,
            }),
        }
    }

    /// Returns the bytes that the folder's segments may use again, without the segment `but`.
    fn owed(&self, but: Option<&str>) -> Result<u64, PoolError> {
        let names = self.segments()?.into_iter();
        let others = names.filter(|name| Some(name.as_str()) != but);
        // An invalid segment belongs to no VM.
        let others = others.filter_map(|name| Segment::open(self, &name).ok());
        Ok(others
            .map(|segment| segment.owed())
            .fold(0, u64::saturating_add))
    }

    fn file_system_room(&self) -> Result<Room, PoolError> {
        let system = rustix::fs::statvfs(&self.path)
            .map_err(io::Error::from)
            .map_err(PoolError::io(&self.path))?;
        let room = Room {
            total: system.f_blocks.saturating_mul(system.f_frsize),
            free: system.f_bavail.saturating_mul(system.f_frsize),
        };
        if !self.is_huge() {
            return Ok(room);
        }
        // A mount without a size reports nothing, and a mount with a size may have less than its size.
        let all = huge_pages(self.page)?;
        Ok(match room.total {
            0 => all,
            _ => Room {
                total: room.total.min(all.total),
                free: room.free.min(all.free),
            },
        })
    }

    /// Returns the path of the memory file in a folder, which QEMU maps.
    pub fn memory_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{MEMORY}"))
    }

    fn header_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{SEGMENT}"))
    }

    /// Returns the names of the segments, sorted.
    ///
    /// # Errors
    /// [`PoolError::Io`] if the folder cannot be listed.
    pub fn segments(&self) -> Result<Vec<String>, PoolError> {
        if let Some(device) = &self.device {
            let mut names = device.segments();
            names.sort();
            return Ok(names);
        }
        let mut names = Vec::new();
        let entries = std::fs::read_dir(&self.path).map_err(PoolError::io(&self.path))?;
        for entry in entries.flatten() {
            let file = entry.file_name();
            let name = file.to_str().and_then(|name| name.strip_suffix(SEGMENT));
            // Any process may put files there; names are displayed without escaping.
            let name = name
                .and_then(|name| name.strip_suffix('.'))
                .filter(|name| !name.contains(char::is_control));
            names.extend(name.map(str::to_owned));
        }
        names.sort();
        Ok(names)
    }
}

/// Returns the host's huge pages of a size.
fn huge_pages(page: u64) -> Result<Room, PoolError> {
    let folder = PathBuf::from(format!(
        "/sys/kernel/mm/hugepages/hugepages-{}kB",
        page >> 10
    ));
    let bytes = |name: &str| {
        let path = folder.join(name);
        let text = std::fs::read_to_string(&path).map_err(PoolError::io(&path))?;
        let pages: u64 = text.trim().parse().unwrap_or(0);
        Ok(pages.saturating_mul(page))
    };
    Ok(Room {
        total: bytes("nr_hugepages")?,
        free: bytes("free_hugepages")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_pool_is_refused_by_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = folder.path().join("missing");
        assert!(matches!(Pool::open(&missing), Err(PoolError::Missing(path)) if path == missing));
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("writes");
        assert!(matches!(Pool::open(&file), Err(PoolError::TooSmall { .. })));
        for other in ["/dev/null", "/dev/zero"] {
            let refused = Pool::open(Path::new(other));
            assert!(matches!(refused, Err(PoolError::NotMemory(_))), "{other}");
        }
        let pool = Pool::open(folder.path()).expect("a pool");
        assert!(pool.room().expect("is known").total > 0);
        assert!(pool.segments().expect("lists").is_empty());
    }
}
