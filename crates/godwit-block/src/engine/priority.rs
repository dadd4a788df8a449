//! The priority of a disk's thread: ahead of others while the disk leaves the node.
//!
//! A move's copies, encryption and bookkeeping compete with the guest for the processors, so the thread that answers
//! the guest goes first. Without a move the ordinary priority is better: a thread that runs at once interrupts a guest
//! that is still handing over its requests. The thread of an arriving disk serves no guest yet, and the guests of other
//! disks may work beside it.

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// Three times the share of an ordinary thread where processors are short: enough to run next, and not enough to let a
/// busy disk starve the guests.
const NICE: i32 = -5;

/// The `nice` value of the owning thread.
#[derive(Debug, Default)]
pub(super) struct Priority {
    /// Value from before, while the disk leaves.
    before: Option<i32>,
}

impl Priority {
    /// Lets the calling thread run before others while the disk leaves. Keeps a better value that the thread already
    /// has. Costs a comparison unless a move begins or ends.
    ///
    /// # Errors
    /// The system does not allow the better value, which takes `CAP_SYS_NICE` or `RLIMIT_NICE`. Returned once a move.
    #[inline]
    pub(super) fn follow(&mut self, leaves: bool) -> io::Result<()> {
        if leaves == self.before.is_some() {
            return Ok(());
        }
        let nice = if let Some(before) = self.before.take() {
            before
        } else {
            // Without permission to ask, the ordinary value is the one to return to.
            let own = getpriority_process(None).unwrap_or(0);
            self.before = Some(own);
            own.min(NICE)
        };
        Ok(setpriority_process(None, nice)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_better_value_that_the_thread_has_stays() {
        let better = NICE - 5;
        if setpriority_process(None, better).is_err() {
            return;
        }
        let mut priority = Priority::default();
        for leaves in [true, false] {
            priority.follow(leaves).expect("no change");
            assert_eq!(getpriority_process(None), Ok(better));
        }
    }
}
