//! Page-aligned memory for the data of requests in flight.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Smallest block: the length and alignment of direct I/O on any disk.
pub const SMALLEST: usize = 4096;

/// Longest block: one request's data.
pub const LARGEST: usize = 32 << 20;

/// Mappings of this many bytes or more ask for huge pages. Direct I/O pins each page and describes each page to the
/// disk: at 4 KiB a page, a request of 1 MiB costs 256 descriptors.
const HUGE: usize = 2 << 20;

/// Pause between two pieces that are committed in the background.
const BETWEEN_PIECES: Duration = Duration::from_millis(1);

const ORDERS: usize = (LARGEST / SMALLEST).trailing_zeros() as usize + 1;

/// A memory mapping, as a rule anonymous: zeroed, aligned to a page, committed as it is touched (2 MiB at a time where a
/// long mapping gets huge pages). The kernel may read and write this memory, so only raw pointers reach the bytes. Before
/// making a slice, callers ensure the kernel uses none of the same bytes meanwhile.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    length: usize,
    /// Committing thread, which ends before the memory does.
    committing: Option<Committing>,
}

impl Mapping {
    /// Maps `length` bytes, rounded up to a page.
    pub fn new(length: usize) -> io::Result<Self> {
        let length = length.max(1).next_multiple_of(SMALLEST);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let base: NonNull<u8> = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        if length >= HUGE {
            // SAFETY: the advice is about the new mapping alone and changes none of its contents. A kernel without huge
            // pages refuses the advice, and small pages do.
            let _ = unsafe { madvise(base.as_ptr().cast(), length, Advice::LinuxHugepage) };
        }
        Ok(Self {
            base,
            length,
            committing: None,
        })
    }

    /// Maps `length` bytes of a file, whole pages, for the kernel to read.
    pub fn of_file(file: BorrowedFd<'_>, offset: u64, length: usize) -> io::Result<Self> {
        let (access, shared) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, shared, file, offset)? };
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            length,
            committing: None,
        })
    }

    /// Commits a part now, so that later users do not wait: with huge pages, each 2 MiB can take milliseconds.
    pub fn commit(&self, offset: usize, length: usize) {
        assert!(
            length <= self.length.saturating_sub(offset),
            "a part outside of its mapping"
        );
        for (piece, length) in pieces(length) {
            commit_piece(self.at(offset + piece), length);
        }
    }

    /// Commits the first `length` bytes on a new thread. The memory may be in use meanwhile.
    pub fn commit_in_background(&mut self, length: usize) {
        if self.committing.is_some() {
            return;
        }
        let length = length.min(self.length);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let base = self.base.expose_provenance();
        let commit = move || {
            for (offset, length) in pieces(length) {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let piece = std::ptr::with_exposed_provenance_mut(base.get() + offset);
                commit_piece(piece, length);
                // Threads that wait to map something take their turn here.
                thread::sleep(BETWEEN_PIECES);
            }
        };
        // Without the thread, memory is committed on first use.
        let thread = thread::Builder::new()
            .name(String::from("commit memory"))
            .spawn(commit);
        self.committing = thread.ok().map(|thread| Committing {
            stop,
            thread: Some(thread),
        });
    }

    /// Returns all of the memory to the system: zeroed, and committed anew as it is touched. The memory must not be
    /// used meanwhile.
    fn decommit(&mut self) {
        self.committing = None;
        // SAFETY: the advice is about this mapping alone, and the caller ensures that no code reads or writes its
        // contents. A failure leaves the memory committed, which is harmless.
        let _ = unsafe {
            madvise(
                self.base.as_ptr().cast(),
                self.length,
                Advice::LinuxDontNeed,
            )
        };
    }

    /// Returns the address of the byte at `offset`, which must lie within the mapping.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.length, "an address outside of its mapping");
        // SAFETY: the assertion keeps the address within the mapping or one past its end.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Returns the bytes that the kernel backs with pages at the moment.
    pub fn committed(&self) -> usize {
        let mut pages = vec![0_u8; self.length / SMALLEST];
        // SAFETY: the mapping is alive, and `pages` has a byte for each of its pages.
        let answer = unsafe { libc::mincore(self.at(0).cast(), self.length, pages.as_mut_ptr()) };
        assert_eq!(answer, 0);
        pages.iter().filter(|&&page| page & 1 != 0).count() * SMALLEST
    }

    /// Returns the length of the mapping in bytes.
    pub const fn length(&self) -> usize {
        self.length
    }
}

