//! The driver's side of a split virtqueue.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::memory::SharedMemory;

/// The next descriptor of the chain is named.
pub const NEXT: u16 = 1;
/// The device writes there.
pub const WRITE: u16 = 2;
/// The descriptor names a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Bytes of shared memory that a queue takes.
pub const QUEUE_BYTES: u64 = 256 << 10;

const AVAILABLE: u64 = 0x5000;
const USED: u64 = 0x8000;
const HEADERS: u64 = 0xc000;
const STATUSES: u64 = 0x1_0000;
const TABLES: u64 = 0x1_1000;
/// Descriptors in each table.
const TABLE: u64 = 8;

/// A piece of a request.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// The device writes there.
    pub writable: bool,
}

/// A request that the device has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The descriptor at which it started.
    pub head: u16,
    /// Bytes that the device says it wrote.
    pub written: u32,
}

/// A split virtqueue of up to 1024 descriptors.
#[derive(Debug)]
pub struct Queue {
    memory: Arc<SharedMemory>,
    /// Offset of the queue in the memory.
    start: u64,
    /// Guest-physical address of the memory.
    base: u64,
    size: u16,
    event_index: bool,
    /// Descriptors not in use.
    free: Vec<u16>,
    /// Those used by the request that starts at each.
    chains: Vec<Vec<u16>>,
    available: u16,
    /// Value of `available` when the device was last told.
    told: u16,
    seen: u16,
    /// Written when there are requests.
    pub kick: EventFd,
    /// Readable when there are answers.
    pub call: EventFd,
    /// Readable when the device says that the queue is broken.
    pub error: EventFd,
    /// Times that the device was told of requests.
    pub kicks: u64,
}

impl Queue {
    /// A queue at `start` of memory that the guest has at `base`.
    ///
    /// # Errors
    /// When the kernel refuses an event counter.
    pub fn new(
        memory: Arc<SharedMemory>,
        start: u64,
        base: u64,
        size: u16,
        event_index: bool,
    ) -> io::Result<Self> {
        let counter = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        Ok(Self {
            memory,
            start,
            base,
            size,
            event_index,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            available: 0,
            told: 0,
            seen: 0,
            kick: counter()?,
            call: counter()?,
            error: counter()?,
            kicks: 0,
        })
    }

    /// Descriptors in it.
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Descriptors not in use.
    pub const fn unused(&self) -> usize {
        self.free.len()
    }

    /// Requests made available, modulo 65536.
    pub const fn available(&self) -> u16 {
        self.available
    }

    /// Requests that the device says it has answered, modulo 65536.
    pub fn used(&self) -> u16 {
        self.memory.load(self.start + USED + 2)
    }

    /// Offsets in the memory of the descriptors, the available ring and the used ring.
    pub const fn places(&self) -> [u64; 3] {
        [self.start, self.start + AVAILABLE, self.start + USED]
    }

    /// Bytes of the used ring, with the event index behind it.
    pub const fn used_bytes(&self) -> u64 {
        6 + 8 * self.size as u64
    }

    /// Offset in the memory of the header that belongs to a descriptor.
    pub const fn header(&self, head: u16) -> u64 {
        self.start + HEADERS + 16 * head as u64
    }

    /// Offset in the memory of the status that belongs to a descriptor.
    pub const fn status(&self, head: u16) -> u64 {
        self.start + STATUSES + head as u64
    }

    /// Writes a descriptor as it is: also what makes no sense.
    pub fn put(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        self.put_at(
            self.start + 16 * u64::from(index),
            address,
            length,
            flags,
            next,
        );
    }

    fn put_at(&self, place: u64, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write(place, &bytes);
    }

