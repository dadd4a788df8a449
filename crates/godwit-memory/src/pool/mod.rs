//! Memory pools: folders in which each guest's memory is a file that several nodes may map.
//!
//! A segment of the name `web` is the files `web.memory`, which QEMU maps, and `web.segment`, its header.

mod header;
mod page;
pub mod proof;
pub mod segment;

use std::io;
use std::path::{Path, PathBuf};

use crate::pool::segment::{MEMORY, SEGMENT};

/// Bytes of the pages that memory is mapped in, but on hugetlbfs.
pub const PAGE_BYTES: u64 = 4096;

/// Why a pool, or a segment of it, cannot be used. Each is a sentence's end that follows the pool's name.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// There is no such folder.
    #[error("its folder {0} does not exist")]
    Missing(PathBuf),
    /// The path is something else.
    #[error("{0} is not a folder")]
    NotFolder(PathBuf),
    /// This node may not write there.
    #[error("this node may not write to its folder {0}")]
    Forbidden(PathBuf),
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
    #[error("the folder there holds other memory: what one node writes the other does not read")]
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

/// A memory pool as one node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    folder: PathBuf,
    /// Bytes of the pages that its memory comes in.
    page: u64,
}

impl Pool {
    /// The pool in a folder that this node can use.
    ///
    /// # Errors
    /// [`PoolError`] when it cannot.
    pub fn open(folder: &Path) -> Result<Self, PoolError> {
        let found = std::fs::metadata(folder).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => PoolError::Missing(folder.to_owned()),
            io::ErrorKind::PermissionDenied => PoolError::Forbidden(folder.to_owned()),
            _ => PoolError::io(folder)(error),
        })?;
        if !found.is_dir() {
            return Err(PoolError::NotFolder(folder.to_owned()));
        }
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
            folder: folder.to_owned(),
            page,
        })
    }

    /// Bytes of the pages that its memory comes in: more than [`PAGE_BYTES`] on hugetlbfs.
    pub const fn page_bytes(&self) -> u64 {
        self.page
    }

    const fn is_huge(&self) -> bool {
        self.page > PAGE_BYTES
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether its memory can move out of it and back while a guest runs. Linux write-protects pages of tmpfs and of
    /// hugetlbfs for that (userfaultfd), and what moves memory here goes by pages of [`PAGE_BYTES`].
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn lets_memory_move(&self) -> Result<bool, PoolError> {
        const TMPFS: u64 = 0x0102_1994;
        let system = rustix::fs::statfs(&self.folder)
            .map_err(io::Error::from)
            .map_err(PoolError::io(&self.folder))?;
        Ok(system.f_type as u64 == TMPFS)
    }

    /// How much it holds.
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn room(&self) -> Result<Room, PoolError> {
        let system = rustix::fs::statvfs(&self.folder)
            .map_err(io::Error::from)
            .map_err(PoolError::io(&self.folder))?;
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

    /// The file that QEMU maps for a segment.
    pub fn memory_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.{MEMORY}"))
    }

    /// The file of a segment's header.
    pub fn header_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.{SEGMENT}"))
    }

    /// The names of its segments, in their order.
    ///
    /// # Errors
    /// [`PoolError::Io`] when the folder cannot be listed.
    pub fn segments(&self) -> Result<Vec<String>, PoolError> {
        let mut names = Vec::new();
        let entries = std::fs::read_dir(&self.folder).map_err(PoolError::io(&self.folder))?;
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
    fn what_is_no_folder_is_refused_by_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = folder.path().join("missing");
        assert!(matches!(Pool::open(&missing), Err(PoolError::Missing(path)) if path == missing));
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("writes");
        assert!(matches!(Pool::open(&file), Err(PoolError::NotFolder(_))));
        let pool = Pool::open(folder.path()).expect("a pool");
        assert!(pool.room().expect("is known").total > 0);
        assert!(pool.segments().expect("lists").is_empty());
    }
}
