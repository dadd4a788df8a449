//! Arrival times of the guest's ticks, by the host's clock.

use std::time::{Duration, Instant};

/// Largest number of disks with ticks.
const DISKS: usize = 32;

/// The largest time between two ticks of one disk since the last mark.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    disks: Vec<Option<Last>>,
    largest: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    writes: u64,
    at: Instant,
}

impl Arrivals {
    /// Records the completion of write number `writes` of disk `disk`. Old and repeated ticks are ignored: a machine
    /// gone back in time makes no progress.
    pub(super) fn tick(&mut self, disk: usize, writes: u64, at: Instant) {
        if disk >= DISKS {
            return;
        }
        if self.disks.len() <= disk {
            self.disks.resize(disk + 1, None);
        }
        let last = &mut self.disks[disk];
        match last {
            Some(last) if writes <= last.writes => return,
            Some(last) => self.largest = self.largest.max(at.saturating_duration_since(last.at)),
            None => {}
        }
        *last = Some(Last { writes, at });
    }

    /// Returns the largest gap since the mark, open gaps included.
    pub(super) fn largest(&self, now: Instant) -> Duration {
        self.disks
            .iter()
            .flatten()
            .map(|last| now.saturating_duration_since(last.at))
            .fold(self.largest, Duration::max)
    }

    /// Returns the writes of all disks by the last tick of each, and the time of the latest of these ticks.
    pub(super) fn writes(&self) -> Option<(u64, Instant)> {
        let known = || self.disks.iter().flatten();
        let at = known().map(|last| last.at).max()?;
        Some((known().map(|last| last.writes).sum(), at))
    }

    /// Returns the writes of each disk by the last tick.
    pub(super) fn writes_by_disk(&self) -> Vec<u64> {
        let disks = self.disks.iter();
        disks
            .map(|last| last.map_or(0, |last| last.writes))
            .collect()
    }

    /// Forgets the gaps so far.
    pub(super) fn mark(&mut self) {
        self.largest = Duration::ZERO;
    }

    /// Records the end of the load: no gap is open any more.
    pub(super) fn end(&mut self) {
        self.disks.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::Arrivals;

    #[test]
    fn the_slowest_disk_counts_and_an_open_gap_too() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut arrivals = Arrivals::default();
        arrivals.tick(0, 1, at(0));
        arrivals.tick(1, 1, at(0));
        arrivals.tick(0, 2, at(5));
        arrivals.tick(1, 9, at(30));
        arrivals.tick(0, 3, at(31));
        assert_eq!(arrivals.largest(at(31)), Duration::from_millis(30));
        assert_eq!(arrivals.writes(), Some((12, at(31))));
        arrivals.mark();
        assert_eq!(arrivals.largest(at(33)), Duration::from_millis(3));
        // A repeated tick is no progress.
        arrivals.tick(0, 3, at(40));
        assert_eq!(arrivals.largest(at(51)), Duration::from_millis(21));
        arrivals.end();
        assert_eq!(arrivals.largest(at(99)), Duration::ZERO);
        assert_eq!(arrivals.writes(), None);
        // No input on the line makes the table grow without bound.
        arrivals.tick(usize::MAX, 1, at(99));
    }
}
