//! Parts of several scenes.

pub(crate) mod chart;
pub(crate) mod cpu;
pub(crate) mod interrupt;
pub(crate) mod moved;
pub(crate) mod qmp;
pub(crate) mod watched;

use std::io;
use std::time::Duration;

use godwit_testkit::process::wait_for;

/// Figures of a guest before and during a move, named as in fio's windows.
pub(crate) const GUEST: &str = "mbps_before MB/s, mbps_during MB/s, p50_us_before µs, p50_us_during µs, p99_us_before µs, \
    p99_us_during µs, p999_us_before µs, p999_us_during µs, p9999_us_before µs, p9999_us_during µs, \
    max_us_before µs, max_us_during µs";

/// Gives each of `count` a turn in every round, in an order that rotates from round to round. `take` gets the round and
/// whose turn it is.
pub(crate) fn in_turns(
    rounds: usize,
    count: usize,
    mut take: impl FnMut(usize, usize) -> io::Result<()>,
) -> io::Result<()> {
    for round in 0..rounds.max(1) {
        for turn in 0..count {
            interrupt::check()?;
            take(round, (round + turn) % count)?;
        }
    }
    Ok(())
}

/// Waits for an answer, and fails with `what` without one.
pub(crate) fn awaited<T>(
    what: &str,
    patience: Duration,
    ask: impl FnMut() -> Option<T>,
) -> io::Result<T> {
    wait_for(patience, ask)
        .ok_or_else(|| io::Error::other(format!("{what} does not happen within {patience:?}")))
}

/// Returns an error of the same kind that also tells who failed.
pub(crate) fn named(who: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{who}: {error}"))
}