// SAFETY: the mapping belongs to this value alone, and nothing about the mapping depends on a thread.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.committing = None;
        // SAFETY: the mapping was made with this length and is not used after this. A failure leaves the
        // memory mapped, which is harmless.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Returns offset and length of the pieces in which `length` bytes are committed. While a piece is committed, the
/// process can map nothing else: no thread starts, and the system hands out no memory.
fn pieces(length: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length)
        .step_by(HUGE)
        .map(move |offset| (offset, HUGE.min(length - offset)))
}

/// Makes the kernel commit a page-aligned part of a mapping without changing its contents.
fn commit_piece(start: *mut u8, length: usize) {
    // SAFETY: callers pass a part of a mapping that lives until this returns; the advice leaves its contents alone. An
    // older kernel refuses the advice and commits memory on first use.
    let _ = unsafe { madvise(start.cast(), length, Advice::LinuxPopulateWrite) };
}

/// A thread that commits memory. The thread ends soon after this is dropped.
#[derive(Debug)]
struct Committing {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Committing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic and returns nothing.
            let _ = thread.join();
        }
    }
}

/// A byte buffer for the kernel to fill or empty in the background: a [`Mapping`] and the range of the data.
#[derive(Debug)]
pub struct Staging {
    memory: Mapping,
    start: usize,
    end: usize,
}

impl Staging {
    /// Returns an empty buffer of `length` bytes.
    ///
    /// # Errors
    /// The kernel has no memory for the buffer.
    pub fn new(length: usize) -> io::Result<Self> {
        Ok(Self {
            memory: Mapping::new(length)?,
            start: 0,
            end: 0,
        })
    }

    /// Returns the data. Must not be called while the kernel fills or empties the buffer; the kernel may fill the free
    /// space behind the data, though.
    pub fn data(&self) -> &[u8] {
        // SAFETY: `start..end` lies within the mapping and was initialised. Writes elsewhere than through `&mut self`
        // are the kernel's alone and land past `end`.
        unsafe { std::slice::from_raw_parts(self.memory.at(self.start), self.end - self.start) }
    }

    /// Returns the data, to change in place. Must not be called while the kernel uses the buffer.
    pub fn data_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `data`; `&mut self` keeps other slices of the buffer away.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(self.start), self.end - self.start) }
    }

    /// Returns address and length of the data, for the kernel to read.
    pub fn pending(&self) -> (*const u8, usize) {
        (self.memory.at(self.start), self.end - self.start)
    }

    /// Drops `count` bytes from the front of the data.
    pub fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Moves the data to the front, so that [`Staging::room`] is as long as possible. Must not be called while the
    /// kernel uses the buffer.
    pub fn compact(&mut self) {
        let length = self.end - self.start;
        if self.start > 0 {
            // SAFETY: both ranges lie within the mapping; `copy` allows them to overlap.
            unsafe { std::ptr::copy(self.memory.at(self.start), self.memory.at(0), length) };
            (self.start, self.end) = (0, length);
        }
    }

    /// Returns address and length of the free space behind the data, for the kernel to fill.
    pub fn room(&self) -> (*mut u8, usize) {
        (self.memory.at(self.end), self.memory.length() - self.end)
    }

    /// Counts `count` bytes of the free space as data: the kernel has filled them.
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.memory.length());
    }

    /// Returns the free space, for this thread to fill. Must not be called while the kernel fills the buffer.
    pub fn room_mut(&mut self) -> &mut [u8] {
        let (pointer, length) = self.room();
        // SAFETY: the range lies within the mapping, which is initialised (zeroed by the kernel),
        // and `&mut self` keeps other slices of it away.
        unsafe { std::slice::from_raw_parts_mut(pointer, length) }
    }
}

impl io::Write for Staging {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.room_mut();
        let count = bytes.len().min(room.len());
        room[..count].copy_from_slice(&bytes[..count]);
        self.filled(count);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A block of an [`Arena`]. A drop does not free the block; [`Arena::free`] does.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    page: u32,
    order: u8,
}

impl Block {
    /// Returns the length of the block in bytes.
    pub const fn length(&self) -> usize {
        SMALLEST << self.order
    }
}

const NONE: u32 = u32::MAX;
const NOT_FREE: u8 = u8::MAX;

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
    /// Order of the free block that starts at this page.
    free: u8,
}

/// A buddy allocator over one mapping: blocks of 4 KiB to 32 MiB, each a power of two and aligned to its length.
/// Allocating and freeing take a bounded number of steps and no memory.
pub struct Arena {
    memory: Mapping,
    links: Box<[Link]>,
    heads: [u32; ORDERS],
}

