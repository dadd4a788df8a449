//! The controller of the promise to the guest: the rate and the amount of copies while the guest's requests take no
//! longer than promised.
//!
//! [`Governor`] is the seam, as quinn's `Controller` is for congestion. The mover reports events, and asks before each
//! step that a promise may hold back. A governor has no access to the disk, the link or the clock, so another algorithm
//! needs a file of its own and a line in [`governor`].

mod adaptive;
pub(super) mod arrivals;
pub(super) mod in_flight;
mod judgement;
pub(super) mod obstacles;
pub(super) mod parts;
pub(super) mod token_bucket;
pub(super) mod tuning;

use core::fmt::Debug;
use core::time::Duration;

use self::adaptive::Adaptive;
use crate::controller::{MigrationOptions, PromiseProgress};
use crate::units::{Bytes, Time};

/// An algorithm that keeps the promise of one migration.
///
/// Events come in the order in which they happen. A bound holds until the next event.
pub(super) trait Governor: Debug + Send {
    /// Notes an answered request of the guest.
    fn answered(&mut self, answer: &Answer);

    /// Notes a chunk acknowledged `took` after its lock.
    fn chunk_done(&mut self, took: Duration);

    /// Notes bytes sent as a copy or as a delayed write. Double writes are not noted: nothing holds them back.
    fn spend(&mut self, bytes: u64, delayed: bool);

    /// Begins a new pass over the disk.
    fn pass_begins(&mut self);

    /// Judges the period that has passed, at [`Self::next_sample`].
    fn sample(&mut self, now: Time, period: &Period);

    /// Notes the interface's traffic in bytes per second, if the interface is watched. Returns true if the traffic
    /// exceeds the interface's budget.
    fn interface(&mut self, rate: Option<u64>, paused: bool) -> bool;

    /// Begins a pause; returns the earliest end of the pause (`PAUSE_DURATION`).
    fn pause(&mut self, now: Time) -> Time;

    /// Prolongs a pause because the link is no better yet; returns the new end.
    fn prolong(&mut self, now: Time) -> Time;

    /// Ends a pause.
    fn resume(&mut self, now: Time);

    /// Returns `PAUSE_TH`: the maximum age of a request that waits for the migration. `None` without a promise.
    fn threshold(&self) -> Option<Duration>;

    /// Returns true if a request that has waited for the threshold may be answered without the destination, alone.
    /// Counts the request.
    fn may_answer_alone(&mut self) -> bool;

    /// Returns true if the promise still allows a request that has waited for the threshold to be late. Counts the
    /// request.
    fn may_be_late(&mut self) -> bool;

    /// Returns the maximum number of chunks in flight while the guest does I/O, and the maximum length in sectors.
    fn in_flight(&self) -> (u16, u32);

    /// Succeeds if a copy, or a delayed write, may be sent; otherwise returns the time of the next attempt.
    fn ready(&mut self, now: Time, delayed: bool) -> Result<(), Time>;

    /// Returns true if a deadline that requires this many bytes per second leaves no time for pauses.
    fn pressed(&self, required: u64) -> bool;

    /// Returns true if the interface's traffic exceeded its budget last.
    fn interface_is_full(&self) -> bool;

    /// Returns the time of the next [`Self::sample`].
    fn next_sample(&self) -> Time;

    /// Adds the state of the promise to a report for the user.
    fn report(&self, progress: &mut PromiseProgress);
}

/// Creates the governor of a migration with these options, or `None` if nothing holds the migration back for the
/// guest's sake. `judged` is the count of the migration's governor before.
pub(super) fn governor(
    options: &MigrationOptions,
    judged: JudgedPeriods,
    now: Time,
) -> Option<Box<dyn Governor>> {
    let governs = options.sla.is_some() || options.interface_budget.is_some();
    governs.then(|| Box::new(Adaptive::new(options, judged, now)) as Box<dyn Governor>)
}

/// An answered request of the guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) bytes: Bytes,
    pub(super) latency: Duration,
    /// True if [`Governor::may_be_late`] has counted the request.
    pub(super) known_late: bool,
    /// True for a write that reaches the disk.
    pub(super) writes: bool,
}

/// Sampling periods with requests of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JudgedPeriods {
    pub(super) all: u64,
    /// Periods with a request beyond the promise.
    pub(super) breached: u64,
}

/// Input of the governor about a sampling period.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Period {
    /// Age of the oldest request that waits for the migration.
    pub(super) oldest: Duration,
    /// Bytes still to be sent.
    pub(super) left: u64,
    /// Bytes per second needed for the deadline; 0 without a deadline.
    pub(super) required: u64,
    /// True if copies compete with delayed writes.
    pub(super) copying: bool,
    /// True if the migration pauses.
    pub(super) paused: bool,
    /// True if nothing of the migration was under way.
    pub(super) still: bool,
}
