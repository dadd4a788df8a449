//! Moments at an even distance.

use std::time::{Duration, Instant};

/// The moments at which a sender sends.
pub(in crate::network) struct Beats {
    every: Duration,
    due: Instant,
}

impl Beats {
    /// Creates beats of which the first is now.
    pub(in crate::network) fn new(every: Duration) -> Self {
        Self {
            every,
            due: Instant::now(),
        }
    }

    /// Waits for the next beat. Missed beats are not made up for.
    pub(in crate::network) fn wait(&mut self) {
        self.due += self.every;
        let now = Instant::now();
        if self.due > now {
            std::thread::sleep(self.due - now);
        } else {
            self.due = now;
        }
    }
}
