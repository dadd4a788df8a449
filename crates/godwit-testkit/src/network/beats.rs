//! Moments at an even distance.

use std::time::{Duration, Instant};

/// The moments at which something is sent.
pub(super) struct Beats {
    every: Duration,
    due: Instant,
}

impl Beats {
    /// The first is now.
    pub(super) fn new(every: Duration) -> Self {
        Self {
            every,
            due: Instant::now(),
        }
    }

    /// Waits for the next. What nobody had time for is not made up for.
    pub(super) fn wait(&mut self) {
        self.due += self.every;
        let now = Instant::now();
        if self.due > now {
            std::thread::sleep(self.due - now);
        } else {
            self.due = now;
        }
    }
}
