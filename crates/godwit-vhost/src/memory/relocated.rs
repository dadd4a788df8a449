//! Guest memory with parts in another file than the front end's: memory that is moved while the guest runs (the
//! zero-copy migration paper, section 4.2).
//!
//! The front end shares a single file for all of a guest's memory, and goes on sharing the file after chunks of the
//! memory have been remapped to another. So each mapping of the file here has the same chunks remapped: mappings that
//! exist when a chunk moves, and later ones, after a restart of either side. While chunks move, no guest memory is
//! mapped and no device touches it: see [`Relocation`].

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::memory::region::Region;

/// The identity of a file, by whatever name opened: device and number on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Returns the identity of a file.
    ///
    /// # Errors
    /// The error of the system.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::in_metadata(&file.metadata()?))
    }

    /// Returns the identity of the file with this metadata.
    pub(crate) fn in_metadata(metadata: &Metadata) -> Self {
        match metadata.file_type().is_char_device() {
            // A device may have several names, each with an inode of its own.
            true => Self {
                device: u64::MAX,
                inode: metadata.rdev(),
            },
            false => Self {
                device: metadata.dev(),
                inode: metadata.ino(),
            },
        }
    }
}

/// A part of a file, or of a guest's memory: offset and length, in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Part {
    const fn end(self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// Returns the intersection.
    pub(super) fn common(self, other: Self) -> Option<Self> {
        let offset = self.offset.max(other.offset);
        let end = self.end().min(other.end());
        (offset < end).then(|| Self {
            offset,
            bytes: end - offset,
        })
    }
}

/// The home of a guest's memory that the front end shares: a file, or a part of a file with other guests' memory
/// beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Home {
    file: FileId,
    part: Part,
}

impl Home {
    /// Returns a part of this file as a home.
    ///
    /// # Errors
    /// The error of the system.
    pub fn of(file: &File, part: Part) -> io::Result<Self> {
        let file = FileId::of(file)?;
        Ok(Self { file, part })
    }

    /// Returns true if both share a part of a file.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.file == other.file && self.common(other.part).is_some()
    }

    /// Returns the intersection with a part of the file, as a part of the memory.
    fn common(self, part: Part) -> Option<Part> {
        let common = self.part.common(part)?;
        Some(Part {
            offset: common.offset - self.part.offset,
            bytes: common.bytes,
        })
    }
}

/// Adds a part to separate parts, in order.
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

/// Removes a part from the parts.
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

/// The parts of a guest's memory that are away: at the same offset of another file.
#[derive(Debug)]
struct Away {
    file: File,
    parts: Vec<Part>,
    /// True if `parts` is not known to be right.
    is_lost: bool,
}

#[derive(Debug, Default)]
struct Relocated {
    guests: HashMap<Home, Away>,
    mapped: Vec<Weak<Region>>,
}

/// Relocations concern all devices of the process: several disks map a guest's memory.
static RELOCATED: Mutex<Option<Relocated>> = Mutex::new(None);

/// The exclusive right to map guest memory and to relocate it.
#[derive(Debug)]
pub struct Relocation(MutexGuard<'static, Option<Relocated>>);

impl Relocation {
    /// Waits for the exclusive right.
    pub fn begin() -> Self {
        Self(RELOCATED.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn all(&mut self) -> &mut Relocated {
        self.0.get_or_insert_default()
    }

    /// Sets `away` as the file for relocated parts of `home`. No part may be away yet, unless `away` holds it as well.
    pub fn set(&mut self, home: Home, away: File) {
        let away = Away {
            file: away,
            parts: Vec::new(),
            is_lost: false,
        };
        self.all().guests.insert(home, away);
    }

    /// Marks the relocated parts of `home` as unknown: `home` cannot be mapped until [`Self::found`].
    pub fn lose(&mut self, home: Home) {
        if let Some(away) = self.all().guests.get_mut(&home) {
            away.is_lost = true;
        }
    }

    /// Returns true if the relocated parts of `home` are unknown; `None` without a [`Self::set`] for `home`.
    pub fn is_lost(&self, home: Home) -> Option<bool> {
        let all = self.0.as_ref();
        all.and_then(|all| all.guests.get(&home))
            .map(|away| away.is_lost)
    }

    /// Records that the first `away` bytes of `home` (in `file`) are away, and no other part.
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

    /// Forgets the relocations of `home`, and of all homes that overlap `home`.
    pub fn forget(&mut self, home: Home) {
        self.all().guests.retain(|other, _| !other.overlaps(home));
    }

    /// Moves a part of `home`'s memory away, or back into `file`. Devices that map `home` must stand still: each
    /// mapping changes at once, and not together with the devices' accesses.
    ///
    /// # Errors
    /// The error of the kernel. A mapping may be unchanged, and its device must go on standing still.
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
        mapped.retain(|region| region.strong_count() > 0);
        let mut regions = mapped.iter().filter_map(Weak::upgrade);
        regions.try_for_each(|region| region.remap(home, part, target))
    }

    /// Remaps the relocated parts of mapped memory. The memory follows all later moves.
    pub(crate) fn follow(&mut self, regions: &[Arc<Region>]) -> io::Result<()> {
        let all = self.all();
        for region in regions {
            for (home, away) in &all.guests {
                if away.is_lost && region.is_of(*home) {
                    return Err(io::Error::other("nobody knows where parts of it are"));
                }
                for part in &away.parts {
                    region.remap(*home, *part, (&away.file, 0))?;
                }
            }
        }
        let is_new = |known: &Weak<Region>| {
            let mut regions = regions.iter();
            regions.all(|region| known.as_ptr() != Arc::as_ptr(region))
        };
        let known = &mut all.mapped;
        known.retain(|known| known.strong_count() > 0 && is_new(known));
        known.extend(regions.iter().map(Arc::downgrade));
        Ok(())
    }
}

/// The mapping of a region's file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapped {
    pub(crate) file: FileId,
    /// Part of the file that is mapped.
    pub(crate) part: Part,
    /// Address of the part's first byte in this process.
    pub(crate) here: u64,
}

impl Mapped {
    /// Returns true if the mapping has a part of this memory.
    pub(crate) fn is_of(&self, home: Home) -> bool {
        self.file == home.file && home.common(self.part).is_some()
    }

    /// Maps a part of this memory from `target` instead: a file, and the beginning of the memory in the file.
    ///
    /// # Errors
    /// The error of the kernel.
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
        // without references in this process, and change at any time.
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

    use vhost::vhost_user::message::VhostUserMemoryRegion;

    use super::*;
    use crate::memory::post_copy::Arrival;
    use crate::memory::{GuestRam, Segment};

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

    /// The reassignment of a part of a device to another guest waits for this.
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
        // An earlier guest had other pages, some of which belong to the next guest.
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
        relocation.follow(ram.regions()).expect("follows");
        ram
    }

    /// Returns the first byte of each page of the region, which begins at the file's third page.
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
        relocation
            .follow(unknown.regions())
            .expect_err("nobody knows");
        relocation
            .follow(ram(&file(3)).regions())
            .expect("another guest's");
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

    /// Two guests have memory in a single file: the first four of its pages, and the rest.
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
        relocation
            .follow(ram(&home).regions())
            .expect_err("nobody knows");
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
