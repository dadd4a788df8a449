//! The allocated parts of a file.

use std::os::fd::BorrowedFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileExtent {
    /// End in bytes.
    pub(crate) end: u64,
    /// True if the part reads as zeroes and takes no space.
    pub(crate) hole: bool,
}

/// Returns the end of the hole at `start` of `file`, at most `end`. Returns `start` if there is no hole or none can be
/// found, as on a block device. In bytes; a byte that may be data is in no hole.
pub(crate) fn hole_end(file: BorrowedFd<'_>, start: u64, end: u64) -> u64 {
    match seek(file, SeekFrom::Data(start)) {
        Ok(data) => data.clamp(start, end),
        // No data follows, unless the file ends before: then nothing is known.
        Err(Errno::NXIO) => match seek(file, SeekFrom::End(0)) {
            Ok(length) if length >= end => end,
            _ => start,
        },
        Err(_) => start,
    }
}

/// Returns the part of `file` that begins at `start`, as far as `end`. Data wherever nothing is known, as on a block
/// device, and in every sector of which a byte may be data.
pub(crate) fn extent_at(file: BorrowedFd<'_>, start: u64, end: u64) -> FileExtent {
    const SECTOR: u64 = 512;
    let up_to = |end: u64, hole| FileExtent { end, hole };
    let data = hole_end(file, start, end);
    let data = data - data % SECTOR;
    if data > start {
        return up_to(data, true);
    }
    match seek(file, SeekFrom::Hole(start)) {
        Ok(hole) if hole > start => up_to(hole.next_multiple_of(SECTOR).min(end), false),
        // Nothing is known, or the data has just gone: no second search.
        _ => up_to(end, false),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn data_and_holes_are_told_apart() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("a length");
        file.write_all_at(&[1; 4096], 65536).expect("a write");
        let at = |start, end| extent_at(file.as_fd(), start, end);
        let (hole, data) = (true, false);
        assert_eq!(at(0, 1 << 20), FileExtent { end: 65536, hole });
        assert_eq!(at(0, 4096), FileExtent { end: 4096, hole });
        let found = at(65536, 1 << 20);
        assert!(!found.hole && found.end >= 65536 + 4096, "{found:?}");
        let behind = FileExtent { end: 1 << 20, hole };
        assert_eq!(at(found.end, 1 << 20), behind);
        let past = at(found.end, 2 << 20);
        assert_eq!(
            past,
            FileExtent {
                end: 2 << 20,
                hole: data
            }
        );
    }

    #[test]
    fn where_nothing_can_be_told_it_is_data() {
        let pipe = File::open("/dev/null").expect("a device");
        let found = extent_at(pipe.as_fd(), 0, 4096);
        assert!(!found.hole, "{found:?}");
    }
}
