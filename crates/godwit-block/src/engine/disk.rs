//! Operations on the image, through the ring.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use godwit_core::action::{Content, DiskOperation, DiskTag, Inspect};
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, Sectors};
use io_uring::{opcode, squeue, types};

use super::faults;
use super::inspect::is_zero;
use crate::image::Image;
use crate::memory::Mapping;
use crate::ring::{Ring, Token};
use crate::vhost_user::memory::GuestRam;

/// Longest write of zeroes where the file system cannot make them itself.
const ZERO_PIECE: u64 = 1 << 20;

/// How a range is made to read as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroWay {
    /// Release the space.
    Punch,
    /// Keep the space.
    Range,
    /// Write zeroes.
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read(Inspect),
    Write,
    Zero { first: ZeroWay, way: ZeroWay },
    Sync,
}

impl Work {
    /// As fail points call it.
    const fn name(self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Write => "write",
            Self::Zero { .. } => "zero",
            Self::Sync => "sync",
        }
    }
}

/// What an operation's memory belongs to, when that can go away before the operation has ended.
pub(super) enum Keep {
    /// The buffers of a migration's chunks.
    Chunks(#[expect(dead_code, reason = "held for its end")] Rc<Mapping>),
    /// A virtual machine's memory.
    Guest(#[expect(dead_code, reason = "held for its end")] Arc<GuestRam>),
}

/// One operation.
struct Entry {
    tag: DiskTag,
    work: Work,
    /// Make it durable before it is done.
    fua: bool,
    offset: u64,
    length: u64,
    done: u64,
    memory: *mut u8,
    /// The memory instead, when it is in pieces: what is left of it.
    pieces: Vec<libc::iovec>,
    keep: Option<Keep>,
    /// No other operation may run meanwhile.
    exclusive: bool,
}

/// An operation that is done.
pub(super) struct Finished {
    pub(super) tag: DiskTag,
    pub(super) result: Result<Content, RequestError>,
}

/// The image and its operations in flight.
pub(super) struct Disk {
    image: Image,
    name: String,
    entries: Vec<Entry>,
    free: Vec<u32>,
    zeroes: Mapping,
    can_punch: bool,
    can_zero_range: bool,
    running: u32,
    exclusive_running: bool,
    /// Operations that wait for an exclusive one, or for its turn.
    queue: VecDeque<u32>,
}

impl Disk {
    /// The operations of an image; at most `operations` are in flight at once as a rule.
    pub(super) fn new(image: Image, name: String, operations: usize) -> io::Result<Self> {
        for file in [Some(&image.file), image.buffered.as_ref()]
            .into_iter()
            .flatten()
        {
            // With O_NONBLOCK the ring could report EAGAIN instead of waiting.
            let flags = rustix::fs::fcntl_getfl(file)?;
            rustix::fs::fcntl_setfl(file, flags - rustix::fs::OFlags::NONBLOCK)?;
        }
        Ok(Self {
            image,
            name,
            entries: Vec::with_capacity(operations),
            free: Vec::with_capacity(operations),
            zeroes: Mapping::new(ZERO_PIECE as usize)?,
            can_punch: true,
            can_zero_range: true,
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

    /// Operations that are not done.
    pub(super) fn in_flight(&self) -> usize {
        self.running as usize + self.queue.len()
    }

    /// Whether these pieces of memory, together as long as the extent, can be transferred to or from
    /// it as they are.
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

    /// Starts an operation. Reads and writes use `memory`, which must be as long as the extent; or
    /// `pieces`, if there are any, which must be so together, and is left empty.
    ///
    /// # Safety
    /// The memory stays valid, and is used by nobody in a way that conflicts, until
    /// [`Disk::completed`] returns the operation, or as long as `keep` lives.
    pub(super) unsafe fn start(
        &mut self,
        ring: &mut Ring,
        tag: DiskTag,
        operation: DiskOperation,
        memory: *mut u8,
        pieces: &mut Vec<libc::iovec>,
        keep: Option<Keep>,
    ) {
        let range = |extent: Extent| (extent.start().byte_offset(), extent.bytes());
        let (work, (offset, length), fua) = match operation {
            DiskOperation::Read { extent, inspect } => (Work::Read(inspect), range(extent), false),
            DiskOperation::Write { extent, fua } => (Work::Write, range(extent), fua),
            DiskOperation::WriteZeroes { extent, fua, unmap } => {
                let first = if unmap {
                    ZeroWay::Punch
                } else {
                    ZeroWay::Range
                };
                (
                    Work::Zero {
                        first,
                        way: self.possible(first, first),
                    },
                    range(extent),
                    fua,
                )
            }
            DiskOperation::Flush => (Work::Sync, (0, 0), false),
        };
        // Two requests to the same block in flight, one of them through the page cache, could undo
        // each other: see `Image::buffered`.
        let writes = matches!(work, Work::Write | Work::Zero { .. });
        let exclusive = writes && !self.is_aligned(offset, length);
        let index = self.free.pop().unwrap_or(self.entries.len() as u32);
        // Space for pieces is used again.
        let mut room = match self.entries.get_mut(index as usize) {
            Some(last) => std::mem::take(&mut last.pieces),
            None => Vec::new(),
        };
        room.clear();
        std::mem::swap(&mut room, pieces);
        let entry = Entry {
            tag,
            work,
            fua,
            offset,
            length,
            done: 0,
            memory,
            pieces: room,
            keep,
            exclusive,
        };
        match self.entries.get_mut(index as usize) {
            Some(last) => *last = entry,
            None => self.entries.push(entry),
        }
        if self.queue.is_empty() && self.may_run(exclusive) {
            self.run(ring, index);
        } else {
            self.queue.push_back(index);
        }
    }

    /// The kernel finished a step. `None` when the operation goes on.
    pub(super) fn completed(
        &mut self,
        ring: &mut Ring,
        index: u32,
        result: i32,
    ) -> Option<Finished> {
        let entry = &self.entries[index as usize];
        let result = faults::result(entry.tag, entry.work.name(), result);
        let outcome = self.step(index, result);
        let Some(result) = outcome else {
            self.submit(ring, index);
            return None;
        };
        let entry = &mut self.entries[index as usize];
        let finished = Finished {
            tag: entry.tag,
            result,
        };
        entry.keep = None;
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

    const fn may_run(&self, exclusive: bool) -> bool {
        !self.exclusive_running && (!exclusive || self.running == 0)
    }

    fn run(&mut self, ring: &mut Ring, index: u32) {
        self.running += 1;
        self.exclusive_running |= self.entries[index as usize].exclusive;
        self.submit(ring, index);
    }

    /// What a step's result means: `None` to go on with what is left.
    fn step(&mut self, index: u32, result: i32) -> Option<Result<Content, RequestError>> {
        let (can_punch, can_zero_range) = (&mut self.can_punch, &mut self.can_zero_range);
        let entry = &mut self.entries[index as usize];
        if result < 0 {
            match -result {
                libc::EAGAIN | libc::EINTR => return None,
                libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL
                    if let Work::Zero { first, way } = entry.work
                        && way != ZeroWay::Write =>
                {
                    if way == ZeroWay::Punch {
                        *can_punch = false;
                    } else {
                        *can_zero_range = false;
                    }
                    let way = self.possible(first, way);
                    self.entries[index as usize].work = Work::Zero { first, way };
                    return None;
                }
                errno => return Some(Err(self.failed(index, errno))),
            }
        }
        let progress = match entry.work {
            Work::Zero {
                way: ZeroWay::Punch | ZeroWay::Range,
                ..
            } => entry.length - entry.done,
            Work::Sync => 0,
            _ => {
                let done = entry.done + result as u64;
                if done == entry.length {
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
        if entry.done < entry.length {
            skip(&mut entry.pieces, progress as usize);
            return None;
        }
        match entry.work {
            Work::Read(Inspect::Nothing) => Some(Ok(Content::Data)),
            Work::Read(inspect) => {
                // SAFETY: the read filled `length` bytes at `memory`, which `start`'s caller keeps
                // in place until this operation is reported.
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

    /// The best way to make zeroes that this image knows, beginning with `way`.
    const fn possible(&self, first: ZeroWay, way: ZeroWay) -> ZeroWay {
        match (first, way) {
            (ZeroWay::Punch, _) if self.can_punch => ZeroWay::Punch,
            (_, ZeroWay::Write) => ZeroWay::Write,
            _ if self.can_zero_range => ZeroWay::Range,
            _ if self.can_punch => ZeroWay::Punch,
            _ => ZeroWay::Write,
        }
    }

    fn failed(&self, index: u32, errno: i32) -> RequestError {
        let entry = &self.entries[index as usize];
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
        let entry = self.entry(index);
        // SAFETY: the entry uses the image's descriptors, which live as long as the ring is used;
        // the static zeroes, which nobody writes; or memory that `start`'s caller answers for.
        unsafe { ring.push(entry, Token::Disk(index)) };
    }

    fn entry(&self, index: u32) -> squeue::Entry {
        let entry = &self.entries[index as usize];
        let offset = entry.offset + entry.done;
        let rest = entry.length - entry.done;
        let file = match &self.image.buffered {
            Some(buffered) if !self.is_aligned(offset, rest) => buffered,
            _ => &self.image.file,
        };
        let fd = types::Fd(file.as_raw_fd());
        let memory = entry.memory.wrapping_add(entry.done as usize);
        let pieces = entry.pieces.as_ptr();
        let count = entry.pieces.len() as u32;
        match entry.work {
            Work::Read(_) if count > 0 => {
                opcode::Readv::new(fd, pieces, count).offset(offset).build()
            }
            Work::Write if count > 0 => opcode::Writev::new(fd, pieces, count)
                .offset(offset)
                .rw_flags(if entry.fua { libc::RWF_DSYNC } else { 0 })
                .build(),
            Work::Read(_) => opcode::Read::new(fd, memory, rest as u32)
                .offset(offset)
                .build(),
            Work::Write => opcode::Write::new(fd, memory, rest as u32)
                .offset(offset)
                .rw_flags(if entry.fua { libc::RWF_DSYNC } else { 0 })
                .build(),
            Work::Zero {
                way: ZeroWay::Write,
                ..
            } => {
                let piece = rest.min(ZERO_PIECE) as u32;
                opcode::Write::new(fd, self.zeroes.at(0), piece)
                    .offset(offset)
                    .build()
            }
            Work::Zero { way, .. } => {
                let mode = match way {
                    ZeroWay::Punch => libc::FALLOC_FL_PUNCH_HOLE,
                    _ => libc::FALLOC_FL_ZERO_RANGE,
                };
                opcode::Fallocate::new(fd, rest)
                    .offset(offset)
                    .mode(mode | libc::FALLOC_FL_KEEP_SIZE)
                    .build()
            }
            Work::Sync => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
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
