//! The loads on memory. Each checks its reads: a move must not lose a page, nor bring back an older one. All but
//! [`rewrite`] are the benchmarks of the zero-copy migration paper, under the same names.

mod cold;
mod dirty_pages;
mod linear_scan;
mod pointer_chase;
mod random_access;
mod rewrite;

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use crate::orders::options::Options;
use crate::random::mix;
use crate::stats::Stats;

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Time covered by a line on the console.
const WINDOW: Duration = Duration::from_millis(100);

/// Runs all loads on memory in the options until told to stop; then each load checks all of its memory.
pub(crate) fn run(options: &Options, stats: &Stats, stop: &AtomicBool) {
    thread::scope(|scope| {
        scope.spawn(|| rewrite::run(options.memory_mb, options.memory_rate_mb, stats, stop));
        if options.pointer_chase_mb > 0 {
            scope.spawn(|| {
                pointer_chase::run(
                    options.pointer_chase_mb,
                    options.pointer_chase_percent,
                    options.seed,
                    stats,
                    stop,
                );
            });
        }
        if options.linear_scan_mb > 0 {
            scope.spawn(|| linear_scan::run(options.linear_scan_mb, stats, stop));
        }
        if options.random_access_mb > 0 {
            scope.spawn(|| {
                random_access::run(options.random_access_mb, options.seed, stats, stop);
            });
        }
        if options.cold_mb > 0 {
            scope.spawn(|| cold::run(options.cold_mb, stats, stop));
        }
        if options.dirty_pages_mb > 0 {
            scope.spawn(|| {
                dirty_pages::run(
                    options.dirty_pages_mb,
                    options.dirty_pages_rate_mb,
                    stats,
                    stop,
                );
            });
        }
    });
}

/// Returns the number of pages in `megabytes` MiB.
const fn pages(megabytes: u64) -> usize {
    (megabytes << 20) as usize / PAGE_BYTES
}

/// Returns the word at a place of memory that is written once.
const fn first(place: usize) -> u64 {
    mix(place as u64 ^ 0x636f_6c64)
}

/// Successive windows of length [`WINDOW`].
#[derive(Debug)]
struct Windows {
    begun: Instant,
}

impl Windows {
    fn begin() -> Self {
        Self {
            begun: Instant::now(),
        }
    }

    /// Returns the length of the window if it is over by `now`; then the next window begins.
    fn over(&mut self, now: Instant) -> Option<Duration> {
        let took = now.saturating_duration_since(self.begun);
        (took >= WINDOW).then(|| {
            self.begun = now;
            took
        })
    }
}
