//! Moments at an even distance.

use std::time::{Duration, Instant};

/// The moments at which a sender sends.
pub(super) struct Beats {
    every: Duration,
    due: Instant,
}

impl Beats {
    /// Creates beats of which the first is now.
    pub(super) fn new(every: Duration) -> Self {
        Self {
            every,
            due: Instant::now(),
        }
    }

    /// Waits for the next beat. Missed beats are not made up for.
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
