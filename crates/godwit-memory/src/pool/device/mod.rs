//! Pools in one device or one file, of which each guest's memory is a part: a DAX device, or an ordinary file shared by
//! two nodes.
//!
//! - [`space`]: the place of the next segment. Pure.
//! - [`claim`]: conflicts of nodes that allocate at once. Pure.
//! - `table`, `record`: the layout on the device.
//! - `allocation`: the steps of an allocation, of the cleanup after a crash, and of a segment's removal.

mod allocation;
pub mod claim;
mod record;
pub mod space;
mod table;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub use self::allocation::is_allocating;
use self::claim::Stage;
use self::record::{Content, Record};
use self::space::Extent;
use self::table::{Head, NoTable, RECORDS, Table};
use super::header::Header;
use super::page::LOST;
use crate::dax::Geometry;
use crate::pool::{PoolError, Room};

/// A device that is a pool.
#[derive(Clone, Debug)]
pub(super) struct Device {
    path: PathBuf,
    identity: Identity,
    geometry: Geometry,
    head: Head,
    table: Table,
}

/// The identity of a device or file, independent of the name used to open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Identity {
    /// Number of a character device.
    Device(u64),
    /// File system and inode number of a file.
    File(u64, u64),
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(match metadata.file_type().is_char_device() {
            true => Self::Device(metadata.rdev()),
            false => Self::File(metadata.dev(), metadata.ino()),
        })
    }
}

/// A segment of a device.
#[derive(Debug)]
pub(super) struct Found {
    index: usize,
    pub(super) extent: Extent,
    pub(super) id: [u8; 16],
    record: Record,
}

impl Found {
    pub(super) fn header(&self) -> Header {
        self.record.header()
    }
}

/// Opens a device or file, with an error for anything else.
fn open(path: &Path) -> Result<(File, Geometry), PoolError> {
    // Opening a pipe of this name must not block.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).custom_flags(nonblocking);
    let file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => PoolError::Missing(path.to_owned()),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            PoolError::Forbidden(path.to_owned())
        }
        _ => PoolError::io(path)(error),
    })?;
    let geometry = Geometry::of(&file).map_err(PoolError::io(path))?;
    let geometry = geometry.ok_or_else(|| PoolError::NotMemory(path.to_owned()))?;
    Ok((file, geometry))
}

/// Reserves room for a part of a file. Missing room is an error here, and would raise a signal later. A device always
/// has its room.
fn reserve(path: &Path, file: &File, geometry: Geometry, part: Extent) -> Result<(), PoolError> {
    if geometry.is_device {
        return Ok(());
    }
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, part.offset, part.bytes).map_err(|error| match error {
        rustix::io::Errno::NOSPC => PoolError::Sparse(path.to_owned()),
        error => PoolError::io(path)(error.into()),
    })
}

/// Returns true if an ordinary file begins with zeroes. Mapping such a file would need room that may be missing.
fn begins_with_nothing(file: &File, geometry: Geometry) -> io::Result<bool> {
    if geometry.is_device {
        return Ok(false);
    }
    let mut first = [0; 8];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut first, 0)?;
    Ok(first == [0; 8])
}

fn too_small(path: &Path, geometry: Geometry) -> PoolError {
    PoolError::TooSmall {
        path: path.to_owned(),
        bytes: geometry.bytes,
        least: table::TABLE_BYTES.next_multiple_of(geometry.align) + geometry.align,
    }
}

impl Device {
    /// Opens a device that was formatted as a pool.
    pub(super) fn open(path: &Path) -> Result<Self, PoolError> {
        let (file, geometry) = open(path)?;
        if Head::new(geometry, 0).is_none() {
            return Err(too_small(path, geometry));
        }
        if begins_with_nothing(&file, geometry).map_err(PoolError::io(path))? {
            return Err(PoolError::NotFormatted(path.to_owned()));
        }
        let identity = Identity::of(&file).map_err(PoolError::io(path))?;
        let table = Table::map(&file, geometry).map_err(PoolError::io(path))?;
        let path = path.to_owned();
        match table.head(geometry) {
            Ok(head) => Ok(Self {
                path,
                identity,
                geometry,
                head,
                table,
            }),
            Err(NoTable::Empty) => Err(PoolError::NotFormatted(path)),
            Err(NoTable::Foreign) => Err(PoolError::Foreign(path)),
            Err(NoTable::Wrong(why)) => Err(PoolError::Table { path, why }),
        }
    }

