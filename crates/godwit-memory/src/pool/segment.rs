//! A guest's memory in a pool.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::FallocateFlags;

use crate::ownership::Title;
use crate::pool::device::Found;
use crate::pool::device::space::Extent;
use crate::pool::header::Header;
use crate::pool::{PAGE_BYTES, Place, Pool, PoolError};

/// File extension of memory.
pub(super) const MEMORY: &str = "memory";
/// File extension of headers.
pub(super) const SEGMENT: &str = "segment";

/// A segment with a mapped header.
#[derive(Debug)]
pub struct Segment {
    name: String,
    place: Place,
    id: [u8; 16],
    header: Header,
    /// Record of the segment, in a device.
    found: Option<Found>,
}

impl Segment {
    /// Allocates a segment of `bytes` zeroes, owned by `owner`, with reserved room. After a crash of this process, the
    /// segment exists completely or not at all.
    ///
    /// # Errors
    /// [`PoolError`], also if the name is taken or the room is insufficient.
    pub fn allocate(pool: &Pool, name: &str, bytes: u64, owner: &str) -> Result<Self, PoolError> {
        Self::allocate_unless(pool, name, bytes, owner, &|| false)
    }

    /// Works like [`Self::allocate`], but stops once `ends` returns true. A process that ends must not continue to
    /// overwrite a part of a device while its successor may have begun.
    ///
    /// # Errors
    /// Like [`Self::allocate`], and [`PoolError::Ending`].
    pub fn allocate_unless(
        pool: &Pool,
        name: &str,
        bytes: u64,
        owner: &str,
        ends: &dyn Fn() -> bool,
    ) -> Result<Self, PoolError> {
        whole_pages(pool, bytes)?;
        if let Some(device) = pool.device() {
            let found = device.allocate(name, bytes, owner, ends)?;
            return Ok(Self::of_record(pool, name, found));
        }
        pool.has_room(None, bytes.saturating_add(pool.page_bytes()))?;
        match Self::open(pool, name) {
            Ok(other) => {
                let owner = other.title().map(|title| title.owner).unwrap_or_default();
                let name = name.to_owned();
                return Err(PoolError::Exists { name, owner });
            }
            Err(PoolError::NoSegment(_)) => {}
            Err(error) => return Err(error),
        }
        let memory = pool.memory_path(name);
        let header_path = pool.header_path(name);
        // Two nodes may allocate the same name at once: each makes files of its own, and one node takes the name.
        let begun = begun(name, owner);
        let new = |kind| pool.path().join(format!(".{begun}.{kind}.new"));
        let (new_memory, new_header) = (new(MEMORY), new(SEGMENT));
        let take = || {
            rename_new(&new_header, &header_path).map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    let owner = Self::open(pool, name).and_then(|other| other.title());
                    let owner = owner.map(|title| title.owner).unwrap_or_default();
                    let name = name.to_owned();
                    PoolError::Exists { name, owner }
                }
                _ => PoolError::io(&header_path)(error),
            })
        };
        let made = Self::make(pool, (&new_memory, &new_header), bytes, owner)
            // Other nodes may have allocated at once, and may have taken room owed to holes.
            .and_then(|()| pool.has_room(None, 0))
            .and_then(|()| take())
            .and_then(|()| std::fs::rename(&new_memory, &memory).map_err(PoolError::io(&memory)));
        if let Err(error) = made {
            let _ = std::fs::remove_file(&new_memory);
            let _ = std::fs::remove_file(&new_header);
            return Err(error);
        }
        Self::made(pool, name)
    }

    /// Makes a segment, owned by `owner`, of an existing memory file of this name that a QEMU uses already. The room is
    /// reserved. An existing header of `owner` stays as it is.
    ///
    /// # Errors
    /// [`PoolError`], also if the name is taken or the room is insufficient.
    pub fn adopt(pool: &Pool, name: &str, owner: &str) -> Result<Self, PoolError> {
        let is_there = match Self::open(pool, name) {
            Ok(segment) => {
                let title = segment.title()?;
                if title.owner != owner {
                    return Err(PoolError::Exists {
                        name: name.to_owned(),
                        owner: title.owner,
                    });
                }
                true
            }
            Err(PoolError::NoSegment(_)) => false,
            Err(error) => return Err(error),
        };
        let header_bytes = if is_there { 0 } else { pool.page_bytes() };
        // Also with an existing header: an earlier adoption may have stopped midway, and the file may have been made
        // again since.
        let bytes = Self::reserve(pool, name, header_bytes)?;
        if is_there {
            return Self::open(pool, name);
        }
        let begun = begun(name, owner);
        let header = pool.header_path(name);
        let new = pool.path().join(format!(".{begun}.{SEGMENT}.new"));
        let made = Self::make_header(pool, &new, bytes, owner)
            .and_then(|()| rename_new(&new, &header).map_err(PoolError::io(&header)));
        if let Err(error) = made {
            let _ = std::fs::remove_file(&new);
            return Err(error);
        }
        Self::made(pool, name)
    }

    fn of_record(pool: &Pool, name: &str, found: Found) -> Self {
        Self {
            name: name.to_owned(),
            place: Place {
                path: pool.path().to_owned(),
                extent: found.extent,
                align: Some(pool.page_bytes()),
            },
            id: found.id,
            header: found.header(),
            found: Some(found),
        }
    }

    /// Reserves the room of an existing memory file, leaving `more` bytes free beside, and restricts access to the
    /// file's owner. Returns the file's bytes.
    fn reserve(pool: &Pool, name: &str, more: u64) -> Result<u64, PoolError> {
        let memory = pool.memory_path(name);
        let failed = PoolError::io;
        let file = OpenOptions::new().read(true).write(true).open(&memory);
        let file = file.map_err(failed(&memory))?;
        let metadata = file.metadata().map_err(failed(&memory))?;
        let bytes = metadata.len();
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(PoolError::Damaged {
                name: name.to_owned(),
                why: "its size is no number of whole pages",
            });
        }
        let wanted = bytes.saturating_sub(metadata.blocks() * 512);
        pool.has_room(Some(name), wanted.saturating_add(more))?;
        whole_pages(pool, bytes)?;
        // Like the memory of any other guest, the file is private.
        file.set_permissions(std::fs::Permissions::from_mode(0o600))
            .map_err(failed(&memory))?;
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes)
            .map_err(io::Error::from)
            .map_err(failed(&memory))?;
        Ok(bytes)
    }

    /// Syncs the folder, and opens the new segment. The header's file name is the commit point of an allocation.
    fn made(pool: &Pool, name: &str) -> Result<Self, PoolError> {
        let folder = File::open(pool.path()).map_err(PoolError::io(pool.path()))?;
        folder.sync_all().map_err(PoolError::io(pool.path()))?;
        Self::open(pool, name)
    }

    fn make(
        pool: &Pool,
        (memory, header): (&Path, &Path),
        bytes: u64,
        owner: &str,
    ) -> Result<(), PoolError> {
        create(memory, bytes)?
            .sync_all()
            .map_err(PoolError::io(memory))?;
        Self::make_header(pool, header, bytes, owner)
    }

    fn make_header(pool: &Pool, header: &Path, bytes: u64, owner: &str) -> Result<(), PoolError> {
        let file = create(header, pool.page_bytes())?;
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .map_err(PoolError::io(header))?;
        Header::map(&file, pool.page_bytes())
            .map_err(PoolError::io(header))?
            .write(bytes, id, &Title::new(owner));
        file.sync_all().map_err(PoolError::io(header))
    }

    /// Removes the traces of an allocation by `owner` that ended between its two files: a header without memory. In a
    /// device, removes the traces of any allocation by `owner`.
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn clear(pool: &Pool, name: &str, owner: &str) -> Result<(), PoolError> {
        if let Some(device) = pool.device() {
            device.clear(owner);
            return Ok(());
        }
        let path = pool.header_path(name);
        let memory = pool.memory_path(name);
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else {
            return Ok(());
        };
        let header = Header::map(&file, pool.page_bytes()).map_err(PoolError::io(&path))?;
        let is_own = header.title().is_ok_and(|title| title == Title::new(owner));
        if is_own && !memory.exists() {
            std::fs::remove_file(&path).map_err(PoolError::io(&path))?;
        }
        Ok(())
    }

    /// Opens an existing segment.
    ///
    /// # Errors
    /// [`PoolError`], also if the header is invalid.
    pub fn open(pool: &Pool, name: &str) -> Result<Self, PoolError> {
        if let Some(device) = pool.device() {
            return Ok(Self::of_record(pool, name, device.find(name)?));
        }
        let path = pool.header_path(name);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(PoolError::NoSegment(name.to_owned()));
            }
            opened => opened.map_err(PoolError::io(&path))?,
        };
        let header = Header::map(&file, pool.page_bytes()).map_err(PoolError::io(&path))?;
        let damaged = |why| PoolError::Damaged {
            name: name.to_owned(),
            why,
        };
        let (bytes, id) = header.read().map_err(damaged)?;
        let memory = pool.memory_path(name);
        let length = std::fs::metadata(&memory)
            .map_err(PoolError::io(&memory))?
            .len();
        if length != bytes {
            return Err(damaged("its memory has another size"));
        }
        Ok(Self {
            name: name.to_owned(),
            place: Place {
                path: memory,
                extent: Extent { offset: 0, bytes },
                align: None,
            },
            id,
            header,
            found: None,
        })
    }

    /// Returns the segment's name, which is the VM's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the place of the memory, which QEMU maps.
    pub const fn place(&self) -> &Place {
        &self.place
    }

    /// Returns the bytes of the memory.
    pub const fn bytes(&self) -> u64 {
        self.place.extent.bytes
    }

    /// Returns the unique id of the segment in hexadecimal, different from earlier segments of the same name.
    pub fn id(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads the current title.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn title(&self) -> Result<Title, PoolError> {
        self.header.title().map_err(|why| PoolError::Damaged {
            name: self.name.clone(),
            why,
        })
    }

    /// Ends the offer of epoch `offered` by `from`, in favour of `to`. Repeating a decision has no effect.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if `from` is not the owner, or the offer ended otherwise.
    pub fn decide(&self, from: &str, offered: u64, to: &str) -> Result<Title, PoolError> {
        let title = self.title()?;
        if title.epoch == offered + 1 && title.owner == to {
            return Ok(title);
        }
        let refused = |why| PoolError::Refused {
            name: self.name.clone(),
            why,
        };
        let next = title.decided(from, offered, to).map_err(refused)?;
        if self.header.replace(&next) {
            if self.found.is_some() {
                self.header.persist();
            }
            return Ok(next);
        }
        let now = self.title()?.epoch;
        Err(refused(crate::ownership::Refused::Changed { now, offered }))
    }

    /// Gives up the room of the first `bytes` bytes, which are elsewhere and were freed here. Only the segment's owner
    /// may do so. A part of a device keeps its room.
    pub fn give_up(&self, bytes: u64) {
        if self.found.is_none() {
            self.header.set_away(bytes);
        }
    }

    /// Takes back the given-up room, so that all of the memory fits into the pool again.
    ///
    /// # Errors
    /// [`PoolError::Full`]. Then nothing has changed.
    pub fn take_back(&self, pool: &Pool) -> Result<(), PoolError> {
        let away = self.header.away();
        if self.found.is_some() || away == 0 {
            return Ok(());
        }
        self.give_up(0);
        let room = pool.has_room(None, 0);
        if room.is_err() {
            self.give_up(away);
        }
        room
    }

    /// Returns the bytes of holes in the memory file: a balloon or free page reporting punched them, and the guest may
    /// use them again at any time.
    pub(super) fn owed(&self) -> u64 {
        let Ok(metadata) = std::fs::metadata(&self.place.path) else {
            return 0;
        };
        let kept = self.bytes().saturating_sub(self.header.away());
        kept.saturating_sub(metadata.blocks() * 512)
    }

    /// Removes the segment, which must not be in use.
    ///
    /// # Errors
    /// [`PoolError::Io`], or [`PoolError::Changed`] if the segment does not exist any more.
    pub fn remove(self, pool: &Pool) -> Result<(), PoolError> {
        if let (Some(device), Some(found)) = (pool.device(), &self.found) {
            return device.remove(found);
        }
        // Without a header, the segment does not exist, and leftover memory gets overwritten.
        for path in [pool.header_path(&self.name), pool.memory_path(&self.name)] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(PoolError::io(&path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Refuses memory that ends inside a page of the pool.
fn whole_pages(pool: &Pool, bytes: u64) -> Result<(), PoolError> {
    let page = pool.page_bytes();
    match bytes.is_multiple_of(page) {
        true => Ok(()),
        false => Err(PoolError::PageSize {
            page,
            wanted: bytes,
        }),
    }
}

/// Makes a file with reserved room.
fn create(path: &Path, bytes: u64) -> Result<File, PoolError> {
    // A leftover of an interrupted allocation has no header.
    let _ = std::fs::remove_file(path);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(PoolError::io(path))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
        .map_err(io::Error::from)
        .map_err(PoolError::io(path))?;
    Ok(file)
}

/// Returns a file name for an unfinished allocation. The name is short, and the same after a crash, so that the next
/// attempt replaces the leftover.
fn begun(name: &str, owner: &str) -> blake3::Hash {
    blake3::hash(format!("{name}\0{owner}").as_bytes())
}

/// Renames a file, with an error if the new name exists.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(io::Error::from)
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
