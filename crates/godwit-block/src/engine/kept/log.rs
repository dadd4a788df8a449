//! A file without a name for data that waits, in segments that are filled one after the other and used again.
//!
//! The data is in the page cache, so short waits cost no I/O, and the kernel can write long ones out.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use godwit_io::page_buffers::{Mapping, SMALLEST};
use rustix::fs::{FallocateFlags, Mode, OFlags};

/// Sizes of a log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Bytes of a segment: whole pages, at least as many as the longest data.
    pub(super) segment: usize,
    /// Most segments.
    pub(super) segments: usize,
}

/// The place of data in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    segment: u32,
    /// Offset in the segment, a multiple of the page size.
    offset: u32,
}

#[derive(Debug)]
pub(super) struct Log {
    folder: PathBuf,
    shape: Shape,
    file: Option<File>,
    /// The segments, mapped.
    segments: Vec<Rc<Mapping>>,
    /// Segments with data, oldest first. The last one is being filled.
    used: VecDeque<u32>,
    free: Vec<u32>,
    /// Filled bytes of the last used segment.
    filled: usize,
}

impl Log {
    /// Returns an empty log, whose file will be in this folder.
    pub(super) const fn new(folder: PathBuf, shape: Shape) -> Self {
        Self {
            folder,
            shape,
            file: None,
            segments: Vec::new(),
            used: VecDeque::new(),
            free: Vec::new(),
            filled: 0,
        }
    }

    /// Returns an empty log of the same kind.
    pub(super) fn emptied(&self) -> Self {
        Self::new(self.folder.clone(), self.shape)
    }

    /// Stores data behind all earlier data.
    pub(super) fn append(&mut self, data: &[u8]) -> io::Result<Place> {
        let length = data.len().next_multiple_of(SMALLEST);
        if self.used.is_empty() || self.filled + length > self.shape.segment {
            let next = match self.free.pop() {
                Some(free) => free,
                None => self.grow()?,
            };
            self.used.push_back(next);
            self.filled = 0;
        }
        let (Some(file), Some(&segment)) = (&self.file, self.used.back()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let offset = self.filled;
        file.write_all_at(data, self.start(segment as usize) + offset as u64)?;
        self.filled += length;
        Ok(Place {
            segment,
            offset: offset as u32,
        })
    }

    /// Returns the address of data, and the memory that holds it, which this thread does not touch: what the kernel
    /// cannot read back would end the process.
    pub(super) fn at(&self, place: Place) -> (*mut u8, Rc<Mapping>) {
        let memory = Rc::clone(&self.segments[place.segment as usize]);
        (memory.at(place.offset as usize), memory)
    }

    /// Frees the segments before the oldest data in use, or all of them if none is.
    pub(super) fn free_before(&mut self, oldest: Option<Place>) {
        let filling = self.used.back().copied();
        let keep = oldest.map(|place| place.segment).or(filling);
        while let Some(&first) = self.used.front()
            && Some(first) != keep
        {
            self.used.pop_front();
            self.free.push(first);
        }
        if oldest.is_none() {
            self.filled = 0;
        }
    }

    /// Adds a segment, with its space set aside: no write finds the file system full later.
    fn grow(&mut self) -> io::Result<u32> {
        let number = self.segments.len();
        if number >= self.shape.segments {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(nameless(&self.folder)?),
        };
        let (start, length) = (number * self.shape.segment, self.shape.segment);
        let all = FallocateFlags::empty();
        rustix::fs::fallocate(&*file, all, start as u64, length as u64)?;
        let memory = Mapping::of_file(file.as_fd(), start as u64, length)?;
        self.segments.push(Rc::new(memory));
        Ok(number as u32)
    }

    const fn start(&self, segment: usize) -> u64 {
        segment as u64 * self.shape.segment as u64
    }
}

/// Creates a file without a name.
fn nameless(folder: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags | OFlags::TMPFILE, mode) {
        Ok(file) => Ok(file.into()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
            let mut unique = [0; 8];
            rustix::rand::getrandom(&mut unique, rustix::rand::GetRandomFlags::empty())?;
            let path = folder.join(format!(".kept-{:x}", u64::from_ne_bytes(unique)));
            let exclusive = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            let file = rustix::fs::open(&path, exclusive, mode)?;
            rustix::fs::unlink(&path)?;
            Ok(file.into())
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        segment: 4 * SMALLEST,
        segments: 3,
    };

    fn log(folder: &tempfile::TempDir) -> Log {
        Log::new(folder.path().to_owned(), SHAPE)
    }

    fn holds(log: &Log, place: Place, data: &[u8]) -> bool {
        let (pointer, _memory) = log.at(place);
        assert!(pointer.addr().is_multiple_of(SMALLEST));
        // SAFETY: the mapping lives, is as long, and nothing writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(pointer, data.len()) == data }
    }

    #[test]
    fn data_stays_as_it_is_until_it_is_freed_and_its_place_is_used_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut log = log(&folder);
        let mut kept = VecDeque::new();
        for round in 0..100_u8 {
            let data = vec![round; 1 + usize::from(round) * 150 % (2 * SMALLEST)];
            kept.push_back((log.append(&data).expect("room"), data));
            for (place, data) in &kept {
                assert!(holds(&log, *place, data), "round {round}");
            }
            if kept.len() > 3 {
                kept.pop_front();
                log.free_before(kept.front().map(|(place, _)| *place));
            }
        }
        let file = log.file.as_ref().expect("a file");
        let length = file.metadata().expect("a length").len();
        assert_eq!(length as usize, SHAPE.segments * SHAPE.segment);
        let mut left = std::fs::read_dir(folder.path()).expect("a folder");
        assert!(left.next().is_none(), "the file has no name");
    }

    #[test]
    fn a_full_log_takes_nothing_more_until_something_is_freed() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut log = log(&folder);
        let data = vec![7; 3 * SMALLEST];
        let first = log.append(&data).expect("room");
        let second = log.append(&data).expect("room");
        log.append(&data).expect("room");
        let full = log.append(&data).expect_err("it is full");
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        log.append(&data[..SMALLEST]).expect("room for less");
        log.free_before(Some(second));
        assert_eq!(log.append(&data).expect("room").segment, first.segment);
        log.free_before(None);
        let again = log.append(&data).expect("room");
        assert_eq!((again.offset, log.used.len()), (0, 1));
    }

    #[test]
    fn a_folder_that_takes_no_file_is_an_error() {
        let mut log = Log::new(PathBuf::from("/proc/self"), SHAPE);
        assert!(log.append(&[7]).is_err());
    }
}