impl Arena {
    /// Returns an arena of `length` bytes, rounded up to a multiple of 32 MiB.
    pub fn new(length: usize) -> io::Result<Self> {
        let length = length.max(1).next_multiple_of(LARGEST);
        let memory = Mapping::new(length)?;
        let link = Link {
            previous: NONE,
            next: NONE,
            free: NOT_FREE,
        };
        let links = vec![link; length / SMALLEST].into_boxed_slice();
        let mut arena = Self {
            memory,
            links,
            heads: [NONE; ORDERS],
        };
        // The first block heads the list: memory is used from its beginning.
        for page in (0..length / SMALLEST).step_by(LARGEST / SMALLEST).rev() {
            arena.insert(page as u32, ORDERS as u8 - 1);
        }
        Ok(arena)
    }

    /// Returns the length of the arena in bytes.
    pub const fn length(&self) -> usize {
        self.memory.length()
    }

    /// Commits on a new thread the `length` bytes that are allocated first.
    pub fn commit_in_background(&mut self, length: usize) {
        self.memory.commit_in_background(length);
    }

    /// Returns the memory to the system if no block is in use. The memory is committed anew on use.
    pub fn decommit(&mut self) {
        let whole = (ORDERS - 1) as u8;
        let unused = |page: &Link| page.free == whole;
        if self.links.iter().step_by(LARGEST / SMALLEST).all(unused) {
            self.memory.decommit();
        }
    }

    /// Allocates a block of at least `length` bytes. Returns `None` if no such block is free or `length` exceeds 32
    /// MiB.
    pub fn allocate(&mut self, length: usize) -> Option<Block> {
        let wanted = length
            .max(1)
            .div_ceil(SMALLEST)
            .next_power_of_two()
            .trailing_zeros() as u8;
        let mut order =
            (wanted..ORDERS as u8).find(|&order| self.heads[usize::from(order)] != NONE)?;
        let page = self.heads[usize::from(order)];
        self.remove(page);
        while order > wanted {
            order -= 1;
            self.insert(page + (1 << order), order);
        }
        Some(Block { page, order })
    }

    /// Frees a block.
    pub fn free(&mut self, block: Block) {
        let Block {
            mut page,
            mut order,
        } = block;
        while usize::from(order) < ORDERS - 1 {
            let buddy = page ^ (1 << order);
            if self.links[buddy as usize].free != order {
                break;
            }
            self.remove(buddy);
            page = page.min(buddy);
            order += 1;
        }
        self.insert(page, order);
    }

    /// Returns the address of a block.
    pub fn address(&self, block: &Block) -> *mut u8 {
        self.memory.at(block.page as usize * SMALLEST)
    }

    fn insert(&mut self, page: u32, order: u8) {
        let head = std::mem::replace(&mut self.heads[usize::from(order)], page);
        self.links[page as usize] = Link {
            previous: NONE,
            next: head,
            free: order,
        };
        if head != NONE {
            self.links[head as usize].previous = page;
        }
    }

    fn remove(&mut self, page: u32) {
        let Link {
            previous,
            next,
            free,
        } = self.links[page as usize];
        self.links[page as usize].free = NOT_FREE;
        if previous == NONE {
            self.heads[usize::from(free)] = next;
        } else {
            self.links[previous as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].previous = previous;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;

    /// Returns the kernel's flags of the mapping around an address.
    fn flags_of(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the process's mappings");
        let mut within = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|word| word.split_once('-'));
            if let Some((Ok(start), Ok(end))) = range.map(|(start, end)| {
                (
                    usize::from_str_radix(start, 16),
                    usize::from_str_radix(end, 16),
                )
            }) {
                within = (start..end).contains(&address);
            } else if let (true, Some(flags)) = (within, line.strip_prefix("VmFlags:")) {
                return flags.to_owned();
            }
        }
        panic!("no mapping holds the address")
    }

    #[test]
    fn long_mappings_ask_for_huge_pages_and_short_ones_do_not() {
        let asks = |length| {
            let mapping = Mapping::new(length).expect("memory");
            flags_of(mapping.at(0) as usize)
                .split(' ')
                .any(|flag| flag == "hg")
        };
        let possible = Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(asks(HUGE), possible);
        assert!(!asks(HUGE / 2));
    }

