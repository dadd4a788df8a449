//! Operations on the image, through the ring.

pub(super) mod faults;
mod long_hole;
pub(super) mod sparse;
pub(super) mod step;
#[cfg(test)]
mod tests;
mod untouched;
mod zeroing;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use godwit_core::action::{Content, DiskOperation, DiskTag, Inspect};
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, SECTOR_SIZE, Sectors};
use io_uring::opcode;

use crate::engine::disk::step::{Call, Step, Target};
use crate::engine::disk::zeroing::Zeroing;
use crate::image::extents::hole_end;
use crate::image::{Fingerprint, Image};
use godwit_io::page_buffers::Mapping;
use godwit_io::ring::{Ring, Token};
use godwit_io::zeroes::{BLOCK, is_zero};
use godwit_vhost::memory::GuestRam;

/// Longest write of zeroes, for file systems that cannot zero a range themselves.
const ZERO_PIECE: u64 = 1 << 20;

/// Operations, reads excepted, carried out in place after the kernel could start no thread for one. Each failure of the
/// kernel takes some 50 ms.
const IN_PLACE: u32 = 64;

/// A way to make a range read as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroWay {
    /// Release the space.
    Punch,
    /// Keep the space.
    Range,
    /// Write zeroes.
    Write,
    /// Nothing to do: the range reads as zeroes.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read(Inspect),
    Write,
    Zero { first: ZeroWay, way: ZeroWay },
    Sync,
}

impl Work {
    /// Returns the name in fail points.
    const fn name(self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Write => "write",
            Self::Zero { .. } => "zero",
            Self::Sync => "sync",
        }
    }
}

/// The owner of an operation's memory, if the owner could otherwise go away before the operation ends.
pub(super) enum Keep {
    /// The buffers of a migration's chunks, or the data of kept writes.
    Mapping(#[expect(dead_code, reason = "held for its end")] Rc<Mapping>),
    /// A virtual machine's memory.
    Guest(Arc<GuestRam>),
}

/// The user of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum User {
    Core(DiskTag),
    /// A kept write, by its number.
    Kept(u32),
}

impl From<DiskTag> for User {
    fn from(tag: DiskTag) -> Self {
        Self::Core(tag)
    }
}

struct Entry {
    user: User,
    work: Work,
    /// True if the data must be durable before the operation is done.
    fua: bool,
    offset: u64,
    length: u64,
    done: u64,
    memory: *mut u8,
    /// Rest of the memory, if in pieces; replaces `memory`.
    pieces: Vec<libc::iovec>,
    keep: Option<Keep>,
    /// True if no other operation may run meanwhile.
    exclusive: bool,
    /// True if the ring only schedules the step.
    in_place: bool,
    /// True if blocks of zeroes over holes of the file are left out.
    sparse: bool,
    /// End of the next write, from the start of the data.
    until: u64,
    /// True once the operation has ended; the entry can be reused.
    over: bool,
}

pub(super) struct Finished {
    pub(super) user: User,
    pub(super) result: Result<Content, RequestError>,
}

/// The image and its operations in flight.
pub(super) struct Disk {
    image: Image,
    name: String,
    entries: Vec<Entry>,
    free: Vec<u32>,
    zeroes: Mapping,
    zeroing: Zeroing,
    /// Operations to carry out in place before the ring is asked again.
    in_place: u32,
    /// True if the kernel could not start a thread for an operation, and the log has said so.
    without_workers: bool,
    running: u32,
    exclusive_running: bool,
    /// Operations that wait for an exclusive one, or for their turn.
    queue: VecDeque<u32>,
}

