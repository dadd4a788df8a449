//! The driver's side of a split virtqueue.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::memory::SharedMemory;

/// Flag of a descriptor that names the next one of its chain.
pub const NEXT: u16 = 1;
/// Flag of a descriptor that the device writes to.
pub const WRITE: u16 = 2;
/// Flag of a descriptor that names a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Bytes of shared memory for a queue.
pub const QUEUE_BYTES: u64 = 256 << 10;

const AVAILABLE: u64 = 0x5000;
const USED: u64 = 0x8000;
const HEADERS: u64 = 0xc000;
const STATUSES: u64 = 0x1_0000;
const TABLES: u64 = 0x1_1000;
/// Descriptors in each table.
const TABLE: u64 = 8;

#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Guest-physical address.
    pub address: u64,
    pub length: u32,
    /// True if the device writes there.
    pub writable: bool,
}

/// A finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The descriptor at which the request started.
    pub head: u16,
    /// Bytes written, as the device reports.
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
    /// Descriptors in use, by the head of their request.
    chains: Vec<Vec<u16>>,
    available: u16,
    /// Value of `available` at the last kick decision.
    told: u16,
    seen: u16,
    /// Written when there are requests.
    pub kick: EventFd,
    /// Readable when there are answers.
    pub call: EventFd,
    /// Readable when the device reports a broken queue.
    pub error: EventFd,
    pub kicks: u64,
}

impl Queue {
    /// Creates a queue at `start` of memory that the guest has at `base`.
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

    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Returns the number of descriptors not in use.
    pub const fn unused(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of requests made available, modulo 65536.
    pub const fn available(&self) -> u16 {
        self.available
    }

    /// Returns the number of requests answered, as the device reports, modulo 65536.
    pub fn used(&self) -> u16 {
        self.memory.load(self.start + USED + 2)
    }

    /// Returns the offsets in the memory of the descriptors, the available ring and the used ring.
    pub const fn places(&self) -> [u64; 3] {
        [self.start, self.start + AVAILABLE, self.start + USED]
    }

    /// Returns the bytes of the used ring, with the event index behind it.
    pub const fn used_bytes(&self) -> u64 {
        6 + 8 * self.size as u64
    }

    /// Returns the offset in the memory of a descriptor's header.
    pub const fn header(&self, head: u16) -> u64 {
        self.start + HEADERS + 16 * head as u64
    }

    /// Returns the offset in the memory of a descriptor's status.
    pub const fn status(&self, head: u16) -> u64 {
        self.start + STATUSES + head as u64
    }

    /// Writes a descriptor as given, even an invalid one.
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

    /// Makes the chain at `head` available unchanged.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.available % self.size);
        self.memory
            .store(self.start + AVAILABLE + 4 + 2 * slot, head);
        self.available = self.available.wrapping_add(1);
        self.memory
            .store(self.start + AVAILABLE + 2, self.available);
    }

    /// Sets the available index as given, whether or not as many requests were made available.
    pub fn claim(&self, available: u16) {
        self.memory.store(self.start + AVAILABLE + 2, available);
    }

    /// Lays out a request, makes the chain available and returns the head. The header and status are those of the head.
    /// Returns `None` if there are too few descriptors.
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

    /// Notifies the device of new requests, unless the device suppresses notifications. Returns true after a
    /// notification.
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

    /// Returns the next finished request.
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

    /// Asks for a notification when the device answers the request after the last one seen. Returns true if the answer
    /// is already there.
    pub fn listen(&self) -> bool {
        if self.event_index {
            let place = self.start + AVAILABLE + 4 + 2 * u64::from(self.size);
            self.memory.store(place, self.seen);
        }
        fence(Ordering::SeqCst);
        self.used() != self.seen
    }

    /// Waits for the next finished request; returns `None` on timeout.
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

/// Waits until an event counter is not zero; returns false on timeout.
pub fn readable(counter: &EventFd, patience: Duration) -> bool {
    let raw = std::os::fd::AsRawFd::as_raw_fd(counter);
    // SAFETY: the counter is open for as long as it is borrowed.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(raw) };
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    let timeout = Timespec::try_from(patience).expect("a timeout");
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}