    #[test]
    fn memory_is_committed_before_it_is_used_and_keeps_what_it_holds() {
        let mut mapping = Mapping::new(3 * HUGE + SMALLEST).expect("memory");
        assert_eq!(mapping.committed(), 0);
        // SAFETY: no other code uses the mapping.
        unsafe { mapping.at(HUGE).write(7) };
        mapping.commit_in_background(2 * HUGE);
        let deadline = Instant::now() + Duration::from_secs(10);
        while mapping.committed() < 2 * HUGE {
            assert!(Instant::now() < deadline, "it was not committed");
            thread::sleep(Duration::from_millis(1));
        }
        mapping.commit(0, mapping.length());
        assert_eq!(mapping.committed(), mapping.length());
        // SAFETY: as above; the mapping is initialised from its beginning.
        assert_eq!(unsafe { mapping.at(HUGE).read() }, 7);
    }

    #[test]
    fn memory_is_given_back_only_when_no_block_is_in_use() {
        let mut arena = Arena::new(2 * LARGEST).expect("memory");
        for _ in 0..2 {
            arena.commit_in_background(HUGE);
            let block = arena.allocate(SMALLEST).expect("a block");
            // SAFETY: no other code uses the block.
            unsafe { arena.address(&block).write(7) };
            arena.decommit();
            assert!(arena.memory.committed() > 0, "a block is in use");
            arena.free(block);
            arena.decommit();
            assert_eq!(arena.memory.committed(), 0);
        }
    }

    #[test]
    fn memory_may_end_while_it_is_committed() {
        let mut mapping = Mapping::new(64 * HUGE).expect("memory");
        mapping.commit_in_background(mapping.length());
        drop(mapping);
    }

    #[test]
    fn blocks_are_aligned_and_long_enough() {
        let mut arena = Arena::new(LARGEST).expect("memory");
        for length in [1, 512, 4096, 4097, 12_288, 1 << 20] {
            let block = arena.allocate(length).expect("a block");
            assert!(block.length() >= length);
            assert_eq!(arena.address(&block) as usize % SMALLEST, 0);
            assert_eq!(block.page as usize * SMALLEST % block.length(), 0);
        }
    }

    #[test]
    fn a_freed_arena_holds_the_longest_block_again() {
        let mut arena = Arena::new(LARGEST).expect("memory");
        let mut blocks = Vec::new();
        while let Some(block) = arena.allocate(SMALLEST) {
            blocks.push(block);
        }
        assert_eq!(blocks.len(), LARGEST / SMALLEST);
        assert_eq!(arena.allocate(SMALLEST), None);
        blocks
            .into_iter()
            .step_by(1)
            .for_each(|block| arena.free(block));
        assert!(arena.allocate(LARGEST).is_some());
        assert!(arena.allocate(SMALLEST).is_none());
    }

    #[test]
    fn a_block_longer_than_the_longest_is_refused() {
        let mut arena = Arena::new(3 * LARGEST).expect("memory");
        assert_eq!(arena.allocate(LARGEST + 1), None);
    }

    proptest! {
        #[test]
        fn live_blocks_never_overlap(steps in prop::collection::vec((0_usize..1 << 23, any::<u8>()), 1..300)) {
            let mut arena = Arena::new(LARGEST).expect("memory");
            let mut live: Vec<Block> = Vec::new();
            for (length, choice) in steps {
                if choice % 3 == 0 && !live.is_empty() {
                    let block = live.swap_remove(usize::from(choice) % live.len());
                    arena.free(block);
                } else if let Some(block) = arena.allocate(length) {
                    let range = |b: &Block| {
                        let start = b.page as usize * SMALLEST;
                        start..start + b.length()
                    };
                    let new = range(&block);
                    for other in &live {
                        let other = range(other);
                        prop_assert!(new.end <= other.start || other.end <= new.start);
                    }
                    live.push(block);
                }
            }
            live.into_iter().for_each(|block| arena.free(block));
            prop_assert!(arena.allocate(LARGEST).is_some());
        }
    }

    #[test]
    fn staging_keeps_data_in_order() {
        use std::io::Write as _;
        let mut staging = Staging::new(4096).expect("memory");
        assert_eq!(staging.write(&[1, 2, 3, 4]).expect("room"), 4);
        staging.consume(2);
        staging.compact();
        assert_eq!(staging.data(), [3, 4]);
        assert_eq!(staging.write(&[5; 5000]).expect("room"), 4094);
        assert_eq!(staging.data().len(), 4096);
        staging.consume(4096);
        assert_eq!(staging.room().1, 4096);
    }
}
