//! The engine's `io_uring`: disk and socket operations go in, completions come out.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

/// The operation of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The read of the command queue's event counter.
    Wake,
    /// An operation on the image: the index of its entry.
    Disk(u32),
    /// The receive operation of a connection: the connection's index.
    Receive(u32),
    /// The send operation of a connection: the connection's index.
    Send(u32),
    /// The watch on the event counter of a guest's notifications: the watch's index. Completes with each notification
    /// of new requests.
    Kick(u32),
    /// The write to an event counter that notifies the other side: the counter's index.
    Signal(u32),
    /// A request to cancel other operations.
    Cancel,
}

impl Token {
    const fn encode(self) -> u64 {
        let (kind, index) = match self {
            Self::Wake => (0, 0),
            Self::Disk(index) => (1, index),
            Self::Receive(index) => (2, index),
            Self::Send(index) => (3, index),
            Self::Cancel => (4, 0),
            Self::Kick(index) => (5, index),
            Self::Signal(index) => (6, index),
        };
        kind << 32 | index as u64
    }

    const fn decode(data: u64) -> Self {
        let index = data as u32;
        match data >> 32 {
            0 => Self::Wake,
            1 => Self::Disk(index),
            2 => Self::Receive(index),
            3 => Self::Send(index),
            5 => Self::Kick(index),
            6 => Self::Signal(index),
            _ => Self::Cancel,
        }
    }
}

/// A finished operation: a non-negative result, or a negated error number.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// Completed operation.
    pub token: Token,
    /// The kernel's result: not negative, or a negated error number.
    pub result: i32,
    /// True if the operation goes on and will complete again.
    pub more: bool,
}

/// Submission and completion queues of one thread.
pub struct Ring {
    ring: IoUring,
    /// Entries that found the submission queue full while the kernel would take no more.
    backlog: VecDeque<squeue::Entry>,
    in_flight: u32,
    /// Disk operations queued since the last submission to the kernel.
    unsubmitted_disk: u32,
    /// Disk operations submitted together.
    group: u32,
    /// True if the kernel is 6.1 or later.
    newest: bool,
}

/// Disk operations submitted together unless [`Ring::set_group`] says otherwise. Few: a client writing requests to a
/// socket one by one still writes the second while the disk works on the first.
pub const GROUP: u32 = 2;

const SUBMISSIONS: u32 = 512;
const COMPLETIONS: u32 = 8192;

impl Ring {
    /// Opens a ring for the calling thread only. Waits up to two seconds for memory: the kernel frees the memory of
    /// closed rings only after a while.
    pub fn new() -> io::Result<Self> {
        let mut attempts = 20;
        loop {
            match Self::open() {
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && attempts > 1 => {
                    attempts -= 1;
                    std::thread::sleep(Duration::from_millis(100));
                }
                opened => return opened,
            }
        }
    }

    fn open() -> io::Result<Self> {
        let newest = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(SUBMISSIONS);
        // Kernels before 6.1 know neither of the two modes.
        let is_newest = newest.is_ok();
        let ring = match newest {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::builder()
                .setup_cqsize(COMPLETIONS)
                .build(SUBMISSIONS)?,
            other => other?,
        };
        let parameters = ring.params();
        if !parameters.is_feature_submit_stable()
            || !parameters.is_feature_ext_arg()
            || !parameters.is_feature_nodrop()
        {
            return Err(io::Error::other(
                "the kernel's io_uring is too old: Linux 5.11 is needed",
            ));
        }
        Ok(Self {
            ring,
            backlog: VecDeque::new(),
            in_flight: 0,
            unsubmitted_disk: 0,
            group: GROUP,
            newest: is_newest,
        })
    }

