//! Mappings of files by a process, from `/proc/PID/maps`.

use std::io::{self, Read, Seek};

/// A mapping of a part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address of the first byte in the process.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// The file's device, as major and minor number.
    pub device: (u32, u32),
    /// The file's inode number on the device.
    pub inode: u64,
}

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    /// The file's device, as major and minor number.
    pub device: (u32, u32),
    /// The file's inode number on the device.
    pub inode: u64,
}

impl File {
    /// Returns the identity of an open file.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn of(file: &std::fs::File) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = file.metadata()?;
        let device = metadata.dev();
        Ok(Self {
            device: (rustix::fs::major(device), rustix::fs::minor(device)),
            inode: metadata.ino(),
        })
    }
}

/// Returns all mappings of files by a process.
///
/// # Errors
/// If the process is gone, or belongs to another user.
pub fn of_process(pid: u32) -> io::Result<Vec<Mapping>> {
    read(&std::fs::File::open(format!("/proc/{pid}/maps"))?)
}

/// Returns the mappings from an open `/proc/PID/maps`, which never refers to another process, even if the number is
/// reused.
///
/// # Errors
/// If the system refuses, also because the process is gone.
pub fn read(mut maps: &std::fs::File) -> io::Result<Vec<Mapping>> {
    let mut text = String::new();
    maps.rewind()?;
    maps.read_to_string(&mut text)?;
    Ok(text.lines().filter_map(parse).collect())
}

/// Returns true if the mappings, ordered by address, leave no gap between two addresses.
pub fn cover(mappings: &[Mapping], start: u64, end: u64) -> bool {
    let covered = mappings.iter().fold(start, |to, mapping| {
        let touches = mapping.address <= to;
        let until = mapping.address.saturating_add(mapping.bytes);
        if touches { to.max(until) } else { to }
    });
    covered >= end
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (number(start)?, number(end)?);
    let offset = number(words.nth(1)?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = (
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
    let inode = words.next()?.parse().ok().filter(|inode| *inode > 0)?;
    Some(Mapping {
        address: start,
        bytes: end.checked_sub(start)?,
        offset,
        device,
        inode,
    })
}

/// The place of a guest's memory in a pool: a part of a file, or a whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// The file.
    pub file: File,
    /// Offset of the memory's first byte in the file.
    pub offset: u64,
    /// Bytes of the memory.
    pub bytes: u64,
}

/// The mapping of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Address of the memory's first byte.
    pub address: u64,
    /// Bytes from the start that are in another file, at its start, instead of at home.
    pub away: u64,
    /// The other file, if there is one.
    pub away_file: Option<File>,
}

