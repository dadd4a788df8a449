//! When a disk's thread runs: before others while the disk leaves the node.
//!
//! A move's copies, encryption and bookkeeping compete with the guest for the processors, so who
//! answers the guest goes first. Without a move the ordinary order is the better one: a thread that
//! runs at once interrupts the guest that is still handing over its requests. And who receives a disk
//! answers nobody yet, while other disks' guests may work beside it.

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// Three times the share of an ordinary thread where processors are short: enough to be the next
/// that runs, and not so much that a busy disk starves the guests.
const NICE: i32 = -5;

/// The `nice` value of the thread that owns this.
#[derive(Debug, Default)]
pub(super) struct Priority {
    /// While the disk leaves: what the thread had before.
    before: Option<i32>,
}

impl Priority {
    /// Lets the calling thread run before others while the disk leaves. A better value that it
    /// already has stays. Costs a comparison unless a move begins or ends.
    ///
    /// # Errors
    /// When the system does not allow the better value, which takes `CAP_SYS_NICE` or
    /// `RLIMIT_NICE`. That is said once a move.
    #[inline]
    pub(super) fn follow(&mut self, leaves: bool) -> io::Result<()> {
        if leaves == self.before.is_some() {
            return Ok(());
        }
        let nice = if let Some(before) = self.before.take() {
            before
        } else {
            // Who may not ask has none to go back to but the ordinary one.
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