    /// Makes the chain at `head` available as it is.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.available % self.size);
        self.memory
            .store(self.start + AVAILABLE + 4 + 2 * slot, head);
        self.available = self.available.wrapping_add(1);
        self.memory
            .store(self.start + AVAILABLE + 2, self.available);
    }

    /// Says that so many requests were made available, whether they were or not.
    pub fn claim(&self, available: u16) {
        self.memory.store(self.start + AVAILABLE + 2, available);
    }

    /// Lays out a request, makes it available and returns its head. The header and status are
    /// those of the head. `None` when there are too few descriptors.
    pub fn request(&mut self, header: [u8; 16], data: &[Part], indirect: bool) -> Option<u16> {
        let needed = if indirect { 1 } else { data.len() + 2 };
        assert!(
            !indirect || data.len() as u64 + 2 <= TABLE,
            "too long a table"
        );
        if self.free.len() < needed {
            return None;
        }
        let used = self.free.split_off(self.free.len() - needed);
        let head = used[0];
        self.memory.write(self.header(head), &header);
        self.memory.write(self.status(head), &[0xff]);
        let part = |offset, length, writable| Part {
            address: self.base + offset,
            length,
            writable,
        };
        let first = part(self.header(head), 16, false);
        let last = part(self.status(head), 1, true);
        let parts = [first]
            .into_iter()
            .chain(data.iter().copied())
            .chain([last]);
        let count = data.len() as u16 + 2;
        let table = self.start + TABLES + 16 * TABLE * u64::from(head);
        for (number, part) in (0..count).zip(parts) {
            let more = if number + 1 < count { NEXT } else { 0 };
            let flags = more | if part.writable { WRITE } else { 0 };
            if indirect {
                let place = table + 16 * u64::from(number);
                self.put_at(place, part.address, part.length, flags, number + 1);
            } else {
                let next = used.get(usize::from(number) + 1).copied().unwrap_or(0);
                let index = used[usize::from(number)];
                self.put(index, part.address, part.length, flags, next);
            }
        }
        if indirect {
            self.put(head, self.base + table, 16 * u32::from(count), INDIRECT, 0);
        }
        self.chains[usize::from(head)] = used;
        self.offer(head);
        Some(head)
    }

    /// Tells the device of new requests, unless it does not want to know. True when it was told.
    pub fn notify(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let wanted = if self.event_index {
            let event = self
                .memory
                .load(self.start + USED + 4 + 8 * u64::from(self.size));
            let (new, old) = (self.available, self.told);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.memory.load(self.start + USED) & 1 == 0
        };
        self.told = self.available;
        if wanted {
            self.kick.write(1).expect("a kick");
            self.kicks += 1;
        }
        wanted
    }

    /// The next request that the device has finished.
    pub fn done(&mut self) -> Option<Done> {
        if self.used() == self.seen {
            return None;
        }
        let place = self.start + USED + 4 + 8 * u64::from(self.seen % self.size);
        let mut bytes = [0; 8];
        self.memory.read(place, &mut bytes);
        let [i0, i1, i2, i3, written @ ..] = bytes;
        let head = u16::try_from(u32::from_le_bytes([i0, i1, i2, i3])).expect("a descriptor");
        self.seen = self.seen.wrapping_add(1);
        if let Some(used) = self.chains.get_mut(usize::from(head)) {
            self.free.append(used);
        }
        Some(Done {
            head,
            written: u32::from_le_bytes(written),
        })
    }

    /// Asks to be told when the device answers the request after the last one seen. True when it
    /// has already.
    pub fn listen(&self) -> bool {
        if self.event_index {
            let place = self.start + AVAILABLE + 4 + 2 * u64::from(self.size);
            self.memory.store(place, self.seen);
        }
        fence(Ordering::SeqCst);
        self.used() != self.seen
    }

    /// Waits until the device has finished a request, and returns it. `None` when time is over.
    pub fn wait(&mut self, patience: Duration) -> Option<Done> {
        loop {
            if let Some(done) = self.done() {
                return Some(done);
            }
            if self.listen() {
                continue;
            }
            if !readable(&self.call, patience) {
                return self.done();
            }
            let _ = self.call.read();
        }
    }
}

/// Waits until an event counter is not zero. False when time is over.
pub fn readable(counter: &EventFd, patience: Duration) -> bool {
    let raw = std::os::fd::AsRawFd::as_raw_fd(counter);
    // SAFETY: the counter is open for as long as it is borrowed.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(raw) };
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    let timeout = Timespec::try_from(patience).expect("a timeout");
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}