impl Disk {
    /// Prepares an image; `operations` is the usual maximum in flight at once.
    pub(super) fn new(image: Image, name: String, operations: usize) -> io::Result<Self> {
        for file in [Some(&image.file), image.buffered.as_ref()]
            .into_iter()
            .flatten()
        {
            // With O_NONBLOCK the ring could report EAGAIN instead of waiting.
            let flags = rustix::fs::fcntl_getfl(file)?;
            rustix::fs::fcntl_setfl(file, flags - rustix::fs::OFlags::NONBLOCK)?;
        }
        let zeroing = Zeroing::of(&image);
        Ok(Self {
            image,
            name,
            entries: Vec::with_capacity(operations),
            free: Vec::with_capacity(operations),
            zeroes: Mapping::new(ZERO_PIECE as usize)?,
            zeroing,
            in_place: 0,
            without_workers: false,
            running: 0,
            exclusive_running: false,
            queue: VecDeque::new(),
        })
    }

    pub(super) const fn capacity(&self) -> Sectors {
        self.image.capacity
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.image.file.as_fd()
    }

    /// See [`Image::fingerprint`].
    pub(super) fn fingerprint(&self) -> Option<Fingerprint> {
        self.image.fingerprint()
    }

    /// Returns the number of sectors from the extent's start that are a hole.
    pub(super) fn hole(&self, extent: Extent) -> u32 {
        let (start, end) = (extent.start().byte_offset(), extent.end().byte_offset());
        let hole = hole_end(self.file(), start, end) - start;
        (hole / SECTOR_SIZE) as u32
    }

    /// Returns true if a write, or an operation like it, to a part of the byte range is pending.
    pub(super) fn is_changing(&self, start: u64, end: u64) -> bool {
        self.in_flight() > 0
            && self.entries.iter().any(|entry| {
                let writes = matches!(entry.work, Work::Write | Work::Zero { .. });
                let overlaps = entry.offset < end && start < entry.offset + entry.length;
                writes && overlaps && !entry.over
            })
    }

    /// Returns true if any range is made to read as zeroes without writing them. A block device has to be tried first.
    pub(super) fn zeroes_fast(&mut self) -> bool {
        self.zeroing.is_fast(&self.image)
    }

    /// Returns the number of pending operations.
    pub(super) fn in_flight(&self) -> usize {
        self.running as usize + self.queue.len()
    }

    /// Returns true if these pieces of memory, together as long as the extent, can be transferred without a copy.
    pub(super) fn can_transfer(&self, extent: Extent, pieces: &[libc::iovec]) -> bool {
        let most = libc::UIO_MAXIOV as usize;
        if pieces.len() > most || !self.is_aligned(extent.start().byte_offset(), extent.bytes()) {
            return false;
        }
        let block = self.image.alignment as usize;
        let memory = self.image.memory_alignment as usize;
        !self.image.direct
            || pieces.iter().all(|piece| {
                piece.iov_base.addr().is_multiple_of(memory) && piece.iov_len.is_multiple_of(block)
            })
    }

    /// Starts an operation. Reads and writes use `memory`, which must be as long as the extent; or `pieces`, if any,
    /// which must be as long together, and are left empty.
    ///
    /// # Safety
    /// The memory stays valid, and is not used in a conflicting way, until [`Disk::completed`] returns the operation,
    /// or as long as `keep` lives.
    pub(super) unsafe fn start(
        &mut self,
        ring: &mut Ring,
        user: impl Into<User>,
        operation: DiskOperation,
        memory: *mut u8,
        pieces: &mut Vec<libc::iovec>,
        keep: Option<Keep>,
    ) {
        let Some((work, range, fua)) = self.work_of(operation) else {
            debug_assert!(false, "holes are found without the ring: see `Disk::hole`");
            return;
        };
        let (offset, length) = (range.start, range.end - range.start);
        // Two requests to the same block in flight, one of them through the page cache, could undo each other: see
        // `Image::buffered`.
        let writes = matches!(work, Work::Write | Work::Zero { .. });
        let exclusive = writes && !self.is_aligned(offset, length);
        let user = user.into();
        let entry = Entry {
            user,
            work,
            fua,
            offset,
            length,
            done: 0,
            memory,
            pieces: Vec::new(),
            keep,
            exclusive,
            in_place: false,
            sparse: false,
            until: length,
            over: false,
        };
        let index = self.insert(entry, pieces);
        // Writes of the local guest are written in full: the guest may want the space. A hole younger than the last
        // flush may be gone after a power failure, so durable writes do not rely on holes.
        if matches!(user, User::Core(DiskTag::Replica(_) | DiskTag::Pulled(_)))
            && work == Work::Write
            && !fua
            && !exclusive
        {
            self.leave_out_zeroes(index);
        }
        if self.queue.is_empty() && self.may_run(exclusive) {
            self.run(ring, index);
        } else {
            self.queue.push_back(index);
        }
    }

