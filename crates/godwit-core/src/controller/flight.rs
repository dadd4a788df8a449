//! How much of the copies may be in flight while the guest does I/O. Where its writes wait for a
//! chunk that locks their addresses: as much as keeps that time short. Where they need not: as long as
//! the guest is well, and double writes queue behind chunks for no longer than it was promised to
//! wait. What the quickest chunk took is the way there and back, for which no write of the guest waits.

use core::time::Duration;

use super::MigrationOptions;

/// Shortest chunk: 32 KiB.
const LEAST_CHUNK_SECTORS: u32 = 64;

/// Chunks in flight, and their length.
#[derive(Debug)]
pub(super) struct Flight {
    most_window: u16,
    most_chunk_sectors: u32,
    window: u16,
    chunk_sectors: u32,
    /// Whether the guest's writes wait for a chunk to arrive.
    locks: bool,
    /// In this sampling period.
    slowest_chunk: Duration,
    /// What the quickest of all took.
    quickest_chunk: Duration,
}

impl Flight {
    /// As these options begin.
    pub(super) const fn new(options: &MigrationOptions) -> Self {
        Self {
            most_window: options.window_chunks,
            most_chunk_sectors: options.busy_chunk_sectors,
            window: options.busy_window_chunks,
            chunk_sectors: options.busy_chunk_sectors,
            locks: !options.delayed_writes,
            slowest_chunk: Duration::ZERO,
            quickest_chunk: Duration::MAX,
        }
    }

    /// Chunks in flight at most.
    pub(super) const fn window(&self) -> u16 {
        self.window
    }

    /// Longest chunk.
    pub(super) const fn chunk_sectors(&self) -> u32 {
        self.chunk_sectors
    }

    /// Whether a chunk was acknowledged in this sampling period.
    pub(super) const fn arrives(&self) -> bool {
        !self.slowest_chunk.is_zero()
    }

    /// A chunk was acknowledged this long after it was locked.
    pub(super) fn chunk_done(&mut self, took: Duration) {
        self.slowest_chunk = self.slowest_chunk.max(took);
        self.quickest_chunk = self.quickest_chunk.min(took);
    }

    /// A sampling period is over in which the guest's requests may have taken `limit` and the slowest
    /// took `worst`. `starved`: copies were slower than they should ever be. More in flight may help
    /// then, but not on a link or disk that has no more to give, so chunks take up to the whole limit,
    /// beside their way, and no longer.
    pub(super) fn adjust(&mut self, limit: Duration, worst: Duration, starved: bool) {
        if self.slowest_chunk.is_zero() {
            return;
        }
        let (bearable, short) = if self.locks {
            (if starved { limit } else { limit / 2 }, limit / 4)
        } else {
            // On a slow link even the quickest chunk keeps others waiting.
            let way = self.quickest_chunk.min(limit / 2);
            (way + limit, way + limit * 2 / 3)
        };
        if self.slowest_chunk > bearable {
            self.halve();
        } else if starved || self.slowest_chunk < short && worst < limit * 2 / 3 {
            self.widen();
        }
    }

    fn widen(&mut self) {
        if self.chunk_sectors < self.most_chunk_sectors {
            self.chunk_sectors = (self.chunk_sectors * 2).min(self.most_chunk_sectors);
        } else {
            self.window = (self.window + 1).min(self.most_window);
        }
    }

    fn halve(&mut self) {
        if self.window > 1 {
            self.window /= 2;
        } else {
            self.chunk_sectors = (self.chunk_sectors / 2)
                .next_multiple_of(8)
                .max(LEAST_CHUNK_SECTORS.min(self.most_chunk_sectors));
        }
    }

    /// The next period begins.
    pub(super) const fn period_ends(&mut self) {
        self.slowest_chunk = Duration::ZERO;
    }

    /// After a pause one chunk at a time has to show how the others will do.
    pub(super) const fn narrow(&mut self) {
        self.window = 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MigrationId;

    const LIMIT: Duration = Duration::from_millis(4);

    #[test]
    fn chunks_in_flight_follow_how_long_they_lock_their_addresses() {
        let mut options = MigrationOptions::new(MigrationId([1; 16]));
        options.delayed_writes = false;
        let mut flight = Flight::new(&options);
        let mut periods = |count, took, starved| {
            for _ in 0..count {
                flight.chunk_done(took);
                flight.adjust(LIMIT, LIMIT / 8, starved);
                flight.period_ends();
            }
            (flight.window(), flight.chunk_sectors())
        };
        assert_eq!(periods(20, LIMIT, false), (1, LEAST_CHUNK_SECTORS));
        assert_eq!(periods(5, LIMIT, true), (3, 512), "slow, but too little");
        assert_eq!(periods(100, LIMIT / 8, false), (32, 512));
    }

    #[test]
    fn chunks_that_hold_up_no_write_may_take_longer_but_not_while_the_guest_waits() {
        let window = |delayed_writes, took, worst| {
            let mut options = MigrationOptions::new(MigrationId([1; 16]));
            options.delayed_writes = delayed_writes;
            let mut flight = Flight::new(&options);
            flight.chunk_done(LIMIT / 4);
            flight.period_ends();
            for _ in 0..10 {
                flight.chunk_done(took);
                flight.adjust(LIMIT, worst, false);
                flight.period_ends();
            }
            flight.window()
        };
        let (way, well) = (LIMIT / 4, LIMIT / 8);
        let quick = way + LIMIT * 6 / 10;
        assert_eq!(window(true, quick, well), 14);
        assert_eq!(window(true, quick, LIMIT * 3 / 4), 4);
        assert_eq!(window(true, way + LIMIT * 9 / 10, well), 4);
        assert_eq!(window(true, way + LIMIT * 11 / 10, well), 1);
        assert_eq!(window(false, quick, well), 1);
    }

    #[test]
    fn copies_do_not_fill_a_slow_link_with_chunks_even_if_it_starves_them() {
        const BYTES_PER_MILLISECOND: u32 = 20_000;
        for starved in [true, false] {
            let mut flight = Flight::new(&MigrationOptions::new(MigrationId([1; 16])));
            let queued =
                |flight: &Flight| u32::from(flight.window()) * flight.chunk_sectors() * 512;
            for _ in 0..1000 {
                let tenths = queued(&flight) * 10 / BYTES_PER_MILLISECOND;
                flight.chunk_done(Duration::from_micros(u64::from(tenths) * 100));
                flight.adjust(LIMIT, LIMIT / 8, starved);
                flight.period_ends();
            }
            let most = LIMIT.as_millis() as u32 * BYTES_PER_MILLISECOND * 2;
            assert!(
                queued(&flight) <= most,
                "{} bytes in flight",
                queued(&flight)
            );
        }
    }
}
