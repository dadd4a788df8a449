//! The number of chunks in flight while the guest is idle. The window grows to the need of the disks and the link while
//! no chunk takes long. A guest that wakes up waits for the chunks in flight: for at most the promised latency, as far
//! as a single chunk allows.

use core::time::Duration;

use crate::controller::MigrationOptions;
use crate::controller::governor::tuning::idle_window::{LONG, QUICK, QUICK_ENOUGH};

/// The window while the guest is idle.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct IdleWindow {
    least: u16,
    most: u16,
    chunks: u16,
    /// Longest wait promised to the guest.
    promised: Duration,
}

impl IdleWindow {
    /// Starts with these options, and with less in flight if less than [`QUICK`] was promised.
    pub(in crate::controller) fn new(options: &MigrationOptions) -> Self {
        let promised = options.wake_up_limit.unwrap_or(Duration::MAX);
        let part = promised.min(QUICK).as_secs_f64() / QUICK.as_secs_f64();
        let least = ((f64::from(options.idle_window_chunks) * part) as u16).max(1);
        Self {
            least,
            most: options.window_chunks,
            chunks: least,
            promised,
        }
    }

    /// Returns the maximum number of chunks in flight.
    pub(in crate::controller) const fn chunks(&self) -> u16 {
        self.chunks
    }

    /// Notes a chunk acknowledged `took` after its lock, `idle` after the guest's last request.
    pub(in crate::controller) fn chunk_done(&mut self, took: Duration, idle: Duration) {
        let quick = if idle < LONG { QUICK } else { QUICK_ENOUGH };
        self.chunks = if took < quick.min(self.promised) {
            (self.chunks + 1).min(self.most)
        } else {
            (self.chunks - 1).max(self.least)
        };
    }

    /// Resets the window: the guest works, so the idle measurements are out of date.
    pub(in crate::controller) const fn forget(&mut self) {
        self.chunks = self.least;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MigrationId;

    const NO_DELAY: Duration = Duration::ZERO;
    const EACH: Duration = Duration::from_micros(500);

    /// Returns the window after many chunks on a path that takes one chunk every `each` after `delay`, while the guest
    /// is idle for `idle`.
    fn settled(each: Duration, delay: Duration, idle: Duration) -> u16 {
        settle(window(None), each, delay, idle)
    }

    fn window(promised: Option<Duration>) -> IdleWindow {
        IdleWindow::new(&MigrationOptions {
            idle_window_chunks: 16,
            window_chunks: 64,
            wake_up_limit: promised,
            ..MigrationOptions::new(MigrationId([1; 16]))
        })
    }

    fn settle(mut window: IdleWindow, each: Duration, delay: Duration, idle: Duration) -> u16 {
        for _ in 0..1000 {
            window.chunk_done(delay + each * u32::from(window.chunks()), idle);
        }
        window.chunks()
    }

    #[test]
    fn the_window_grows_as_long_as_chunks_are_quick() {
        let idle = Duration::from_millis(200);
        assert_eq!(settled(EACH / 100, NO_DELAY, idle), 64);
        let window = settled(EACH, NO_DELAY, idle);
        assert!((28..=30).contains(&window), "{window}");
        assert_eq!(settled(EACH * 10, NO_DELAY, idle), 16, "a slow disk");
        let long_way = Duration::from_millis(50);
        assert_eq!(settled(EACH, long_way, idle), 16);
    }

    #[test]
    fn chunks_may_take_longer_when_the_guest_has_slept_for_long() {
        let window = settled(EACH, NO_DELAY, Duration::MAX);
        assert!((58..=60).contains(&window), "{window}");
    }

    #[test]
    fn a_guest_that_wakes_up_waits_no_longer_than_it_was_promised() {
        for (promised, begins) in [(10, 10), (3, 3), (1, 1)] {
            let window = window(Some(Duration::from_millis(promised)));
            assert_eq!(window.chunks(), begins);
            for idle in [Duration::from_millis(200), Duration::MAX] {
                let chunks = settle(window, EACH, NO_DELAY, idle);
                let waits = EACH * u32::from(chunks);
                assert!(
                    waits <= Duration::from_millis(promised),
                    "{promised} ms: {waits:?}"
                );
            }
        }
        let lax = settle(
            window(Some(Duration::from_millis(50))),
            EACH,
            NO_DELAY,
            Duration::MAX,
        );
        assert!((58..=60).contains(&lax), "{lax}");
    }

    #[test]
    fn a_guest_that_works_takes_the_window_back_to_where_it_began() {
        let mut window = IdleWindow::new(&MigrationOptions::new(MigrationId([1; 16])));
        let first = window.chunks();
        window.chunk_done(Duration::ZERO, Duration::ZERO);
        assert_eq!(window.chunks(), first + 1);
        window.forget();
        assert_eq!(window.chunks(), first);
    }
}