    /// Returns the work of an operation, its range in bytes, and true if its data must be durable; `None` for a search.
    fn work_of(&self, operation: DiskOperation) -> Option<(Work, Range<u64>, bool)> {
        let range = |extent: Extent| extent.start().byte_offset()..extent.end().byte_offset();
        Some(match operation {
            DiskOperation::Read { extent, inspect } => (Work::Read(inspect), range(extent), false),
            DiskOperation::Write { extent, fua } => (Work::Write, range(extent), fua),
            DiskOperation::WriteZeroes { extent, fua, unmap } => {
                let first = if unmap {
                    ZeroWay::Punch
                } else {
                    ZeroWay::Range
                };
                let way = self.zeroing.best(first, first, range(extent));
                (Work::Zero { first, way }, range(extent), fua)
            }
            DiskOperation::Flush => (Work::Sync, 0..0, false),
            DiskOperation::Keep { .. }
            | DiskOperation::KeepZeroes { .. }
            | DiskOperation::FindHole { .. }
            | DiskOperation::FindLongHole { .. } => return None,
        })
    }

    /// Stores an entry with these pieces of memory, and returns its index. Leaves no pieces.
    fn insert(&mut self, mut entry: Entry, pieces: &mut Vec<libc::iovec>) -> u32 {
        let index = self.free.pop().unwrap_or(self.entries.len() as u32);
        match self.entries.get_mut(index as usize) {
            Some(last) => {
                // The room for pieces is reused.
                std::mem::swap(&mut entry.pieces, &mut last.pieces);
                entry.pieces.clear();
                std::mem::swap(&mut entry.pieces, pieces);
                *last = entry;
            }
            None => {
                std::mem::swap(&mut entry.pieces, pieces);
                self.entries.push(entry);
            }
        }
        index
    }

    /// Handles a step that the kernel finished. Returns `None` if the operation goes on.
    pub(super) fn completed(
        &mut self,
        ring: &mut Ring,
        index: u32,
        result: i32,
    ) -> Option<Finished> {
        let entry = &self.entries[index as usize];
        let result = match faults::result(entry.user, entry.work.name(), result) {
            _ if entry.in_place => self.carry_out(index),
            // No code cancels operations on the image.
            result if result == -libc::ECANCELED => {
                self.in_place = IN_PLACE;
                self.carry_out(index)
            }
            result => result,
        };
        let outcome = self.step(index, result);
        let Some(result) = outcome else {
            self.submit(ring, index);
            return None;
        };
        let entry = &mut self.entries[index as usize];
        let finished = Finished {
            user: entry.user,
            result,
        };
        entry.keep = None;
        entry.over = true;
        self.running -= 1;
        if entry.exclusive {
            self.exclusive_running = false;
        }
        self.free.push(index);
        while let Some(&next) = self.queue.front()
            && self.may_run(self.entries[next as usize].exclusive)
        {
            self.queue.pop_front();
            self.run(ring, next);
        }
        Some(finished)
    }

