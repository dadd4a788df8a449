//! A ring's requests in flight, recorded in memory that outlives this process.
//!
//! The front end keeps the memory and hands it to the next server of the disk. The next server finds requests taken and
//! not answered there and repeats them. A repetition is harmless, because no answer was given. The layout is the
//! vhost-user specification's for split rings: for each ring a header, then an entry for each descriptor.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use godwit_memory::mapping::SharedMapping;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::memory::{MemoryError, map_file};

const VERSION: u16 = 1;
const HEADER: usize = 16;
const ENTRY: usize = 16;
const ALIGNMENT: usize = 64;

/// Returns the bytes for a ring of `size` descriptors.
const fn stride(size: u16) -> usize {
    (HEADER + ENTRY * size as usize).next_multiple_of(ALIGNMENT)
}

/// The reason for refusing the memory.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// The memory is shorter than the rings need.
    #[error("the memory for requests in flight has {0} bytes, too few for its rings")]
    Short(u64),
    /// The memory was made for rings of another size.
    #[error("the memory for requests in flight says that the ring has {0} descriptors")]
    Size(u16),
    /// The content makes no sense.
    #[error("the memory for requests in flight is damaged")]
    Damaged,
    /// The memory cannot be mapped.
    #[error(transparent)]
    Map(#[from] MemoryError),
}

/// The memory of all rings.
pub struct InflightArea {
    memory: SharedMapping,
    rings: u16,
    size: u16,
}

impl InflightArea {
    /// Returns a new file for `rings` rings of `size` descriptors each, and its length in bytes. The file is sealed
    /// against a change of length.
    pub fn create(rings: u16, size: u16) -> std::io::Result<(File, u64)> {
        let length = (stride(size) * usize::from(rings)) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create(c"vhost-inflight", flags)?);
        file.set_len(length)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok((file, length))
    }

    /// Maps the memory that the front end kept.
    pub fn open(
        file: File,
        offset: u64,
        length: u64,
        rings: u16,
        size: u16,
    ) -> Result<Self, InflightError> {
        if length < (stride(size) * usize::from(rings)) as u64 {
            return Err(InflightError::Short(length));
        }
        Ok(Self {
            memory: map_file(&file, offset, length)?,
            rings,
            size,
        })
    }
}

/// The memory of a single ring.
pub struct InflightRing {
    area: Arc<InflightArea>,
    start: usize,
    size: u16,
    counter: u64,
}

impl InflightRing {
    /// Opens the part of ring `index`, which has `size` descriptors and `used` answered requests. Also returns the
    /// unanswered requests, in the order of taking.
    pub fn open(
        area: Arc<InflightArea>,
        index: u16,
        size: u16,
        used: u16,
    ) -> Result<(Self, Vec<u16>), InflightError> {
        if index >= area.rings || size > area.size {
            return Err(InflightError::Size(area.size));
        }
        let mut ring = Self {
            start: stride(area.size) * usize::from(index),
            area,
            size,
            counter: 0,
        };
        if ring.version().load(Ordering::Acquire) == 0 {
            ring.descriptors().store(size, Ordering::Relaxed);
            ring.used().store(used, Ordering::Relaxed);
            ring.version().store(VERSION, Ordering::Release);
        }
        let known = ring.descriptors().load(Ordering::Relaxed);
        if known == 0 {
            ring.descriptors().store(size, Ordering::Relaxed);
        } else if known != size && known != ring.area.size {
            return Err(InflightError::Size(known));
        }
        ring.forget_answered(used)?;
        let mut found: Vec<(u64, u16)> = (0..size)
            .filter(|&head| ring.flag(head).load(Ordering::Acquire) != 0)
            .map(|head| (ring.order(head).load(Ordering::Relaxed), head))
            .collect();
        found.sort_unstable();
        ring.counter = found
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok((ring, found.into_iter().map(|(_, head)| head).collect()))
    }

    /// Returns true if the file does not back all of the memory any more.
    pub fn has_lost_pages(&self) -> bool {
        self.area.memory.has_lost_pages()
    }

    /// Completes the steps [`Self::link`] and [`Self::answered`] if the last server ended in between.
    fn forget_answered(&self, used: u16) -> Result<(), InflightError> {
        let behind = used.wrapping_sub(self.used().load(Ordering::Acquire));
        if behind > self.size {
            // The memory is older than the ring's present life, which began with nothing in flight.
            let mut flags = (0..self.size).map(|head| self.flag(head).load(Ordering::Acquire));
            if flags.any(|flag| flag != 0) {
                return Err(InflightError::Damaged);
            }
            self.used().store(used, Ordering::Release);
            return Ok(());
        }
        let mut head = self.last().load(Ordering::Acquire);
        for _ in 0..behind {
            if head >= self.size {
                return Err(InflightError::Damaged);
            }
            self.flag(head).store(0, Ordering::Release);
            head = self.next(head).load(Ordering::Acquire);
        }
        self.used().store(used, Ordering::Release);
        Ok(())
    }

