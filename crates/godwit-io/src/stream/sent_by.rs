//! The thread that sends.
//!
//! A send operation of half a megabyte takes 0.1 ms and more: the copy into the socket, and on loopback the receiving
//! half of the network too. A guest's requests wait as long if the thread that serves the guest sends.

use io_uring::squeue;

/// Bytes from which a worker pays: a wake-up costs some 10 µs.
const WORKER: usize = 64 << 10;

/// The thread that copies into the socket and runs the network stack meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SentBy {
    /// The thread that submits the operation, which does nothing else meanwhile.
    Caller,
    /// A kernel thread of this ring, if the operation is large.
    Worker,
}

/// The use of workers by one connection.
#[derive(Debug, Default)]
pub(super) struct Workers {
    /// True while a worker has the operation in flight.
    asked: bool,
    /// True if the kernel could not start a worker: too many threads run already.
    missing: bool,
}

impl Workers {
    /// Returns the flags of the next operation, which sends `bytes` bytes.
    pub(super) fn flags(&mut self, by: SentBy, bytes: usize) -> squeue::Flags {
        let by = if self.missing { SentBy::Caller } else { by };
        let flags = by.flags(bytes);
        self.asked = !flags.is_empty();
        flags
    }

    /// Returns true if the operation ended with `error` for lack of a worker. From then on the caller sends.
    pub(super) fn is_missing(&mut self, error: i32) -> bool {
        let missing = self.asked && -error == libc::ECANCELED;
        self.missing |= missing;
        missing
    }
}

impl SentBy {
    /// Returns the flags of an operation of `bytes` bytes.
    fn flags(self, bytes: usize) -> squeue::Flags {
        match self {
            Self::Worker if bytes >= WORKER => squeue::Flags::ASYNC,
            _ => squeue::Flags::empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use io_uring::{opcode, types};

    use super::*;
    use crate::ring::{Ring, Token};

    static DATA: [u8; WORKER] = [7; WORKER];

    /// Sends `bytes` bytes. Returns true if a worker of this thread's ring did: the kernel names the worker after the
    /// thread.
    fn sends_by_worker(by: SentBy, bytes: usize) -> bool {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let reader = std::thread::spawn(move || {
            let mut data = vec![0; bytes];
            theirs.read_exact(&mut data).expect("all of it");
        });
        let mut ring = Ring::new().expect("a ring");
        let mut sent = 0;
        while sent < bytes {
            let part = &DATA[sent..bytes];
            let entry = opcode::Send::new(
                types::Fd(ours.as_raw_fd()),
                part.as_ptr(),
                part.len() as u32,
            );
            let entry = entry.build().flags(by.flags(bytes));
            // SAFETY: the data is static and never changes.
            unsafe { ring.push(entry, Token::Send(0)) };
            sent += usize::try_from(ring.next_completion().expect("a wait").result).expect("sent");
        }
        reader.join().expect("a reader");
        let worker = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
        let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .any(|name| name.trim_end() == worker)
    }

    #[test]
    fn without_a_worker_the_caller_sends() {
        let mut workers = Workers::default();
        let asked = squeue::Flags::ASYNC;
        assert_eq!(
            workers.flags(SentBy::Caller, WORKER),
            squeue::Flags::empty()
        );
        assert!(!workers.is_missing(-libc::ECANCELED), "none was asked");
        assert_eq!(workers.flags(SentBy::Worker, WORKER), asked);
        assert!(!workers.is_missing(-libc::EPIPE));
        assert_eq!(workers.flags(SentBy::Worker, WORKER), asked);
        assert!(workers.is_missing(-libc::ECANCELED));
        assert_eq!(
            workers.flags(SentBy::Worker, WORKER),
            squeue::Flags::empty()
        );
        assert!(!workers.is_missing(-libc::ECANCELED), "again and again");
    }

    #[test]
    fn a_worker_sends_what_is_much_and_nothing_else() {
        assert!(!sends_by_worker(SentBy::Caller, WORKER));
        assert!(!sends_by_worker(SentBy::Worker, WORKER - 1));
        assert!(sends_by_worker(SentBy::Worker, WORKER));
    }
}