    /// Leaves out the part of a write that is zeroes and already reads as zeroes.
    fn leave_out_zeroes(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        if !entry.pieces.is_empty() || entry.length < 2 * BLOCK as u64 {
            return;
        }
        // SAFETY: the caller of `start` keeps the memory in place until the operation is reported.
        let data = unsafe { std::slice::from_raw_parts(entry.memory, entry.length as usize) };
        let (file, zeroing) = (self.image.file.as_fd(), &self.zeroing);
        let is_zeroes = |part: Range<u64>| {
            zeroing.is_untouched(part.clone()) || hole_end(file, part.start, part.end) == part.end
        };
        let run = sparse::next_run(is_zeroes, entry.offset, data, entry.done as usize);
        // An operation has at least one step.
        if entry.sparse || run.skipped < entry.length {
            entry.sparse = true;
            entry.done += run.skipped;
            entry.until = run.until;
        }
    }

    const fn may_run(&self, exclusive: bool) -> bool {
        !self.exclusive_running && (!exclusive || self.running == 0)
    }

    fn run(&mut self, ring: &mut Ring, index: u32) {
        self.running += 1;
        self.exclusive_running |= self.entries[index as usize].exclusive;
        self.submit(ring, index);
    }

    /// Interprets a step's result: `None` to go on with the rest.
    fn step(&mut self, index: u32, result: i32) -> Option<Result<Content, RequestError>> {
        let entry = &mut self.entries[index as usize];
        if result < 0 {
            match -result {
                libc::EAGAIN | libc::EINTR => return None,
                libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL
                    if let Work::Zero { first, way } = entry.work
                        && matches!(way, ZeroWay::Punch | ZeroWay::Range) =>
                {
                    self.zeroing.refused(way);
                    let rest = entry.offset + entry.done..entry.offset + entry.length;
                    let way = self.zeroing.best(first, way, rest);
                    entry.work = Work::Zero { first, way };
                    return None;
                }
                errno => return Some(Err(self.failed(index, errno))),
            }
        }
        let progress = match entry.work {
            Work::Zero {
                way: ZeroWay::Punch | ZeroWay::Range | ZeroWay::Nothing,
                ..
            } => entry.length - entry.done,
            Work::Sync => 0,
            _ => {
                let done = entry.done + result as u64;
                if done == entry.until {
                    result as u64
                } else {
                    // A direct operation goes on at a block's start.
                    (done - done % u64::from(self.image.alignment)).saturating_sub(entry.done)
                }
            }
        };
        if progress == 0 && entry.work != Work::Sync {
            return Some(Err(self.failed(index, libc::EIO)));
        }
        entry.done += progress;
        if entry.sparse && entry.done == entry.until {
            self.leave_out_zeroes(index);
        }
        let entry = &mut self.entries[index as usize];
        if entry.done < entry.length {
            skip(&mut entry.pieces, progress as usize);
            return None;
        }
        match entry.work {
            Work::Read(Inspect::Nothing) => Some(Ok(Content::Data)),
            Work::Read(inspect) => {
                // SAFETY: the read filled `length` bytes at `memory`, which the caller of `start` keeps in place until
                // this operation is reported.
                let data =
                    unsafe { std::slice::from_raw_parts(entry.memory, entry.length as usize) };
                Some(Ok(match inspect {
                    Inspect::Nothing => Content::Data,
                    Inspect::Zeroes if is_zero(data) => Content::Zeroes,
                    Inspect::Zeroes => Content::Data,
                    Inspect::Digest => Content::Digest(blake3::hash(data).into()),
                }))
            }
            Work::Zero { .. } if entry.fua => {
                entry.work = Work::Sync;
                None
            }
            Work::Write | Work::Zero { .. } | Work::Sync => Some(Ok(Content::Data)),
        }
    }

    fn failed(&self, index: u32, errno: i32) -> RequestError {
        let entry = &self.entries[index as usize];
        if errno == libc::EFAULT
            && let Some(Keep::Guest(ram)) = &entry.keep
        {
            // The image is not to blame.
            ram.lose_pages();
            return RequestError::Io;
        }
        let error = io::Error::from_raw_os_error(errno);
        tracing::warn!(
            disk = %self.name,
            image = %self.image.path.display(),
            operation = ?entry.work,
            offset = entry.offset,
            length = entry.length,
            "the image reported an error: {error}"
        );
        match errno {
            libc::ENOSPC | libc::EDQUOT => RequestError::NoSpace,
            _ => RequestError::Io,
        }
    }