    /// Records the request at `head` as taken from the ring.
    pub fn taken(&mut self, head: u16) {
        self.order(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.flag(head).store(1, Ordering::Release);
    }

    /// Records that the next update of the used index answers the request at `head`.
    pub fn link(&self, head: u16) {
        let last = self.last().load(Ordering::Relaxed);
        self.next(head).store(last, Ordering::Relaxed);
        self.last().store(head, Ordering::Release);
    }

    /// Records the requests as answered, with `used` as the used index.
    pub fn answered(&self, heads: impl Iterator<Item = u16>, used: u16) {
        for head in heads {
            self.flag(head).store(0, Ordering::Release);
        }
        self.used().store(used, Ordering::Release);
    }

    fn at(&self, offset: usize) -> *mut u8 {
        let offset = self.start + offset;
        assert!(offset + 8 <= self.area.memory.bytes(), "within the area");
        // SAFETY: the assertion keeps the address within the mapping.
        unsafe { self.area.memory.as_ptr().add(offset) }
    }

    fn short(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: within the mapping, which lives as long as `self`; rings start at multiples of 64 and fields at
        // multiples of their size; all access is atomic.
        unsafe { AtomicU16::from_ptr(self.at(offset).cast()) }
    }

    fn version(&self) -> &AtomicU16 {
        self.short(8)
    }

    fn descriptors(&self) -> &AtomicU16 {
        self.short(10)
    }

    fn last(&self) -> &AtomicU16 {
        self.short(12)
    }

    fn used(&self) -> &AtomicU16 {
        self.short(14)
    }

    fn entry(&self, head: u16) -> usize {
        assert!(head < self.size, "a descriptor of this ring");
        HEADER + ENTRY * usize::from(head)
    }

    fn flag(&self, head: u16) -> &AtomicU8 {
        // SAFETY: as in `short`.
        unsafe { AtomicU8::from_ptr(self.at(self.entry(head))) }
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        self.short(self.entry(head) + 6)
    }

    fn order(&self, head: u16) -> &AtomicU64 {
        // SAFETY: as in `short`.
        unsafe { AtomicU64::from_ptr(self.at(self.entry(head) + 8).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area() -> (Arc<InflightArea>, File) {
        let (file, length) = InflightArea::create(2, 8).expect("a file");
        let kept = file.try_clone().expect("the same file");
        let area = InflightArea::open(file, 0, length, 2, 8).expect("an area");
        (Arc::new(area), kept)
    }

    #[test]
    fn what_was_not_answered_is_found_in_order() {
        let (area, _file) = area();
        let (mut ring, found) = InflightRing::open(Arc::clone(&area), 1, 8, 5).expect("a ring");
        assert!(found.is_empty());
        for head in [3, 0, 7, 2] {
            ring.taken(head);
        }
        ring.link(0);
        ring.answered([0].into_iter(), 6);
        drop(ring);
        let (mut ring, found) = InflightRing::open(Arc::clone(&area), 1, 8, 6).expect("a ring");
        assert_eq!(found, [3, 7, 2]);
        ring.taken(0);
        drop(ring);
        let (_, found) = InflightRing::open(Arc::clone(&area), 1, 8, 6).expect("a ring");
        assert_eq!(found, [3, 7, 2, 0], "new ones come after old ones");
        let (_, found) = InflightRing::open(area, 0, 8, 0).expect("the other ring");
        assert!(found.is_empty());
    }

    #[test]
    fn a_batch_whose_used_index_was_stored_is_not_done_again() {
        let (area, _file) = area();
        let (mut ring, _) = InflightRing::open(Arc::clone(&area), 0, 8, 0).expect("a ring");
        for head in [1, 2, 3] {
            ring.taken(head);
        }
        ring.link(1);
        ring.link(3);
        drop(ring);
        let (ring, found) = InflightRing::open(Arc::clone(&area), 0, 8, 0).expect("a ring");
        assert_eq!(found, [1, 2, 3], "the used index was not stored");
        drop(ring);
        let (_, found) = InflightRing::open(area, 0, 8, 2).expect("a ring");
        assert_eq!(found, [2], "the used index was stored");
    }

    #[test]
    fn damage_is_an_error() {
        let (area, _file) = area();
        let (mut ring, _) = InflightRing::open(Arc::clone(&area), 0, 8, 0).expect("a ring");
        ring.taken(1);
        ring.last().store(60_000, Ordering::Relaxed);
        assert!(matches!(
            InflightRing::open(Arc::clone(&area), 0, 8, 1),
            Err(InflightError::Damaged)
        ));
        assert!(matches!(
            InflightRing::open(Arc::clone(&area), 0, 8, 9),
            Err(InflightError::Damaged)
        ));
        assert!(InflightRing::open(Arc::clone(&area), 2, 8, 0).is_err());
        assert!(InflightRing::open(area, 0, 16, 0).is_err());
        let (file, length) = InflightArea::create(1, 8).expect("a file");
        assert!(InflightArea::open(file, 0, length, 2, 8).is_err());
    }
}
