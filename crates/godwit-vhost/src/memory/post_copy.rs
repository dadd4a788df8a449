//! Guest memory that arrives while in use: the destination's side of post-copy.
//!
//! QEMU receives the pages and puts them into the shared memory. An access here to a missing page waits. QEMU learns of
//! the access through a shared descriptor, asks the source for the page, and wakes the waiter. The engine's thread
//! serves the guest's requests, so the engine waits. Nothing on the path of a page may depend on the engine, and the
//! protocol's thread must free the engine when QEMU is gone.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::memory::userfault::Userfault;
use crate::memory::{GuestRam, MemoryError};

/// Grace period of a front end after the report of complete memory, to prove that the front end lives on. QEMU also
/// reports complete memory after a failed arrival, and then exits.
const GRACE: Duration = Duration::from_secs(1);

const WHOLE: u8 = 0;
const ARRIVING: u8 = 1;
const LOST: u8 = 2;

/// The state of the guest memory's arrival.
#[derive(Debug, Default)]
pub struct Arrival(AtomicU8);

impl Arrival {
    /// Returns true if pages may be missing: an access may take a while, and end with [`Arrival::is_lost`].
    pub fn is_under_way(&self) -> bool {
        self.0.load(Ordering::Acquire) != WHOLE
    }

    /// Returns true if pages are missing for good. Earlier reads may have returned zeroes that the guest never wrote.
    pub fn is_lost(&self) -> bool {
        self.0.load(Ordering::Acquire) == LOST
    }
}

/// Checks that this process can serve guests whose memory arrives while they run.
///
/// # Errors
/// The reason for the refusal: needs `CAP_SYS_PTRACE`, access to `/dev/userfaultfd`, or `vm.unprivileged_userfaultfd`.
pub fn may_wait_for_pages() -> io::Result<()> {
    Userfault::new().map(drop)
}

/// Memory on the way. A drop before the front end's report of complete memory gives up the missing pages and ends all
/// waits for them.
pub(crate) struct PostCopy {
    faults: Userfault,
    arrival: Arc<Arrival>,
    /// Memory in use by the engine.
    current: Option<Arc<GuestRam>>,
    /// Memory for the engine once the front end is ready to serve its pages.
    next: Option<Arc<GuestRam>>,
    /// End of the front end's grace period.
    ends: Option<Instant>,
    /// True from the front end's announcement that memory is shared for its arrival to its report of complete memory.
    listens: bool,
}

impl PostCopy {
    /// Announces memory. Also returns the descriptor for the front end to watch.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn new() -> io::Result<(Self, File)> {
        let faults = Userfault::new()?;
        let shared = faults.share()?;
        let post_copy = Self {
            faults,
            arrival: Arc::new(Arrival(AtomicU8::new(ARRIVING))),
            current: None,
            next: None,
            ends: None,
            listens: false,
        };
        Ok((post_copy, shared))
    }

    /// Returns the state of the arrival, for users of the memory.
    pub(crate) fn arrival(&self) -> Arc<Arrival> {
        Arc::clone(&self.arrival)
    }

    /// Begins the time in which memory is shared for its arrival.
    pub(crate) const fn listen(&mut self) {
        self.listens = true;
    }

    /// Returns true if memory that is shared now arrives.
    pub(crate) const fn listens(&self) -> bool {
        self.listens
    }

    /// Returns the memory that was prepared last.
    pub(crate) fn latest(&self) -> Option<Arc<GuestRam>> {
        self.next.clone().or_else(|| self.current.clone())
    }

    /// Waits for the pages of this memory from now on. The memory must be untouched.
    ///
    /// # Errors
    /// The memory is of a kind whose pages cannot be waited for.
    pub(crate) fn prepare(&mut self, ram: GuestRam) -> Result<(), MemoryError> {
        for (start, length) in ram.regions().iter().map(|region| region.place()) {
            self.faults
                .register(start, length)
                .map_err(MemoryError::Faults)?;
        }
        self.next = Some(Arc::new(ram));
        Ok(())
    }

    /// Returns the prepared memory, whose pages the front end serves now. The memory before is no longer used.
    pub(crate) fn take_up(&mut self) -> Option<Arc<GuestRam>> {
        let ram = self.next.take()?;
        self.current = Some(Arc::clone(&ram));
        Some(ram)
    }

    /// Starts the grace period after the front end's report of complete memory.
    pub(crate) fn end(&mut self) {
        self.ends = Some(Instant::now() + GRACE);
        self.listens = false;
    }

    /// Returns the time for [`PostCopy::complete`], unless the front end leaves before.
    pub(crate) const fn ends(&self) -> Option<Instant> {
        self.ends
    }

    /// Marks the memory as complete.
    pub(crate) fn complete(self) {
        self.arrival.0.store(WHOLE, Ordering::Release);
    }
}

impl Drop for PostCopy {
    fn drop(&mut self) {
        // Marked before any waiter is freed and finds zeroes.
        let _ =
            self.arrival
                .0
                .compare_exchange(ARRIVING, LOST, Ordering::AcqRel, Ordering::Acquire);
        // The front end may hold the descriptor: closing it here would wake no waiter.
        for ram in self.current.iter().chain(&self.next) {
            for (start, length) in ram.regions().iter().map(|region| region.place()) {
                if let Err(error) = self.faults.unregister(start, length) {
                    tracing::error!("cannot let go of a guest's memory: {error}");
                }
            }
        }
    }
}

/// Returns true if the front end has hung up.
pub(crate) fn has_left(socket: &UnixStream) -> bool {
    look(socket, PollFlags::RDHUP, Duration::ZERO).is_some_and(|seen| !seen.is_empty())
}

/// Waits until `deadline` for a message or the end of the front end. Returns true if neither came.
pub(crate) fn is_silent_until(socket: &UnixStream, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    look(socket, PollFlags::IN | PollFlags::RDHUP, left).is_some_and(|seen| seen.is_empty())
}

/// Returns the events of the socket within this time; `None` if poll fails.
fn look(socket: &UnixStream, wanted: PollFlags, within: Duration) -> Option<PollFlags> {
    let mut polled = [PollFd::new(socket, wanted)];
    let timeout = Timespec::try_from(within).ok()?;
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout))).ok()?;
    Some(polled[0].revents())
}