    const fn is_aligned(&self, offset: u64, length: u64) -> bool {
        self.image.buffered.is_none()
            || (offset | length).is_multiple_of(self.image.alignment as u64)
    }

    fn submit(&mut self, ring: &mut Ring, index: u32) {
        let entry = &mut self.entries[index as usize];
        if matches!(
            entry.work,
            Work::Write
                | Work::Zero {
                    way: ZeroWay::Write,
                    ..
                }
        ) {
            self.zeroing
                .touch(entry.offset + entry.done..entry.offset + entry.until);
        }
        entry.in_place = self.in_place > 0 && !matches!(entry.work, Work::Read(_));
        let entry = if entry.in_place {
            self.in_place -= 1;
            opcode::Nop::new().build()
        } else {
            self.next_step(index).entry()
        };
        // SAFETY: the entry uses the image's descriptors, which live as long as the ring is used; the static zeroes,
        // which are never written; or memory that the caller of `start` answers for.
        unsafe { ring.push(entry, Token::Disk(index)) };
    }

    /// Carries out the ring's step on this thread.
    fn carry_out(&mut self, index: u32) -> i32 {
        if !std::mem::replace(&mut self.without_workers, true) {
            tracing::warn!(
                disk = %self.name,
                "the kernel can start no thread for the disk's slow operations, which are now carried out \
                 one after another: let this process have more threads (pids.max, TasksMax)"
            );
        }
        // SAFETY: as in `submit`; the ring has reported the step, so the ring uses nothing of it any more.
        unsafe { self.next_step(index).carry_out() }
    }

    /// Returns the next system call.
    fn next_step(&self, index: u32) -> Step {
        let entry = &self.entries[index as usize];
        let offset = entry.offset + entry.done;
        let rest = entry.until - entry.done;
        let file = match &self.image.buffered {
            Some(buffered) if !self.is_aligned(offset, rest) => buffered,
            _ => &self.image.file,
        };
        let target = match entry.pieces.len() as u32 {
            0 => Target::Whole {
                memory: entry.memory.wrapping_add(entry.done as usize),
                length: rest as u32,
            },
            count => Target::Pieces {
                first: entry.pieces.as_ptr(),
                count,
            },
        };
        let call = match entry.work {
            Work::Read(_) => Call::Read(target),
            Work::Write => Call::Write(target, if entry.fua { libc::RWF_DSYNC } else { 0 }),
            Work::Zero {
                way: ZeroWay::Write,
                ..
            } => {
                let zeroes = Target::Whole {
                    memory: self.zeroes.at(0),
                    length: rest.min(ZERO_PIECE) as u32,
                };
                Call::Write(zeroes, 0)
            }
            Work::Zero {
                way: ZeroWay::Nothing,
                ..
            } => Call::Nothing,
            Work::Zero { way, .. } => {
                let way = match way {
                    ZeroWay::Punch => libc::FALLOC_FL_PUNCH_HOLE,
                    _ => libc::FALLOC_FL_ZERO_RANGE,
                };
                let mode = way | libc::FALLOC_FL_KEEP_SIZE;
                Call::Allocate { length: rest, mode }
            }
            Work::Sync => Call::Sync,
        };
        Step {
            file: file.as_raw_fd(),
            offset,
            call,
        }
    }
}

/// Drops the first `count` bytes.
fn skip(pieces: &mut Vec<libc::iovec>, mut count: usize) {
    let whole = pieces.iter().take_while(|piece| {
        let within = piece.iov_len <= count;
        count -= if within { piece.iov_len } else { 0 };
        within
    });
    let whole = whole.count();
    pieces.drain(..whole);
    if let Some(first) = pieces.first_mut() {
        first.iov_base = first.iov_base.wrapping_byte_add(count);
        first.iov_len -= count;
    }
}
