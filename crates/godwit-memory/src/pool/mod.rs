//! Memory pools: folders in which each guest's memory is a file that several nodes may map, and devices or files of which
//! it is a part.
//!
//! In a folder a segment of the name `web` is the files `web.memory`, which QEMU maps, and `web.segment`, its header. In a
//! [`device`] it is a record of the table at its start.

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

/// Bytes of the pages that memory is mapped in, but on hugetlbfs.
pub const PAGE_BYTES: u64 = 4096;

/// Why a pool, or a segment of it, cannot be used. Each is a sentence's end that follows the pool's name.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// There is no such folder, device or file.
    #[error("{0} does not exist")]
    Missing(PathBuf),
    /// The path is something else.
    #[error("{0} is neither a folder, nor a DAX device, nor an ordinary file")]
    NotMemory(PathBuf),
    /// This node may not write there.
    #[error("this node may not write to {0}")]
    Forbidden(PathBuf),
    /// A device or file that was not made a pool.
    #[error("{0} was not made a pool yet")]
    NotFormatted(PathBuf),
    /// A device or file that begins with something else.
    #[error("{0} holds something else: it does not begin as a pool does")]
    Foreign(PathBuf),
    /// A folder, which needs no table.
    #[error("{0} is a folder, which is a pool as it is")]
    IsFolder(PathBuf),
    /// A device or file that is a pool.
    #[error("{path} is a pool already, with the memory of {segments} machines")]
    IsPool {
        /// Its path.
        path: PathBuf,
        /// How many machines have memory there, or are about to.
        segments: usize,
    },
    /// A device or file that has no room for a machine.
    #[error("{path} has {bytes} bytes, and a pool has at least {least}")]
    TooSmall {
        /// Its path.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
        /// Bytes of its table and a machine.
        least: u64,
    },
    /// A device's table makes no sense.
    #[error("the table in {path} cannot be used: {why}")]
    Table {
        /// The device.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A device's table is full.
    #[error("it has the memory of {0} machines, the most that it can have")]
    TooMany(usize),
    /// Others allocate there as well.
    #[error("other nodes allocate there all the time")]
    Busy,
    /// Somebody else is making it a pool.
    #[error("somebody is making {0} a pool just now")]
    BeingFormatted(PathBuf),
    /// A file whose room is not its own.
    #[error("the file {0} has holes, and its file system has no room to fill them")]
    Sparse(PathBuf),
    /// There is enough left, but not in one piece.
    #[error(
        "the largest piece of it that is free has {largest} bytes, and {wanted} are needed in one"
    )]
    InPieces {
        /// Bytes of that.
        largest: u64,
        /// Bytes that were asked for.
        wanted: u64,
    },
    /// Another process has changed a record that is this one's.
    #[error(
        "its record in the table of {0} is not what this process made it: another process of this node, or one of the same \
         name, runs"
    )]
    Changed(PathBuf),
    /// This process ends.
    #[error("this node is ending")]
    Ending,
    /// Its memory comes in other pages.
    #[error("its pages have {page} bytes, and {wanted} bytes are no number of whole ones")]
    PageSize {
        /// Bytes of one.
        page: u64,
        /// Bytes of memory that were asked for.
        wanted: u64,
    },
    /// There is not enough left.
    #[error("it has {free} bytes free, and {wanted} are needed")]
    Full {
        /// Bytes that are free.
        free: u64,
        /// Bytes that were asked for.
        wanted: u64,
    },
    /// A segment of this name is there.
    #[error("it has a segment named {name} already, which belongs to node '{owner}'")]
    Exists {
        /// The segment's name.
        name: String,
        /// Whose it is.
        owner: String,
    },
    /// There is no such segment.
    #[error("it has no segment named {0}")]
    NoSegment(String),
    /// Its header makes no sense.
    #[error("the header of its segment {name} makes no sense: {why}")]
    Damaged {
        /// The segment's name.
        name: String,
        /// What is wrong.
        why: &'static str,
    },
    /// The title cannot change.
    #[error("its segment {name} does not change hands: {why}")]
    Refused {
        /// The segment's name.
        name: String,
        /// Why.
        why: crate::ownership::Refused,
    },
    /// The other node does not see the same bytes.
    #[error("it is other memory there: what one node writes the other does not read")]
    OtherMemory,
    /// The system.
    #[error("cannot use {path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl PoolError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// How much a pool holds, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// In all.
    pub total: u64,
    /// Of that free.
    pub free: u64,
}