    /// Queues an operation. Submits earlier operations once they make a group for the disk.
    ///
    /// # Safety
    /// The memory of the operation stays valid, and no other code uses the memory in a conflicting way, until
    /// [`Ring::completions`] has returned the completion.
    pub unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.encode());
        self.in_flight += 1;
        if matches!(token, Token::Disk(_)) {
            if self.unsubmitted_disk >= self.group {
                self.submit();
            }
            self.unsubmitted_disk += 1;
        }
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.submit();
            self.drain_backlog();
            if !self.backlog.is_empty() || !self.try_push(&entry) {
                self.backlog.push_back(entry);
            }
        }
    }

    /// Sets the number of disk operations in a group from now on. The kernel starts nothing of a group before the last
    /// operation is prepared, and the disk waits meanwhile. Groups of one cost a call each; large groups leave the disk
    /// idle and its answers bunched.
    pub const fn set_group(&mut self, operations: u32) {
        self.group = operations;
    }

    /// Returns the flag that makes a receive operation wait for a readable socket before the first attempt. Returns
    /// zero if the kernel may not know the flag.
    pub const fn wait_before_receiving(&self) -> u16 {
        const IORING_RECVSEND_POLL_FIRST: u16 = 1;
        if self.newest {
            IORING_RECVSEND_POLL_FIRST
        } else {
            0
        }
    }

    /// Asks the kernel to cancel every operation with the token.
    pub fn cancel(&mut self, token: Token) {
        let entry = opcode::AsyncCancel::new(token.encode()).build();
        // SAFETY: cancelling uses no memory.
        unsafe { self.push(entry, Token::Cancel) };
    }

    /// Returns the number of queued operations whose last completion has not been returned.
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Submits the queue and waits for a completion, at most `timeout` long.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.drain_backlog();
        self.unsubmitted_disk = 0;
        let waiting = self.ring.completion().is_empty();
        let result = match timeout {
            _ if !waiting => self.ring.submit(),
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                let timespec = Timespec::from(timeout);
                let args = SubmitArgs::new().timespec(&timespec);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // The timeout; a signal; or completions must be taken first.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Moves completions into `into` and returns their number.
    pub fn completions(&mut self, into: &mut [Completion]) -> usize {
        let (mut count, mut ended) = (0, 0);
        for (place, entry) in into.iter_mut().zip(&mut self.ring.completion()) {
            *place = Completion {
                token: Token::decode(entry.user_data()),
                result: entry.result(),
                more: cqueue::more(entry.flags()),
            };
            count += 1;
            ended += u32::from(!place.more);
        }
        self.in_flight -= ended;
        count
    }

    /// Waits for one completion and takes it.
    ///
    /// # Errors
    /// The errors of [`Ring::wait`].
    pub fn next_completion(&mut self) -> io::Result<Completion> {
        let mut one = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }];
        while self.completions(&mut one) == 0 {
            self.wait(None)?;
        }
        Ok(one[0])
    }

    /// Submits the queue. A failure shows again, and is handled, in [`Ring::wait`].
    fn submit(&mut self) {
        self.unsubmitted_disk = 0;
        let _ = self.ring.submit();
    }

    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller of `push` answers for the memory that the entry names.
        unsafe { self.ring.submission().push(entry).is_ok() }
    }

    fn drain_backlog(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            if !self.try_push(&entry) {
                self.backlog.push_front(entry);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        for token in [
            Token::Wake,
            Token::Disk(7),
            Token::Receive(u32::MAX),
            Token::Send(0),
            Token::Cancel,
        ] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }

    #[test]
    fn more_operations_than_the_queue_holds_all_complete() {
        let mut ring = Ring::new().expect("a ring");
        let count = 3 * SUBMISSIONS + 5;
        for index in 0..count {
            // SAFETY: a no-op uses no memory.
            unsafe { ring.push(opcode::Nop::new().build(), Token::Disk(index)) };
        }
        let mut seen = vec![false; count as usize];
        let mut batch = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }; 64];
        while ring.in_flight() > 0 {
            ring.wait(Some(Duration::from_secs(1))).expect("a wait");
            let taken = ring.completions(&mut batch);
            for completion in &batch[..taken] {
                let Token::Disk(index) = completion.token else {
                    panic!("a foreign token")
                };
                assert!(!std::mem::replace(&mut seen[index as usize], true));
            }
        }
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn the_disk_gets_work_before_the_engine_waits() {
        let mut ring = Ring::new().expect("a ring");
        let mut batch = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }; 64];
        for index in 0..2 * GROUP {
            // SAFETY: a no-op uses no memory.
            unsafe { ring.push(opcode::Nop::new().build(), Token::Send(index)) };
        }
        assert_eq!(ring.completions(&mut batch), 0, "only the disk is urgent");
        for index in 0..2 * GROUP {
            // SAFETY: as above.
            unsafe { ring.push(opcode::Nop::new().build(), Token::Disk(index)) };
        }
        let done = ring.completions(&mut batch);
        assert_eq!(done as u32, 3 * GROUP, "all but the last group");
    }

    #[test]
    fn waiting_ends_with_the_timeout() {
        let mut ring = Ring::new().expect("a ring");
        ring.wait(Some(Duration::from_millis(1))).expect("a wait");
        assert_eq!(ring.completions(&mut []), 0);
    }
}
