//! How many chunks may be in flight while the guest is idle: as many as the disks and the link have
//! use for, as long as none of them takes long, because a guest that wakes up waits for them.

use core::time::Duration;

use super::MigrationOptions;

/// A chunk that takes longer than this makes the window smaller again.
const QUICK: Duration = Duration::from_millis(15);

/// The window of an idle guest's disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdleWindow {
    least: u16,
    most: u16,
    chunks: u16,
}

impl IdleWindow {
    /// As these options begin.
    pub(super) const fn new(options: &MigrationOptions) -> Self {
        Self {
            least: options.idle_window_chunks,
            most: options.window_chunks,
            chunks: options.idle_window_chunks,
        }
    }

    /// Chunks in flight at most.
    pub(super) const fn chunks(&self) -> u16 {
        self.chunks
    }

    /// A chunk was acknowledged this long after it was locked.
    pub(super) fn chunk_done(&mut self, took: Duration) {
        self.chunks = if took < QUICK {
            (self.chunks + 1).min(self.most)
        } else {
            (self.chunks - 1).max(self.least)
        };
    }

    /// The guest works: what is known of its idle time is out of date.
    pub(super) const fn forget(&mut self) {
        self.chunks = self.least;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MigrationId;

    /// The window after many chunks on a path that takes one every `each`, and `delay` for any.
    fn settled(each: Duration, delay: Duration) -> u16 {
        let mut window = IdleWindow::new(&MigrationOptions {
            idle_window_chunks: 16,
            window_chunks: 64,
            ..MigrationOptions::new(MigrationId([1; 16]))
        });
        for _ in 0..1000 {
            window.chunk_done(delay + each * u32::from(window.chunks()));
        }
        window.chunks()
    }

    #[test]
    fn the_window_grows_as_long_as_chunks_are_quick() {
        let (none, each) = (Duration::ZERO, Duration::from_micros(500));
        assert_eq!(settled(Duration::from_micros(1), none), 64);
        let window = settled(each, none);
        assert!((28..=30).contains(&window), "{window}");
        assert_eq!(settled(each * 10, none), 16, "a slow disk");
        assert_eq!(settled(each, Duration::from_millis(50)), 16, "a long way");
    }

    #[test]
    fn a_guest_that_works_takes_the_window_back_to_where_it_began() {
        let mut window = IdleWindow::new(&MigrationOptions::new(MigrationId([1; 16])));
        let first = window.chunks();
        window.chunk_done(Duration::ZERO);
        assert_eq!(window.chunks(), first + 1);
        window.forget();
        assert_eq!(window.chunks(), first);
    }
}