/// Where a segment's memory is: a whole file, or a part of a device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file or device.
    pub path: PathBuf,
    /// Which part of it.
    pub extent: Extent,
    /// What its mappings are aligned to when it is a part of what others have parts of as well; nothing for a file of the
    /// segment's own. Such a part keeps its room: it is neither punched nor removed.
    pub align: Option<u64>,
}

/// A memory pool as one node sees it.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Its folder, or the device.
    path: PathBuf,
    /// Bytes of the pages that its memory comes in.
    page: u64,
    device: Option<Device>,
}

impl Pool {
    /// The pool in a folder, or the device or file that was made one, that this node can use.
    ///
    /// # Errors
    /// [`PoolError`] when it cannot.
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

    /// Makes a device or file a pool, on which no machine has memory. One node does so for all that map it.
    ///
    /// # Errors
    /// [`PoolError`]: it is a folder, or too small; machines have memory there; or something else is there, and
    /// `overwrite` is not set.
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
        // Files of hugetlbfs are mapped in its blocks; those of other file systems are not.
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

    /// What each machine's memory is a multiple of, in bytes: more than [`PAGE_BYTES`] on hugetlbfs and in devices.
    pub const fn page_bytes(&self) -> u64 {
        self.page
    }

    const fn is_huge(&self) -> bool {
        self.page > PAGE_BYTES
    }

    /// Its folder, or the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is one device or file, and not a folder.
    pub const fn is_device(&self) -> bool {
        self.device.is_some()
    }

    const fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Whether its memory can move out of it and back while a guest runs. Linux write-protects pages of tmpfs and of
    /// hugetlbfs for that (userfaultfd), not those of DAX devices, and what moves memory here goes by pages of
    /// [`PAGE_BYTES`].
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn lets_memory_move(&self) -> Result<bool, PoolError> {
        const TMPFS: u64 = 0x0102_1994;
        // The names of devices are on tmpfs.
        if self.device.as_ref().is_some_and(Device::is_device) {
            return Ok(false);
        }
        let system = rustix::fs::statfs(&self.path)
            .map_err(io::Error::from)
            .map_err(PoolError::io(&self.path))?;
        Ok(system.f_type as u64 == TMPFS)
    }

    /// How much it holds. What a file system has free and segments may use again is not free.
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

    /// Looks whether its folder has room for so many bytes more beside all that segments may use again; of one that is not
    /// counted, the caller does so.
    ///
    /// # Errors
    /// [`PoolError::Full`] when it has not.
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

    /// Bytes that segments of its folder may use again, all but one's.
    fn owed(&self, but: Option<&str>) -> Result<u64, PoolError> {
        let names = self.segments()?.into_iter();
        let others = names.filter(|name| Some(name.as_str()) != but);
        // One that makes no sense has no machine.
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
        // A mount without a size says nothing, and one with a size need not have all of it.
        let all = huge_pages(self.page)?;
        Ok(match room.total {
            0 => all,
            _ => Room {
                total: room.total.min(all.total),
                free: room.free.min(all.free),
            },
        })
    }

    /// The file that QEMU maps for a segment in a folder.
    pub fn memory_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{MEMORY}"))
    }

    /// The file of a segment's header in a folder.
    fn header_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{SEGMENT}"))
    }

    /// The names of its segments, in their order.
    ///
    /// # Errors
    /// [`PoolError::Io`] when the folder cannot be listed.
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
            // Others may put anything there; names are shown as they are.
            let name = name
                .and_then(|name| name.strip_suffix('.'))
                .filter(|name| !name.contains(char::is_control));
            names.extend(name.map(str::to_owned));
        }
        names.sort();
        Ok(names)
    }
}

/// The host's huge pages of a size.
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
