//! Guest memory of which parts are in another file than the front end's: memory that is moved while the guest runs
//! (the zero-copy migration paper, section 4.2).
//!
//! The front end shares one file for all of a guest's memory, and goes on sharing it when chunks of the memory have
//! been remapped to another. So each mapping of that file here has the same chunks remapped, both those that exist
//! when a chunk moves and those that are made later, after a restart of either side. While chunks move nobody maps guest memory and no
//! device touches it: see [`Relocation`].

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use crate::memory::GuestRam;

/// A file, whoever opened it: its device and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Which file this is.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(match metadata.file_type().is_char_device() {
            // It may have several names, each with a number of its own.
            true => Self {
                device: u64::MAX,
                inode: metadata.rdev(),
            },
            false => Self {
                device: metadata.dev(),
                inode: metadata.ino(),
            },
        })
    }
}

/// A part of a file, or of a guest's memory: its first byte and its length, in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Of the first byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Part {
    const fn end(self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// What both have.
    fn common(self, other: Self) -> Option<Self> {
        let offset = self.offset.max(other.offset);
        let end = self.end().min(other.end());
        (offset < end).then(|| Self {
            offset,
            bytes: end - offset,
        })
    }
}

/// Where a guest's memory is that the front end shares: a file, or a part of one in which other guests' memory is as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Home {
    file: FileId,
    part: Part,
}

impl Home {
    /// A part of this file.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File, part: Part) -> io::Result<Self> {
        let file = FileId::of(file)?;
        Ok(Self { file, part })
    }

    /// Whether they share a part of a file.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.file == other.file && self.common(other.part).is_some()
    }

    /// What of it a part of its file is, as a part of the memory.
    fn common(self, part: Part) -> Option<Part> {
        let common = self.part.common(part)?;
        Some(Part {
            offset: common.offset - self.part.offset,
            bytes: common.bytes,
        })
    }
}

/// Adds a part to parts that do not touch each other, in order.
fn add(parts: &mut Vec<Part>, mut part: Part) {
    parts.retain(|other| {
        let apart = other.end() < part.offset || part.end() < other.offset;
        if !apart {
            let offset = part.offset.min(other.offset);
            let end = part.end().max(other.end());
            part = Part {
                offset,
                bytes: end - offset,
            };
        }
        apart
    });
    let at = parts.partition_point(|other| other.offset < part.offset);
    parts.insert(at, part);
}

/// Takes a part away from them.
fn remove(parts: &mut Vec<Part>, part: Part) {
    *parts = parts
        .iter()
        .flat_map(|&other| {
            let before = Part {
                offset: other.offset,
                bytes: part.offset.saturating_sub(other.offset).min(other.bytes),
            };
            let from = part.end().max(other.offset);
            let after = Part {
                offset: from,
                bytes: other.end().saturating_sub(from),
            };
            [before, after]
        })
        .filter(|part| part.bytes > 0)
        .collect();
}

/// The parts of a guest's memory that are elsewhere: at the same place of another file.
#[derive(Debug)]
struct Away {
    file: File,
    parts: Vec<Part>,
    /// Nobody knows which parts those are.
    is_lost: bool,
}

#[derive(Debug, Default)]
struct Relocated {
    guests: HashMap<Home, Away>,
    mapped: Vec<Weak<GuestRam>>,
}

/// What is relocated concerns all devices of the process: several disks map one guest's memory.
static RELOCATED: Mutex<Option<Relocated>> = Mutex::new(None);

