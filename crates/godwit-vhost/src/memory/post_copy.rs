//! Guest memory that arrives while it is used: the destination's side of post-copy.
//!
//! QEMU receives the pages and puts them into the memory that it shares. Whoever here touches one
//! that has not arrived waits; QEMU learns of it through a descriptor that it was given, asks the
//! source for the page, and wakes the waiting. Requests of the guest are served by the engine's
//! thread, so it is the engine that waits: nothing that brings a page may depend on it, and it is
//! up to the protocol's thread to free it when QEMU is gone.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::memory::userfault::Userfault;
use crate::memory::{GuestRam, MemoryError};

/// How long a front end that says that all pages are there has to prove that it lives on. QEMU says
/// so, too, when it has failed to receive them, and then exits.
const GRACE: Duration = Duration::from_secs(1);

const WHOLE: u8 = 0;
const ARRIVING: u8 = 1;
const LOST: u8 = 2;

/// How much of the guest's memory is there.
#[derive(Debug, Default)]
pub struct Arrival(AtomicU8);

impl Arrival {
    /// Pages may be missing: touching them may take a while, and end with [`Arrival::is_lost`].
    pub fn is_under_way(&self) -> bool {
        self.0.load(Ordering::Acquire) != WHOLE
    }

    /// Pages are missing and will not come. What was read from the memory before this was asked for
    /// may be zeroes that the guest never wrote.
    pub fn is_lost(&self) -> bool {
        self.0.load(Ordering::Acquire) == LOST
    }
}

/// Whether this process can serve guests whose memory arrives while they run.
///
/// # Errors
/// Why it cannot: it needs `CAP_SYS_PTRACE`, access to `/dev/userfaultfd`, or
/// `vm.unprivileged_userfaultfd`.
pub fn may_wait_for_pages() -> io::Result<()> {
    Userfault::new().map(drop)
}

/// Memory on its way. When it is dropped before the front end has said that all is there, what is
/// missing is lost, and nobody waits for it any more.
pub(crate) struct PostCopy {
    faults: Userfault,
    arrival: Arc<Arrival>,
    /// What the engine uses.
    current: Option<Arc<GuestRam>>,
    /// What it is to use when the front end is ready to serve it.
    next: Option<Arc<GuestRam>>,
    /// Until when the front end must not have left.
    ends: Option<Instant>,
}

impl PostCopy {
    /// Memory that is announced, and what the front end is to watch.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn new() -> io::Result<(Self, File)> {
        let faults = Userfault::new()?;
        let shared = faults.share()?;
        let post_copy = Self {
            faults,
            arrival: Arc::new(Arrival(AtomicU8::new(ARRIVING))),
            current: None,
            next: None,
            ends: None,
        };
        Ok((post_copy, shared))
    }

    /// What is known of the memory, for whoever uses it.
    pub(crate) fn arrival(&self) -> Arc<Arrival> {
        Arc::clone(&self.arrival)
    }

    /// Waits for the pages of this memory from now on. Nobody may have touched it.
    ///
    /// # Errors
    /// When the memory is of a kind whose pages cannot be waited for.
    pub(crate) fn prepare(&mut self, ram: GuestRam) -> Result<(), MemoryError> {
        for (start, length) in ram.places() {
            self.faults
                .register(start, length)
                .map_err(MemoryError::Faults)?;
        }
        self.next = Some(Arc::new(ram));
        Ok(())
    }

    /// The memory that was prepared, which the front end serves now. Nobody uses the one before any
    /// more.
    pub(crate) fn take_up(&mut self) -> Option<Arc<GuestRam>> {
        let ram = self.next.take()?;
        self.current = Some(Arc::clone(&ram));
        Some(ram)
    }

    /// The front end says that all pages are there.
    pub(crate) fn end(&mut self) {
        self.ends = Some(Instant::now() + GRACE);
    }

    /// When to call [`PostCopy::complete`] unless the front end has left by then.
    pub(crate) const fn ends(&self) -> Option<Instant> {
        self.ends
    }

    /// All pages are there.
    pub(crate) fn complete(self) {
        self.arrival.0.store(WHOLE, Ordering::Release);
    }
}

impl Drop for PostCopy {
    fn drop(&mut self) {
        // Before anybody is let go who then finds zeroes.
        let _ =
            self.arrival
                .0
                .compare_exchange(ARRIVING, LOST, Ordering::AcqRel, Ordering::Acquire);
        // The front end may hold the descriptor: closing it here would wake nobody.
        for ram in self.current.iter().chain(&self.next) {
            for (start, length) in ram.places() {
                if let Err(error) = self.faults.unregister(start, length) {
                    tracing::error!("cannot let go of a guest's memory: {error}");
                }
            }
        }
    }
}

/// Whether the front end has hung up.
pub(crate) fn has_left(socket: &UnixStream) -> bool {
    look(socket, PollFlags::RDHUP, Duration::ZERO).is_some_and(|seen| !seen.is_empty())
}

/// Waits for a message or the front end's end, at most until then. True when there is neither.
pub(crate) fn is_silent_until(socket: &UnixStream, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    look(socket, PollFlags::IN | PollFlags::RDHUP, left).is_some_and(|seen| seen.is_empty())
}

/// What of this happens to the socket within this time; `None` when it cannot be told.
fn look(socket: &UnixStream, wanted: PollFlags, within: Duration) -> Option<PollFlags> {
    let mut polled = [PollFd::new(socket, wanted)];
    let timeout = Timespec::try_from(within).ok()?;
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout))).ok()?;
    Some(polled[0].revents())
}