    /// Formats a device as a pool.
    ///
    /// # Errors
    /// If the device is too small, or has content: memory of VMs, or any content unless `overwrite` is set.
    pub(super) fn format(path: &Path, overwrite: bool) -> Result<Self, PoolError> {
        let (file, geometry) = open(path)?;
        // Only one of two concurrent formats succeeds. The lock ends with the file.
        let lock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&file, lock).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => PoolError::BeingFormatted(path.to_owned()),
            error => PoolError::io(path)(error.into()),
        })?;
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .map_err(PoolError::io(path))?;
        let head = Head::new(geometry, u128::from_le_bytes(id));
        let head = head.ok_or_else(|| too_small(path, geometry))?;
        let whole = Extent {
            offset: 0,
            bytes: head.space().offset,
        };
        reserve(path, &file, geometry, whole)?;
        let table = Table::map(&file, geometry).map_err(PoolError::io(path))?;
        // Also protects a table that is unusable here: the pool may be in use elsewhere, or was made for other sizes.
        if matches!(table.head(geometry), Ok(_) | Err(NoTable::Wrong(_))) {
            let used = (0..RECORDS).filter(|index| {
                let stage = table.record(*index).stage();
                stage.map_or(true, |(stage, _)| stage != Stage::Free)
            });
            let segments = used.count();
            if segments > 0 || !overwrite {
                let path = path.to_owned();
                return Err(PoolError::IsPool { path, segments });
            }
        } else if !overwrite && !table.is_empty() {
            return Err(PoolError::Foreign(path.to_owned()));
        }
        table.write(&head);
        Self::open(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) const fn align(&self) -> u64 {
        self.head.align
    }

    /// Returns true for a character device, false for a file.
    pub(super) const fn is_device(&self) -> bool {
        self.geometry.is_device
    }

    fn content(&self, index: usize) -> Result<Content, &'static str> {
        let record = self.table.record(index);
        record.content(index, self.head.space(), self.head.align)
    }

    /// Returns the entries of all records that are not free.
    fn entries(&self) -> Vec<(usize, Result<claim::Entry<String>, &'static str>)> {
        let (space, align) = (self.head.space(), self.head.align);
        let read = |index: usize| {
            let record = self.table.record(index);
            match record.stage() {
                Ok((Stage::Free, _)) => None,
                _ => Some((index, record.entry(index, space, align))),
            }
        };
        (0..RECORDS).filter_map(read).collect()
    }

    pub(super) fn room(&self) -> Result<Room, PoolError> {
        let space = self.head.space();
        let used: Vec<Extent> = self.used()?.into_iter().map(|entry| entry.extent).collect();
        Ok(Room {
            total: space.bytes,
            free: space::free(space, &used),
        })
    }

    /// Returns the records that have a part of the device, or may get one.
    ///
    /// # Errors
    /// If a record is invalid, since the free space is then unknown.
    fn used(&self) -> Result<Vec<claim::Entry<String>>, PoolError> {
        let mut used = Vec::new();
        for (index, entry) in self.entries() {
            let entry = entry.map_err(|why| PoolError::Table {
                path: self.path.clone(),
                why: format!("record {index} of its table makes no sense: {why}"),
            })?;
            if entry.stage.has_space() {
                used.push(entry);
            }
        }
        Ok(used)
    }

    /// Returns the names of the segments, and a placeholder name for each invalid record.
    pub(super) fn segments(&self) -> Vec<String> {
        let entries = self.entries().into_iter();
        let names = entries.filter_map(|(index, entry)| match entry {
            Ok(entry) => (entry.stage == Stage::Held).then_some(entry.name),
            Err(_) => Some(format!("(record {index})")),
        });
        names.collect()
    }

    /// Finds a segment.
    ///
    /// # Errors
    /// [`PoolError::NoSegment`], or [`PoolError::Damaged`] if two segments have the name or share memory.
    pub(super) fn find(&self, name: &str) -> Result<Found, PoolError> {
        let damaged = |why| PoolError::Damaged {
            name: name.to_owned(),
            why,
        };
        let entries = self.entries();
        if self.table.is_lost() {
            return Err(PoolError::Table {
                path: self.path.clone(),
                why: String::from(LOST),
            });
        }
        let held = |entry: &&claim::Entry<String>| entry.stage == Stage::Held && entry.name == name;
        let known = entries.iter().filter_map(|(_, entry)| entry.as_ref().ok());
        let mut found = known.clone().filter(held);
        let Some(entry) = found.next() else {
            if let Some(index) = numbered(name)
                && let Some((_, Err(why))) = entries.iter().find(|(at, _)| *at == index)
            {
                return Err(damaged(why));
            }
            return Err(PoolError::NoSegment(name.to_owned()));
        };
        if found.next().is_some() {
            return Err(damaged("two segments have its name"));
        }
        let shares = |other: &claim::Entry<String>| {
            let settled = matches!(other.stage, Stage::Taken | Stage::Held);
            settled && other.index != entry.index && other.extent.overlaps(entry.extent)
        };
        if known.clone().any(shares) {
            return Err(damaged("another segment has a part of its memory"));
        }
        let index = entry.index;
        let content = self.content(index).map_err(damaged)?;
        if content.name != name {
            return Err(PoolError::NoSegment(name.to_owned()));
        }
        Ok(Found {
            index,
            extent: content.extent,
            id: content.id,
            record: self.table.record(index),
        })
    }

    /// Writes the question of a segment's owner. Another node that reads the question proves that both see the same
    /// memory.
    pub(super) fn ask(&self, name: &str, nonce: &[u8; 32]) -> Result<(), PoolError> {
        self.find(name).map(|found| found.record.ask(nonce))
    }

    pub(super) fn question(&self, name: &str) -> Result<[u8; 32], PoolError> {
        self.find(name).map(|found| found.record.question())
    }

    pub(super) fn answer(&self, name: &str, echo: &[u8; 32]) -> Result<(), PoolError> {
        self.find(name).map(|found| found.record.answer(echo))
    }

    pub(super) fn answered(&self, name: &str) -> Result<[u8; 32], PoolError> {
        self.find(name).map(|found| found.record.answered())
    }
}

/// Returns the record of a placeholder name from [`Device::segments`]; no VM has such a name.
fn numbered(name: &str) -> Option<usize> {
    name.strip_prefix("(record ")?
        .strip_suffix(')')?
        .parse()
        .ok()
}