/// Finds a guest's memory among the mappings of a process: a run whose first bytes are in another file and the rest at
/// home. Returns `None` if the memory is missing or in another order.
pub fn find(mappings: &[Mapping], home: Home, other: Option<File>) -> Option<Layout> {
    let Home {
        file: home,
        offset: first,
        bytes,
    } = home;
    let is = |mapping: &Mapping, file: File| {
        mapping.device == file.device && mapping.inode == file.inode
    };
    // Position of a mapping in the memory. Other parts of the home's file may belong to other guests.
    let place = |mapping: &Mapping| {
        if is(mapping, home) {
            mapping.offset.checked_sub(first).filter(|at| *at < bytes)
        } else {
            other
                .filter(|other| is(mapping, *other))
                .map(|_| mapping.offset)
        }
    };
    let known = |mapping: &&Mapping| place(mapping).is_some();
    // An agent of an earlier version maps the whole target for a while, as a run without any part of the home.
    let starts = mappings.iter().filter(|m| place(m) == Some(0));
    let layout = |start: &Mapping| {
        let (mut end, mut away, mut away_file) = (0, 0, None);
        while end < bytes {
            let at = start.address + end;
            let next = mappings.iter().filter(known).find(|m| m.address == at)?;
            let is_away = !is(next, home);
            // Only the start of the memory may be away.
            if place(next) != Some(end) || is_away && away != end {
                return None;
            }
            end += next.bytes;
            if is_away {
                away = end;
                away_file = other;
            }
        }
        (end == bytes).then_some(Layout {
            address: start.address,
            away,
            away_file,
        })
    };
    let found: Vec<Layout> = starts.filter_map(layout).collect();
    let mixed = found.iter().find(|layout| layout.away < bytes);
    mixed.or(found.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: File = File {
        device: (0, 0x1f),
        inode: 12,
    };

    /// Returns the home of this many bytes at the start of a file.
    fn whole(bytes: u64) -> Home {
        Home {
            file: HOME,
            offset: 0,
            bytes,
        }
    }

    const OTHER: File = File {
        device: (0, 1),
        inode: 1048,
    };

    fn mappings(text: &str) -> Vec<Mapping> {
        text.lines().filter_map(parse).collect()
    }

    #[test]
    fn memory_is_found_however_far_it_has_moved() {
        let before = mappings(
            "7f00-8f00 rw-s 00000000 00:1f 12 /dev/shm/p/v.memory\n\
             9000-9100 r--p 00000000 fe:00 77 /usr/bin/q\nstack\n",
        );
        let layout = find(&before, whole(0x1000), None).expect("is there");
        assert_eq!((layout.address, layout.away), (0x7f00, 0));
        assert_eq!(find(&before, whole(0x2000), None), None);
        let half = mappings(
            "7f00-8000 rw-s 00000000 00:01 1048 /memfd:m (deleted)\n\
             8000-8f00 rw-s 00000100 00:1f 12 /dev/shm/p/v.memory\n\
             a000-b000 rw-s 00000000 00:01 1048 /memfd:m (deleted)\n",
        );
        let layout = find(&half, whole(0x1000), Some(OTHER)).expect("is there");
        assert_eq!((layout.address, layout.away), (0x7f00, 0x100));
        assert_eq!(layout.away_file, Some(OTHER));
        let back =
            mappings("7f00-8000 rw-s 00000000 00:1f 12 x\n8000-8f00 rw-s 00000100 00:01 1048 y\n");
        assert_eq!(
            find(&back, whole(0x1000), Some(OTHER)),
            None,
            "the other way round"
        );
        let all = mappings("7f00-8f00 rw-s 00000000 00:01 1048 y\n");
        assert_eq!(
            find(&all, whole(0x1000), Some(OTHER)).expect("all").away,
            0x1000
        );
    }

    #[test]
    fn memory_that_is_a_part_of_a_file_is_found_beside_that_of_others() {
        let home = Home {
            file: HOME,
            offset: 0x3000,
            bytes: 0x1000,
        };
        // The pool's table, and another guest's memory before and after.
        let others = "1000-2000 rw-s 00000000 00:1f 12 /dev/shm/pool\n\
             2000-3000 rw-s 00002000 00:1f 12 /dev/shm/pool\n\
             3000-4000 rw-s 00004000 00:1f 12 /dev/shm/pool\n";
        assert_eq!(find(&mappings(others), home, None), None);
        let own = format!("{others}7f00-8f00 rw-s 00003000 00:1f 12 /dev/shm/pool\n");
        let layout = find(&mappings(&own), home, None).expect("is there");
        assert_eq!((layout.address, layout.away), (0x7f00, 0));
        let half = format!(
            "{others}7f00-8000 rw-s 00000000 00:01 1048 /memfd:m (deleted)\n\
             8000-8f00 rw-s 00003100 00:1f 12 /dev/shm/pool\n"
        );
        let layout = find(&mappings(&half), home, Some(OTHER)).expect("is there");
        assert_eq!((layout.address, layout.away), (0x7f00, 0x100));
        // A mapping at the right address with the wrong file offset is rejected.
        let wrong = half.replace("00003100", "00002100");
        assert_eq!(find(&mappings(&wrong), home, Some(OTHER)), None);
    }

    #[test]
    fn a_gap_is_seen_wherever_it_is() {
        let all = mappings("10-20 r 0 0:1 1 a\n20-30 r 0 0:1 2 b\n40-50 r 0 0:1 1 a\n");
        for (start, end, covered) in [
            (0x10, 0x30, true),
            (0x18, 0x28, true),
            (0x10, 0x31, false),
            (0x0f, 0x20, false),
            (0x18, 0x48, false),
            (0x30, 0x40, false),
            (0x40, 0x50, true),
        ] {
            assert_eq!(cover(&all, start, end), covered, "{start:x}-{end:x}");
        }
        assert!(!cover(&[], 0x10, 0x20));
    }

    #[test]
    fn odd_lines_are_left_out() {
        assert_eq!(mappings("x\n1-2\n1-2 r z 0:0 1\n2-1 rw-s 0 0:0 5\n\n"), []);
        let own = of_process(std::process::id()).expect("is readable");
        assert!(!own.is_empty());
    }
}
