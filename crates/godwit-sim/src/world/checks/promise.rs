//! The latency promised to the guest, and the slack on top.

use std::time::Duration;

use godwit_core::Controller;

use crate::run::coverage::Reached;
use crate::world::World;
use crate::world::guest::Outstanding;

/// Slack of the promise. With delayed writes, a request already answered by the local disk waits for the migration no
/// longer than the promised limit plus this slack (invariant 4). The controller checks the time every sampling period,
/// a signal may be one period old, and a pause may have to wait for another period.
pub(crate) const PROMISE_SLACK: Duration =
    Duration::from_nanos(4 * Controller::LINK_SAMPLING.as_nanos() as u64);

/// A promise in force: the guest is not frozen for switchover, and nothing excuses the migration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Promise {
    limit: Duration,
    /// Factor on the limit for the wait of a request.
    times: u32,
    /// True if a user stated the promise: nothing eases it.
    stated: bool,
    since: u64,
    /// Longest duration of a request at the source's disk.
    pub(crate) longest_disk: u64,
}

impl Promise {
    /// Returns a promise in force. `spares` is true if the promise's percentile allows some of the run's requests to be
    /// late. Then every request may be as late as the controller allows the latest one.
    pub(crate) fn new(limit: Duration, stated: bool, spares: bool, since: u64) -> Self {
        Self {
            limit,
            times: if spares { Controller::MOST_LATENESS } else { 1 },
            stated,
            since,
            longest_disk: 0,
        }
    }

    /// Returns the nanoseconds that a request may wait under an allowed latency.
    fn bound(&self, allowed: Duration) -> u64 {
        (allowed * self.times + PROMISE_SLACK).as_nanos() as u64
    }
}

impl World {
    pub(in crate::world) fn check_promise(&mut self, asked: &Outstanding) {
        let (Some(promise), now) = (self.course.promise, self.now) else {
            return;
        };
        // A request without a disk operation was carried out by another.
        let (disk_started, disk_ended) = match (asked.disk_started, asked.disk_ended) {
            (Some(started), Some(ended)) => (started, ended),
            _ => (now, now),
        };
        if asked.node != self.course.source || asked.start < promise.since {
            return;
        }
        self.reached(Reached::PromiseChecked);
        let mut bound = promise.bound(promise.limit);
        // Before its turn a request may wait for the disk operations of earlier, overlapping requests.
        let others = promise.longest_disk * (self.guest.places.len() as u64 + 2);
        let before = (disk_started - asked.start).saturating_sub(others);
        let after = now - disk_ended;
        if before + after > bound && !promise.stated {
            // The controller reports the eased latency of the promise, which has a limit, too.
            let eased = self.nodes[asked.node].progress();
            let allowed = eased.and_then(|progress| progress.promise.allowed);
            let allowed = allowed.unwrap_or_default().min(Controller::MOST_EASED);
            bound = promise.bound(promise.limit.max(allowed));
        }
        if before + after > bound {
            let operation = asked.operation;
            self.fail("a request waits for the migration no longer than was promised", || {
                format!(
                    "{operation:?} waited {before} ns before its disk operation and {after} ns after; \
                     the bound is {bound} ns"
                )
            });
        }
    }
}
