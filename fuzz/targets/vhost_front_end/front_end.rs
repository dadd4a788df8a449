//! The front end: it sends what its script says, and heeds no answer.

use std::ffi::CStr;
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::script::{Attached, Script, Step};

/// Event counters that a script can name.
pub(crate) const COUNTERS: usize = 4;

/// Bytes of the guest's memory.
const MEMORY: u64 = 128 << 10;

/// Where the second half of a script's memory is: what an area for requests in flight begins with.
const SECOND: usize = 4096;

/// Bytes of the script's memory that go to the start of the guest's.
const FIRST_LENGTH: usize = 1024;

/// Descriptors that the kernel lets a message have.
const MOST_DESCRIPTORS: usize = 253;

/// How long the server gets to deal with what was sent. It may be waiting for the front end, which
/// is why this is not an error.
const LULL: Duration = Duration::from_millis(10);

const GET_FEATURES: u32 = 1;

/// The only version of the protocol.
const VERSION: u32 = 1;

/// A message as it should be.
pub(crate) fn message(code: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [code, VERSION, payload.len() as u32]
        .map(u32::to_le_bytes)
        .concat();
    bytes.extend_from_slice(payload);
    bytes
}

/// Plays a script to its end.
pub(crate) fn play(socket: UnixStream, script: &Script<'_>) {
    let mut front_end = FrontEnd::new(socket, script);
    for step in &script.steps {
        front_end.take(step);
        front_end.drain();
    }
    if script.abrupt {
        return;
    }
    front_end.wait();
    let _ = front_end.socket.shutdown(Shutdown::Write);
    front_end.drain();
}

struct FrontEnd {
    socket: UnixStream,
    memory: File,
    counters: [OwnedFd; COUNTERS],
}

impl FrontEnd {
    fn new(socket: UnixStream, script: &Script<'_>) -> Self {
        socket.set_nonblocking(true).expect("a socket");
        let memory = sealed(c"fuzz", MEMORY);
        let (first, second) = script
            .memory
            .split_at(script.memory.len().min(FIRST_LENGTH));
        memory.write_all_at(first, 0).expect("memory");
        memory.write_all_at(second, SECOND as u64).expect("memory");
        Self {
            socket,
            memory,
            counters: std::array::from_fn(|_| counter(EventfdFlags::NONBLOCK)),
        }
    }

    fn take(&mut self, step: &Step<'_>) {
        match step {
            Step::Send {
                header,
                payload,
                attached,
            } => {
                let mut bytes = header.map_or_else(Vec::new, |h| h.map(u32::to_le_bytes).concat());
                bytes.extend_from_slice(payload);
                self.send(&bytes, *attached);
            }
            Step::Kick(index) => {
                let _ = rustix::io::write(&self.counters[*index], &1_u64.to_ne_bytes());
            }
            Step::Poke { offset, bytes } => {
                let room = MEMORY as usize - offset;
                let bytes = &bytes[..bytes.len().min(room)];
                self.memory
                    .write_all_at(bytes, *offset as u64)
                    .expect("memory");
            }
            Step::Wait => self.wait(),
        }
    }

    /// Sends what there is; when the server has hung up, that is its right.
    fn send(&self, bytes: &[u8], attached: Attached) {
        let made;
        let descriptors: Vec<BorrowedFd<'_>> = match attached {
            Attached::Nothing => Vec::new(),
            Attached::Counter(index) => vec![self.counters[index].as_fd()],
            Attached::Memory(times) => vec![self.memory.as_fd(); times],
            Attached::Many(times) => {
                vec![self.counters[0].as_fd(); times.min(MOST_DESCRIPTORS)]
            }
            Attached::FullCounter => {
                let full = counter(EventfdFlags::empty());
                rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("a counter");
                made = full;
                vec![made.as_fd()]
            }
            Attached::File => {
                made = File::open("/proc/self/exe").expect("a file").into();
                vec![made.as_fd()]
            }
            Attached::Socket => {
                made = UnixStream::pair().expect("sockets").0.into();
                vec![made.as_fd()]
            }
            Attached::Zeroes => {
                made = sealed(c"zeroes", MEMORY).into();
                vec![made.as_fd()]
            }
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let pushed = rights.push(SendAncillaryMessage::ScmRights(&descriptors));
            assert!(pushed, "room for descriptors");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut rights, flags);
    }

    /// Throws away what has been answered, with its descriptors.
    fn drain(&mut self) {
        let mut bytes = [0; 4096];
        while matches!(self.socket.read(&mut bytes), Ok(1..)) {}
    }

    /// Gives the server time for what was sent: until it answers one more message, or hangs up.
    fn wait(&mut self) {
        self.drain();
        let asked = message(GET_FEATURES, &[]);
        if !matches!(self.socket.write(&asked), Ok(12)) {
            return;
        }
        let deadline = Instant::now() + LULL;
        let mut tail = Vec::new();
        self.socket.set_nonblocking(false).expect("a socket");
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.socket.set_read_timeout(Some(left)).is_err() {
                break;
            }
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes) {
                Ok(length @ 1..) => tail.extend_from_slice(&bytes[..length]),
                _ => break,
            }
            // Its answer is the last: a header of 12 bytes and the features.
            let last = tail.len().checked_sub(20).map(|start| &tail[start..]);
            if last.is_some_and(|last| last[..4] == asked[..4] && last[8..12] == [8, 0, 0, 0]) {
                break;
            }
        }
        self.socket.set_nonblocking(true).expect("a socket");
    }
}

/// Memory that nobody can make shorter: what a front end that is not trusted must share.
pub(crate) fn sealed(name: &CStr, length: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags).expect("a file"));
    file.set_len(length).expect("a size");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("a seal");
    file
}

/// An event counter at zero.
pub(crate) fn counter(flags: EventfdFlags) -> OwnedFd {
    eventfd(0, flags | EventfdFlags::CLOEXEC).expect("a counter")
}
