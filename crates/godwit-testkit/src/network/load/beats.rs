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

    /// Waits for the next beat. Missed beats are not made up for. Later ones keep their distance to the first: senders
    /// that were held up together stay apart.
    pub(in crate::network) fn wait(&mut self) {
        self.due += self.every;
        let late = self.due.elapsed().as_nanos();
        if late == 0 {
            std::thread::sleep(self.due.saturating_duration_since(Instant::now()));
        } else {
            let missed = late.checked_div(self.every.as_nanos()).unwrap_or(0);
            self.due += self.every * u32::try_from(missed).unwrap_or(u32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_was_held_up_keeps_its_beat() {
        let every = Duration::from_secs(10);
        let mut beats = Beats::new(every);
        let first = beats.due - 7 * every / 2;
        beats.due = first;
        beats.wait();
        assert_eq!(beats.due, first + 3 * every);
    }
}
