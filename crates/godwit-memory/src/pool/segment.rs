//! One guest's memory in a pool.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use crate::ownership::Title;
use crate::pool::header::Header;
use crate::pool::{PAGE_BYTES, Pool, PoolError};

/// How the files of memory end.
pub(super) const MEMORY: &str = "memory";
/// How the files of headers end.
pub(super) const SEGMENT: &str = "segment";

/// A segment, whose header is mapped.
#[derive(Debug)]
pub struct Segment {
    name: String,
    memory: PathBuf,
    bytes: u64,
    id: [u8; 16],
    header: Header,
}

impl Segment {
    /// Allocates a segment of `bytes` zeroes, owned by `owner`: its room is reserved, and it survives a crash of this
    /// process whole or not at all.
    ///
    /// # Errors
    /// [`PoolError`]: also when the name is taken or there is not enough room.
    pub fn allocate(pool: &Pool, name: &str, bytes: u64, owner: &str) -> Result<Self, PoolError> {
        whole_pages(pool, bytes)?;
        let free = pool.room()?.free;
        if free < bytes.saturating_add(pool.page_bytes()) {
            return Err(PoolError::Full {
                free,
                wanted: bytes,
            });
        }
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
        // Two nodes may allocate the same name at once: each makes files of its own, and one takes the name.
        let begun = begun(name, owner);
        let new = |kind| pool.folder().join(format!(".{begun}.{kind}.new"));
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
            .and_then(|()| take())
            .and_then(|()| std::fs::rename(&new_memory, &memory).map_err(PoolError::io(&memory)));
        if let Err(error) = made {
            let _ = std::fs::remove_file(&new_memory);
            let _ = std::fs::remove_file(&new_header);
            return Err(error);
        }
        Self::made(pool, name)
    }

