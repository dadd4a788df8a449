//! The amount of copies in flight while the guest does I/O. If the guest's writes wait for a chunk that locks their
//! addresses, the window keeps this wait short. Otherwise the window grows while the guest is well and double writes
//! queue behind chunks for at most the promised latency, or twice as long while the guest does not notice. The quickest
//! chunk measures the round trip, for which no write of the guest waits. The window never exceeds the need of the copy
//! rate.

use core::time::Duration;

use crate::controller::MigrationOptions;
use crate::controller::governor::tuning::busy_window::{
    BLOCK_SECTORS, FEWEST_CHUNKS, LEAST_CHUNK_SECTORS,
};

/// Rate of copies relative to their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Pace {
    /// Slower than the least rate.
    Starved,
    /// Slower than the allowed rate.
    BelowRate,
    /// At the allowed rate: more in flight would change nothing.
    AtRate,
}

/// The guest's experience in a sampling period.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct GuestDid {
    /// Latency of the slowest request.
    pub(in crate::controller) worst: Duration,
    /// True if the guest got less done than owed and has not made up for the loss yet.
    pub(in crate::controller) lags: bool,
}

/// Number and length of the chunks in flight.
#[derive(Debug)]
pub(in crate::controller) struct BusyWindow {
    most_window: u16,
    most_chunk_sectors: u32,
    /// Amount in flight, in chunks of `chunk_sectors`.
    window: u16,
    chunk_sectors: u32,
    /// Longest chunk in which the same amount may travel.
    longest_sectors: u32,
    /// True if the guest's writes wait for a chunk to arrive.
    locks: bool,
    /// Time of the slowest chunk in this sampling period.
    slowest_chunk: Duration,
    /// Time of the quickest of all chunks.
    quickest_chunk: Duration,
}

impl BusyWindow {
    /// Starts with these options.
    pub(in crate::controller) const fn new(options: &MigrationOptions) -> Self {
        Self {
            most_window: options.window_chunks,
            most_chunk_sectors: options.busy_chunk_sectors,
            window: options.busy_window_chunks,
            chunk_sectors: options.busy_chunk_sectors,
            longest_sectors: options.chunk_sectors,
            locks: !options.delayed_writes,
            slowest_chunk: Duration::ZERO,
            quickest_chunk: Duration::MAX,
        }
    }

    /// Returns the maximum number of chunks in flight and the maximum length in sectors. Each chunk costs processor
    /// time at both ends whatever its length, so a large amount in flight is split into few chunks: enough to read,
    /// send and write at the same time. Chunks stay short where a write of the guest waits for an overlapping chunk.
    pub(in crate::controller) fn in_flight(&self) -> (u16, u32) {
        if self.locks
            || self.window <= FEWEST_CHUNKS
            || self.chunk_sectors < self.most_chunk_sectors
        {
            return (self.window, self.chunk_sectors);
        }
        let sectors = u32::from(self.window) * self.chunk_sectors;
        let chunks = sectors
            .div_ceil(self.longest_sectors)
            .max(FEWEST_CHUNKS.into());
        let length = sectors / chunks / BLOCK_SECTORS * BLOCK_SECTORS;
        (chunks as u16, length)
    }

    /// Returns true if a chunk was acknowledged in this sampling period.
    pub(in crate::controller) const fn arrives(&self) -> bool {
        !self.slowest_chunk.is_zero()
    }

    /// Notes a chunk acknowledged `took` after its lock.
    pub(in crate::controller) fn chunk_done(&mut self, took: Duration) {
        self.slowest_chunk = self.slowest_chunk.max(took);
        self.quickest_chunk = self.quickest_chunk.min(took);
    }