/// Nobody else maps guest memory while this lives, and nothing else is relocated.
#[derive(Debug)]
pub struct Relocation(MutexGuard<'static, Option<Relocated>>);

impl Relocation {
    /// Waits until it is the only one.
    pub fn begin() -> Self {
        Self(RELOCATED.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn all(&mut self) -> &mut Relocated {
        self.0.get_or_insert_default()
    }

    /// From now on `away` is where parts of `home` can be; none is yet, or those that were are in `away` as well.
    pub fn set(&mut self, home: Home, away: File) {
        let away = Away {
            file: away,
            parts: Vec::new(),
            is_lost: false,
        };
        self.all().guests.insert(home, away);
    }

    /// Nobody knows any more what of `home` is elsewhere: it cannot be mapped until [`Self::found`] says so.
    pub fn lose(&mut self, home: Home) {
        if let Some(away) = self.all().guests.get_mut(&home) {
            away.is_lost = true;
        }
    }

    /// Whether that is so; nothing when no part of `home` was ever said to be elsewhere.
    pub fn is_lost(&self, home: Home) -> Option<bool> {
        let all = self.0.as_ref();
        all.and_then(|all| all.guests.get(&home))
            .map(|away| away.is_lost)
    }

    /// The first `away` bytes of `home`, which is in `file`, are elsewhere, and nothing else of it is.
    ///
    /// # Errors
    /// As [`Self::moved`].
    pub fn found(&mut self, home: Home, file: &File, away: u64) -> io::Result<()> {
        let rest = Part {
            offset: away,
            bytes: home.part.bytes.saturating_sub(away),
        };
        let first = Part {
            offset: 0,
            bytes: away,
        };
        for (part, is_away) in [(first, true), (rest, false)] {
            if part.bytes > 0 {
                self.moved(home, file, part, is_away)?;
            }
        }
        if let Some(away) = self.all().guests.get_mut(&home) {
            away.is_lost = false;
        }
        Ok(())
    }

    /// Nothing of `home` is elsewhere any more, nor of what other memory had a part of it before.
    pub fn forget(&mut self, home: Home) {
        self.all().guests.retain(|other, _| !other.overlaps(home));
    }

    /// A part of `home`'s memory has moved away, or back into `file`. The devices that map it must stand still, because each
    /// mapping changes at once and not together with what they do.
    ///
    /// # Errors
    /// The kernel's; a mapping may be as it was then, and its device must go on standing still.
    pub fn moved(&mut self, home: Home, file: &File, part: Part, is_away: bool) -> io::Result<()> {
        let Relocated { guests, mapped } = self.all();
        let away = guests
            .get_mut(&home)
            .ok_or_else(|| io::Error::other("nothing says where the memory goes"))?;
        match is_away {
            true => add(&mut away.parts, part),
            false => remove(&mut away.parts, part),
        }
        let target = match is_away {
            true => (&away.file, 0),
            false => (file, home.part.offset),
        };
        mapped.retain(|ram| ram.strong_count() > 0);
        for ram in mapped.iter().filter_map(Weak::upgrade) {
            ram.remap(home, part, target)?;
        }
        Ok(())
    }

    /// Puts the parts that are elsewhere into memory that was mapped just now, which follows what moves from now on.
    pub(crate) fn follow(&mut self, ram: &std::sync::Arc<GuestRam>) -> io::Result<()> {
        let all = self.all();
        for (home, away) in &all.guests {
            if away.is_lost && ram.maps(*home) {
                return Err(io::Error::other("nobody knows where parts of it are"));
            }
            for part in &away.parts {
                ram.remap(*home, *part, (&away.file, 0))?;
            }
        }
        all.mapped.retain(|ram| ram.strong_count() > 0);
        all.mapped.push(std::sync::Arc::downgrade(ram));
        Ok(())
    }
}

/// Where a region's file is mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapped {
    pub(crate) file: FileId,
    /// What of the file is mapped.
    pub(crate) part: Part,
    /// The address of its first byte in this process.
    pub(crate) here: u64,
}

impl Mapped {
    /// Whether it has a part of this memory.
    pub(crate) fn is_of(&self, home: Home) -> bool {
        self.file == home.file && home.common(self.part).is_some()
    }

    /// Maps a part of this memory from `target` instead, a file and where in it the memory begins.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn remap(
        &self,
        home: Home,
        part: Part,
        (target, start): (&File, u64),
    ) -> io::Result<()> {
        let here = home.common(self.part).filter(|_| self.file == home.file);
        let Some(common) = here.and_then(|here| here.common(part)) else {
            return Ok(());
        };
        let at = self.here + (home.part.offset + common.offset - self.part.offset);
        // SAFETY: the range lies in a mapping of the memory's owner, which stays mapped: its bytes are guest memory,
        // to which no references exist, and which others change at any time.
        let mapped = unsafe {
            libc::mmap(
                at as *mut libc::c_void,
                common.bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
                target.as_raw_fd(),
                (start + common.offset) as libc::off_t,
            )
        };
        match mapped {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use vhost::vhost_user::message::VhostUserMemoryRegion;

    use super::*;
    use crate::memory::Segment;
    use crate::memory::post_copy::Arrival;

    const PAGE: u64 = 4096;

    fn part(first: u64, pages: u64) -> Part {
        Part {
            offset: first * PAGE,
            bytes: pages * PAGE,
        }
    }

    #[test]
    fn parts_are_joined_and_cut() {
        let mut parts = Vec::new();
        for (first, pages) in [(4, 2), (0, 1), (1, 1), (9, 1)] {
            add(&mut parts, part(first, pages));
        }
        assert_eq!(parts, [part(0, 2), part(4, 2), part(9, 1)]);
        add(&mut parts, part(2, 2));
        assert_eq!(parts, [part(0, 6), part(9, 1)]);
        remove(&mut parts, part(2, 1));
        assert_eq!(parts, [part(0, 2), part(3, 3), part(9, 1)]);
        remove(&mut parts, part(0, 20));
        assert_eq!(parts, []);
    }

    /// All of a file.
    fn whole(file: &File) -> Home {
        Home::of(file, part(0, 8)).expect("a file")
    }

    fn file(byte: u8) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&[byte; 8 * PAGE as usize], 0)
            .expect("writes");
        file
    }

    fn ram(home: &File) -> Arc<GuestRam> {
        let region = VhostUserMemoryRegion::new(0x10_0000, 6 * PAGE, 0x7000_0000, 2 * PAGE);
        let files = vec![home.try_clone().expect("another")];
        let ram = GuestRam::new(&[region], files, Arc::new(Arrival::default())).expect("maps");
        Arc::new(ram)
    }

    /// Waited for by whoever gives a part of a device to another guest.
    #[test]
    fn memory_is_mapped_until_the_last_device_has_let_go_of_it() {
        let home = file(1);
        // The region is the file's third to eighth page.
        let [before, within, beyond] = [part(0, 2), part(1, 2), part(8, 4)].map(|of| {
            let home = Home::of(&home, of).expect("a file");
            move || crate::memory::live::is_mapped(home)
        });
        assert!(!within());
        let first = map(&home);
        // A request that has not ended.
        let request = Arc::clone(&first);
        let second = map(&home);
        assert!(within() && !before() && !beyond());
        drop((first, second));
        assert!(within(), "a request may still write there");
        drop(request);
        assert!(!within());
    }

    #[test]
    fn what_had_a_part_of_forgotten_memory_is_forgotten_with_it() {
        let (home, away) = (file(1), file(2));
        let mut relocation = Relocation::begin();
        // An earlier guest had other pages, of which some are the next one's.
        let [earlier, beside] =
            [part(2, 4), part(6, 2)].map(|of| Home::of(&home, of).expect("one"));
        for of in [earlier, beside] {
            relocation.set(of, away.try_clone().expect("another"));
            relocation
                .moved(of, &home, part(0, 1), true)
                .expect("moves");
        }
        relocation.lose(earlier);
        let next = Home::of(&home, part(4, 2)).expect("one");
        relocation.forget(next);
        drop(relocation);
        assert_eq!(seen(&map(&home)), [1, 1, 1, 1, 2, 1]);
        Relocation::begin().forget(beside);
    }

    fn map(home: &File) -> Arc<GuestRam> {
        let mut relocation = Relocation::begin();
        let ram = ram(home);
        relocation.follow(&ram).expect("follows");
        ram
    }

    /// The first byte of each page of the region, which begins at the file's third page.
    fn seen(ram: &GuestRam) -> Vec<u8> {
        let byte = |page: u64| {
            let mut byte = [0];
            let segment = Segment {
                address: 0x10_0000 + page * PAGE,
                length: 1,
            };
            assert!(ram.gather(&[segment], &mut byte));
            byte[0]
        };
        (0..6).map(byte).collect()
    }

    #[test]
    fn mappings_before_and_after_a_move_see_the_same() {
        let (home, away) = (file(1), file(2));
        let before = map(&home);
        let mut relocation = Relocation::begin();
        relocation.set(whole(&home), away.try_clone().expect("another"));
        relocation
            .moved(whole(&home), &home, part(0, 4), true)
            .expect("moves");
        drop(relocation);
        let after = map(&home);
        let other = map(&file(3));
        assert_eq!(seen(&before), [2, 2, 1, 1, 1, 1]);
        assert_eq!(seen(&after), seen(&before));
        assert_eq!(seen(&other), [3; 6], "another guest's");
        let mut relocation = Relocation::begin();
        relocation
            .moved(whole(&home), &home, part(3, 2), false)
            .expect("moves back");
        relocation
            .moved(whole(&home), &home, part(7, 1), true)
            .expect("moves");
        drop(relocation);
        for ram in [&before, &after, &map(&home)] {
            assert_eq!(seen(ram), [2, 1, 1, 1, 1, 2]);
        }
        let mut relocation = Relocation::begin();
        relocation.lose(whole(&home));
        let unknown = ram(&home);
        relocation.follow(&unknown).expect_err("nobody knows");
        relocation.follow(&ram(&file(3))).expect("another guest's");
        relocation
            .found(whole(&home), &home, 3 * PAGE)
            .expect("is found");
        drop(relocation);
        for ram in [before, after, map(&home)] {
            assert_eq!(seen(&ram), [2, 1, 1, 1, 1, 1]);
        }
        Relocation::begin().forget(whole(&home));
        assert_eq!(seen(&map(&home)), [1; 6]);
    }

    /// Two guests have memory in one file: the first four of its pages, and the rest.
    #[test]
    fn memory_in_a_part_of_a_file_moves_without_its_neighbour_s() {
        let (home, away) = (file(1), file(2));
        let [first, second] = [part(0, 4), part(4, 4)].map(|of| Home::of(&home, of).expect("one"));
        let other = file(3);
        let before = map(&home);
        let mut relocation = Relocation::begin();
        relocation.set(second, away.try_clone().expect("another"));
        relocation.set(first, other.try_clone().expect("another"));
        // The second guest's first page, which is the file's fifth.
        away.write_all_at(&[7; PAGE as usize], 0).expect("writes");
        relocation
            .moved(second, &home, part(0, 2), true)
            .expect("moves");
        drop(relocation);
        for ram in [&before, &map(&home)] {
            assert_eq!(seen(ram), [1, 1, 7, 2, 1, 1]);
        }
        let mut relocation = Relocation::begin();
        relocation
            .moved(first, &home, part(3, 1), true)
            .expect("moves");
        relocation
            .moved(second, &home, part(0, 1), false)
            .expect("moves back");
        relocation.lose(first);
        relocation.follow(&ram(&home)).expect_err("nobody knows");
        relocation.found(first, &home, 0).expect("is found");
        drop(relocation);
        for ram in [before, map(&home)] {
            assert_eq!(seen(&ram), [1, 1, 1, 2, 1, 1]);
        }
        for guest in [first, second] {
            Relocation::begin().forget(guest);
        }
    }
}