    /// Makes a segment, owned by `owner`, of a file that is where a segment of this name has its memory, and that a QEMU
    /// uses already. Its room is reserved. A header that `owner` has already stays as it is.
    ///
    /// # Errors
    /// [`PoolError`]: also when the name is taken, or there is not enough room.
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
        // Also below a header: an adoption may have ended before this one, and the file may have been made again since.
        let bytes = Self::reserve(pool, name, header_bytes)?;
        if is_there {
            return Self::open(pool, name);
        }
        let begun = begun(name, owner);
        let header = pool.header_path(name);
        let new = pool.folder().join(format!(".{begun}.{SEGMENT}.new"));
        let made = Self::make_header(pool, &new, bytes, owner)
            .and_then(|()| rename_new(&new, &header).map_err(PoolError::io(&header)));
        if let Err(error) = made {
            let _ = std::fs::remove_file(&new);
            return Err(error);
        }
        Self::made(pool, name)
    }

    /// Reserves the room of a file of memory that is there, with so many bytes more left, and lets nobody but its owner read
    /// it. Gives its bytes.
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
        let free = pool.room()?.free;
        let wanted = bytes.saturating_sub(metadata.blocks() * 512);
        if free < wanted.saturating_add(more) {
            return Err(PoolError::Full { free, wanted });
        }
        whole_pages(pool, bytes)?;
        // As the memory of any other guest: nobody else's to read.
        file.set_permissions(std::fs::Permissions::from_mode(0o600))
            .map_err(failed(&memory))?;
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes)
            .map_err(io::Error::from)
            .map_err(failed(&memory))?;
        Ok(bytes)
    }

    /// The header's name is what makes a segment exist.
    fn made(pool: &Pool, name: &str) -> Result<Self, PoolError> {
        let folder = File::open(pool.folder()).map_err(PoolError::io(pool.folder()))?;
        folder.sync_all().map_err(PoolError::io(pool.folder()))?;
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

    /// Removes what `owner` left of an allocation that ended between its two files: a header of its own, and no memory.
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn clear(pool: &Pool, name: &str, owner: &str) -> Result<(), PoolError> {
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

    /// Opens a segment that is there.
    ///
    /// # Errors
    /// [`PoolError`]: also when its header makes no sense.
    pub fn open(pool: &Pool, name: &str) -> Result<Self, PoolError> {
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
            memory,
            bytes,
            id,
            header,
        })
    }

    /// Its name: that of its machine.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that QEMU maps.
    pub fn memory(&self) -> &std::path::Path {
        &self.memory
    }

    /// Bytes of its memory.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What tells it from an earlier segment of its name, in hexadecimal.
    pub fn id(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Who owns it, by now.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn title(&self) -> Result<Title, PoolError> {
        self.header.title().map_err(|why| PoolError::Damaged {
            name: self.name.clone(),
            why,
        })
    }

    /// Ends the offer of epoch `offered` that `from` made, in favour of `to`. When that has been done already, it
    /// stays so.
    ///
    /// # Errors
    /// [`PoolError::Refused`] when `from` is not the owner, or the offer ended otherwise.
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
            return Ok(next);
        }
        let now = self.title()?.epoch;
        Err(refused(crate::ownership::Refused::Changed { now, offered }))
    }

    /// Removes the segment, which must be used by nobody any more.
    ///
    /// # Errors
    /// [`PoolError::Io`].
    pub fn remove(self, pool: &Pool) -> Result<(), PoolError> {
        // Without its header it does not exist, and what is left of it is overwritten.
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

/// Makes a file whose room is reserved.
fn create(path: &Path, bytes: u64) -> Result<File, PoolError> {
    // What is left of an allocation that did not end has no header.
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

/// What a node calls an allocation before it has the name: short, and the same after a crash, so that the next attempt
/// replaces what was left.
fn begun(name: &str, owner: &str) -> blake3::Hash {
    blake3::hash(format!("{name}\0{owner}").as_bytes())
}

/// Gives a file a name that no other has.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::{Arrival, Refused};

    fn pool() -> (tempfile::TempDir, Pool) {
        let folder = tempfile::tempdir().expect("a folder");
        let pool = Pool::open(folder.path()).expect("a pool");
        (folder, pool)
    }

    #[test]
    fn two_nodes_see_one_title_and_it_changes_once_an_epoch() {
        let (_folder, pool) = pool();
        let here = Segment::allocate(&pool, "v", 1 << 20, "a").expect("allocates");
        let there = Segment::open(&pool, "v").expect("opens");
        assert_eq!(there.id(), here.id());
        assert_eq!(there.bytes(), 1 << 20);
        here.decide("a", 1, "b").expect("gives");
        assert_eq!(
            there.title().expect("reads").arrival("b", 1),
            Arrival::Given
        );
        here.decide("a", 1, "b").expect("again changes nothing");
        for (from, offered, to) in [("a", 1, "a"), ("a", 2, "a"), ("b", 1, "b"), ("b", 3, "a")] {
            // The last but one is what has been done already.
            let decided = there.decide(from, offered, to);
            assert_eq!(decided.is_ok(), to == "b", "{from} {offered} {to}");
        }
        there.decide("b", 2, "a").expect("gives back");
        assert_eq!(here.title().expect("reads").epoch, 3);
    }

    #[test]
    fn names_and_room_are_not_given_twice() {
        let (_folder, pool) = pool();
        Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
        let again = Segment::allocate(&pool, "v", 4096, "b");
        assert!(matches!(again, Err(PoolError::Exists { owner, .. }) if owner == "a"));
        let free = pool.room().expect("is known").free;
        let huge = Segment::allocate(&pool, "w", (free / 4096 + 10) * 4096, "a");
        assert!(matches!(huge, Err(PoolError::Full { .. })));
        assert_eq!(pool.segments().expect("lists").len(), 1);
        let segment = Segment::open(&pool, "v").expect("opens");
        segment.remove(&pool).expect("removes");
        assert!(matches!(
            Segment::open(&pool, "v"),
            Err(PoolError::NoSegment(_))
        ));
        assert_eq!(std::fs::read_dir(pool.folder()).expect("lists").count(), 0);
    }

    #[test]
    fn nodes_that_allocate_one_name_at_once_get_one_segment() {
        let (_folder, pool) = pool();
        for _ in 0..50 {
            let nodes = ["a", "b", "c"];
            let made = std::thread::scope(|scope| {
                let pool = &pool;
                let begun = nodes
                    .map(|node| scope.spawn(move || Segment::allocate(pool, "v", 1 << 16, node)));
                begun.map(|thread| thread.join().expect("ends"))
            });
            let won: Vec<_> = nodes
                .iter()
                .zip(&made)
                .filter(|(_, made)| made.is_ok())
                .collect();
            let [(node, Ok(segment))] = won[..] else {
                panic!("{made:?}")
            };
            assert_eq!(segment.title().expect("reads"), Title::new(node));
            let files = std::fs::read_dir(pool.folder()).expect("lists").count();
            assert_eq!(files, 2, "nothing is left of the others'");
            let segment = Segment::open(&pool, "v").expect("opens");
            segment.remove(&pool).expect("removes");
        }
    }

    #[test]
    fn what_an_allocation_left_between_its_files_is_cleared_by_its_owner() {
        let (_folder, pool) = pool();
        Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
        Segment::clear(&pool, "v", "a").expect("looks");
        Segment::open(&pool, "v").expect("is whole");
        std::fs::remove_file(pool.memory_path("v")).expect("removes");
        Segment::clear(&pool, "v", "b").expect("looks");
        Segment::allocate(&pool, "v", 4096, "b").expect_err("is not b's");
        Segment::clear(&pool, "v", "a").expect("clears");
        Segment::allocate(&pool, "v", 4096, "b").expect("allocates");
    }

    #[test]
    fn a_file_that_somebody_uses_becomes_a_segment_once() {
        let (_folder, pool) = pool();
        let path = pool.memory_path("v");
        let missing = Segment::adopt(&pool, "v", "a");
        assert!(matches!(missing, Err(PoolError::Io { .. })), "{missing:?}");
        for (bytes, fits) in [(0, false), (5000, false), (1 << 20, true)] {
            let mut content = vec![0; bytes];
            content.iter_mut().take(8).for_each(|byte| *byte = 7);
            std::fs::write(&path, &content).expect("writes");
            let file = File::options().write(true).open(&path).expect("opens");
            // Half of it is a hole.
            file.set_len(bytes as u64 / 2).expect("shrinks");
            file.set_len(bytes as u64).expect("grows");
            assert_eq!(Segment::adopt(&pool, "v", "a").is_ok(), fits, "{bytes}");
        }
        let segment = Segment::open(&pool, "v").expect("opens");
        assert_eq!(segment.title().expect("reads"), Title::new("a"));
        let content = std::fs::read(&path).expect("reads");
        assert_eq!(content[..8], [7; 8], "it is as it was");
        let metadata = std::fs::metadata(&path).expect("is there");
        assert!(metadata.blocks() * 512 >= 1 << 20, "its room is reserved");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        let again = Segment::adopt(&pool, "v", "a").expect("is a's");
        assert_eq!(again.id(), segment.id());
        let other = Segment::adopt(&pool, "v", "b");
        assert!(matches!(other, Err(PoolError::Exists { owner, .. }) if owner == "a"));
    }

    #[test]
    fn a_file_that_was_made_again_below_a_header_gets_its_room_as_well() {
        let (_folder, pool) = pool();
        let path = pool.memory_path("v");
        let make = || {
            let _ = std::fs::remove_file(&path);
            let file = File::create(&path).expect("makes");
            file.set_len(1 << 20).expect("grows");
            file.set_permissions(std::fs::Permissions::from_mode(0o644))
                .expect("is for all to read");
        };
        make();
        let first = Segment::adopt(&pool, "v", "a").expect("is adopted");
        make();
        let again = Segment::adopt(&pool, "v", "a").expect("is a's");
        assert_eq!(again.id(), first.id());
        let metadata = std::fs::metadata(&path).expect("is there");
        assert!(metadata.blocks() * 512 >= 1 << 20, "its room is reserved");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let (_folder, pool) = pool();
        Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
        let path = pool.header_path("v");
        let good = std::fs::read(&path).expect("reads");
        let changed = |at: usize, value: u64| {
            let mut bytes = good.clone();
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
            bytes
        };
        for bad in [
            changed(0, 1),
            changed(1, 9),
            changed(2, 5000),
            changed(2, 0),
            changed(2, 8192),
            good[..100].to_vec(),
        ] {
            std::fs::write(&path, bad).expect("writes");
            Segment::open(&pool, "v").expect_err("makes no sense");
        }
        for slot in [0, 200, u64::MAX] {
            std::fs::write(&path, changed(48, slot)).expect("writes");
            let segment = Segment::open(&pool, "v").expect("opens");
            assert!(segment.title().is_err(), "{slot}");
        }
        let escape = u64::from_le_bytes(*b"\x1b[2Jabcd");
        std::fs::write(&path, changed(49, escape)).expect("writes");
        let segment = Segment::open(&pool, "v").expect("opens");
        assert!(segment.title().is_err(), "what a terminal obeys");
        std::fs::write(pool.header_path("w\n"), &good).expect("writes");
        assert_eq!(pool.segments().expect("lists"), ["v"]);
        for epoch in [0, u64::MAX] {
            std::fs::write(&path, changed(8, epoch)).expect("writes");
            let segment = Segment::open(&pool, "v").expect("opens");
            // Slots of even and odd epochs: neither says that the segment has an owner.
            assert!(segment.title().is_err(), "{epoch}");
            segment.decide("a", epoch, "b").expect_err("makes no sense");
        }
    }

    #[test]
    fn an_offer_that_ended_is_told_by_its_epoch() {
        let (_folder, pool) = pool();
        let segment = Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
        segment.decide("a", 1, "a").expect("keeps");
        let late = segment.decide("a", 1, "b").expect_err("decided");
        let PoolError::Refused { why, .. } = late else {
            panic!("{late}")
        };
        assert_eq!(why, Refused::Changed { now: 2, offered: 1 });
    }
}