    /// Ends a sampling period with the bound `limit` for the guest's requests. More in flight may help starved copies,
    /// but not on a link or disk at its own limit. Starved chunks therefore take up to the whole limit plus the round
    /// trip; twice the limit while the guest's latency is far below it.
    pub(in crate::controller) fn adjust(&mut self, limit: Duration, guest: GuestDid, pace: Pace) {
        if self.slowest_chunk.is_zero() {
            return;
        }
        let starved = pace == Pace::Starved;
        let (bearable, short) = if self.locks {
            (if starved { limit } else { limit / 2 }, limit / 4)
        } else {
            // On a slow link even the quickest chunk delays others.
            let way = self.quickest_chunk.min(limit / 2);
            let unnoticed = guest.worst < limit / 2 && !guest.lags;
            let queue = if unnoticed { limit * 2 } else { limit };
            (way + queue, way + queue * 2 / 3)
        };
        let well = self.slowest_chunk < short && guest.worst < limit * 2 / 3;
        let helps = self.chunk_sectors < self.most_chunk_sectors || pace == Pace::BelowRate;
        if self.slowest_chunk > bearable {
            // A slightly late chunk, while the guest was in time, means one chunk too many.
            let slightly = !self.locks && self.slowest_chunk <= bearable * 2;
            if slightly && guest.worst <= limit && self.window > 1 {
                self.window -= 1;
            } else {
                self.halve();
            }
        } else if starved || well && helps {
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
                .next_multiple_of(BLOCK_SECTORS)
                .max(LEAST_CHUNK_SECTORS.min(self.most_chunk_sectors));
        }
    }

    /// Begins the next period.
    pub(in crate::controller) const fn period_ends(&mut self) {
        self.slowest_chunk = Duration::ZERO;
    }

    /// Reduces the window to one chunk after a pause: this chunk measures the path for the others.
    pub(in crate::controller) const fn narrow(&mut self) {
        self.window = 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MigrationId;

    const LIMIT: Duration = Duration::from_millis(4);

    /// Returns a guest with its owed throughput.
    const fn slowest(worst: Duration) -> GuestDid {
        GuestDid { worst, lags: false }
    }

    #[test]
    fn chunks_in_flight_follow_how_long_they_lock_their_addresses() {
        let mut options = MigrationOptions::new(MigrationId([1; 16]));
        options.delayed_writes = false;
        let mut busy_window = BusyWindow::new(&options);
        let mut periods = |count, took, pace| {
            for _ in 0..count {
                busy_window.chunk_done(took);
                busy_window.adjust(LIMIT, slowest(LIMIT / 8), pace);
                busy_window.period_ends();
            }
            (busy_window.window, busy_window.chunk_sectors)
        };
        assert_eq!(
            periods(20, LIMIT, Pace::BelowRate),
            (1, LEAST_CHUNK_SECTORS)
        );
        let slow = periods(5, LIMIT, Pace::Starved);
        assert_eq!(slow, (3, 512), "slow, but too little");
        assert_eq!(periods(100, LIMIT / 8, Pace::BelowRate), (32, 512));
    }

    /// Time of a chunk alone.
    const WAY: Duration = Duration::from_millis(1);

    /// Returns the window after `periods` in which each chunk took `took`, from four chunks at first.
    fn window_after(periods: u32, delayed_writes: bool, took: Duration, guest: GuestDid) -> u16 {
        let mut options = MigrationOptions::new(MigrationId([1; 16]));
        options.delayed_writes = delayed_writes;
        let mut busy_window = BusyWindow::new(&options);
        busy_window.chunk_done(WAY);
        busy_window.period_ends();
        for _ in 0..periods {
            busy_window.chunk_done(took);
            busy_window.adjust(LIMIT, guest, Pace::BelowRate);
            busy_window.period_ends();
        }
        busy_window.window
    }

    #[test]
    fn much_in_flight_is_few_chunks_unless_writes_wait_for_them() {
        let in_flight = |window, delayed_writes| {
            let mut options = MigrationOptions::new(MigrationId([1; 16]));
            options.delayed_writes = delayed_writes;
            assert_eq!(
                (options.busy_chunk_sectors, options.chunk_sectors),
                (512, 2048)
            );
            let mut busy_window = BusyWindow::new(&options);
            busy_window.window = window;
            busy_window.in_flight()
        };
        assert_eq!(in_flight(1, true), (1, 512));
        assert_eq!(in_flight(4, true), (4, 512));
        assert_eq!(in_flight(5, true), (4, 640));
        assert_eq!(in_flight(16, true), (4, 2048));
        assert_eq!(in_flight(19, true), (5, 1944));
        assert_eq!(in_flight(32, true), (8, 2048));
        assert_eq!(in_flight(16, false), (16, 512));
        let mut busy_window = with_window(8);
        busy_window.chunk_sectors = 256;
        assert_eq!(busy_window.in_flight(), (8, 256), "short for a reason");
    }

    #[test]
    fn chunks_that_hold_up_no_write_may_take_longer_but_not_while_the_guest_waits() {
        let window = |took, worst| window_after(10, true, took, slowest(worst));
        let notices = LIMIT * 6 / 10;
        let quick = WAY + LIMIT * 6 / 10;
        assert_eq!(window(quick, notices), 14);
        assert_eq!(window(quick, LIMIT * 3 / 4), 4);
        assert_eq!(window(WAY + LIMIT * 9 / 10, notices), 4);
        assert_eq!(window(WAY + LIMIT * 11 / 10, notices), 1);
        let locking = window_after(10, false, quick, slowest(notices));
        assert_eq!(locking, 1);
    }

    #[test]
    fn while_the_guest_does_not_notice_chunks_take_up_to_twice_what_it_was_promised() {
        let well = slowest(LIMIT / 8);
        let window = |took, guest| window_after(10, true, WAY + took, guest);
        assert_eq!(window(LIMIT * 13 / 10, well), 14);
        assert_eq!(window(LIMIT * 19 / 10, well), 4);
        assert_eq!(window(LIMIT * 21 / 10, well), 1);
        let lags = GuestDid { lags: true, ..well };
        assert_eq!(window(LIMIT * 13 / 10, lags), 1);
        assert_eq!(window(LIMIT * 9 / 10, lags), 4);
    }

    #[test]
    fn a_chunk_that_is_a_little_late_costs_one_place_and_a_guest_that_is_costs_half() {
        let window = |took, worst| window_after(1, true, WAY + took, slowest(worst));
        let notices = LIMIT * 6 / 10;
        assert_eq!(window(LIMIT * 11 / 10, notices), 3);
        assert_eq!(window(LIMIT * 3, notices), 2);
        assert_eq!(window(LIMIT * 11 / 10, LIMIT * 11 / 10), 2);
        let locking = window_after(1, false, LIMIT, slowest(notices));
        assert_eq!(locking, 2);
    }

    #[test]
    fn copies_do_not_fill_a_slow_link_with_chunks_even_if_it_starves_them() {
        const BYTES_PER_MILLISECOND: u32 = 20_000;
        let notices = slowest(LIMIT * 6 / 10);
        let well = slowest(LIMIT / 8);
        for (guest, promises, pace) in [
            (notices, 2, Pace::Starved),
            (notices, 2, Pace::BelowRate),
            (well, 4, Pace::Starved),
            (well, 4, Pace::BelowRate),
        ] {
            let mut busy_window = BusyWindow::new(&MigrationOptions::new(MigrationId([1; 16])));
            let queued = |busy_window: &BusyWindow| {
                u32::from(busy_window.window) * busy_window.chunk_sectors * 512
            };
            for _ in 0..1000 {
                let tenths = queued(&busy_window) * 10 / BYTES_PER_MILLISECOND;
                busy_window.chunk_done(Duration::from_micros(u64::from(tenths) * 100));
                busy_window.adjust(LIMIT, guest, pace);
                busy_window.period_ends();
            }
            let most = LIMIT.as_millis() as u32 * BYTES_PER_MILLISECOND * promises;
            assert!(
                queued(&busy_window) <= most,
                "{} bytes in flight",
                queued(&busy_window)
            );
        }
    }

    /// A promise of which a chunk takes a small part.
    const LAX: Duration = Duration::from_millis(100);

    /// Returns the window after periods in which a chunk takes a millisecond, from `chunks`.
    fn go_on(chunks: u16, pace: Pace) -> u16 {
        let mut busy_window = with_window(chunks);
        for _ in 0..400 {
            busy_window.chunk_done(WAY);
            busy_window.adjust(LAX, slowest(LAX / 100), pace);
            busy_window.period_ends();
        }
        busy_window.window
    }

    fn with_window(chunks: u16) -> BusyWindow {
        let mut busy_window = BusyWindow::new(&MigrationOptions::new(MigrationId([1; 16])));
        busy_window.window = chunks;
        busy_window
    }

    #[test]
    fn no_more_are_in_flight_than_the_rate_needs() {
        assert_eq!(go_on(3, Pace::AtRate), 3);
        assert_eq!(go_on(3, Pace::BelowRate), 32);
    }
}
