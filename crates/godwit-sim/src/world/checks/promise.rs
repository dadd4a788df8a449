//! The latency that was promised to the guest, and what may come on top of it.

use std::time::Duration;

use godwit_core::Controller;

use crate::run::coverage::Reached;
use crate::world::World;
use crate::world::guest::Outstanding;

/// With delayed writes a request that its local disk has answered waits no longer for the migration
/// than the promised limit and this (invariant 4): the controller looks at the time every sampling
/// period, a signal may be a period old, and what a pause has to wait for is another.
pub(in crate::world) const PROMISE_SLACK: Duration =
    Duration::from_nanos(4 * Controller::LINK_SAMPLING.as_nanos() as u64);

/// A promise that a migration has to keep now: it neither freezes the guest for switchover, nor has
/// anything happened that excuses it.
#[derive(Clone, Copy, Debug)]
pub(in crate::world) struct Promise {
    limit: Duration,
    /// How many times longer than that a request may wait.
    times: u32,
    /// Whether a user stated it: nothing eases it.
    stated: bool,
    since: u64,
    /// The longest that the source's disk took for a request.
    pub(in crate::world) longest_disk: u64,
}

impl Promise {
    /// `spares` tells whether the promise's percentile allows some of the run's requests to be late:
    /// then none is held to more than what the controller grants the latest.
    pub(in crate::world) fn new(limit: Duration, stated: bool, spares: bool, since: u64) -> Self {
        Self {
            limit,
            times: if spares { Controller::MOST_LATENESS } else { 1 },
            stated,
            since,
            longest_disk: 0,
        }
    }

    /// Nanoseconds that a request may wait when requests may take this long.
    fn bound(&self, allowed: Duration) -> u64 {
        (allowed * self.times + PROMISE_SLACK).as_nanos() as u64
    }
}

impl World {
    pub(in crate::world) fn check_promise(&mut self, asked: &Outstanding) {
        let (Some(promise), now) = (self.promise, self.now) else {
            return;
        };
        // One without a disk operation was carried out by another.
        let (disk_started, disk_ended) = match (asked.disk_started, asked.disk_ended) {
            (Some(started), Some(ended)) => (started, ended),
            _ => (now, now),
        };
        if asked.node != self.source || asked.start < promise.since {
            return;
        }
        self.reached(Reached::PromiseChecked);
        let mut bound = promise.bound(promise.limit);
        // Before its turn a request may wait for the disk operations of earlier ones that overlap.
        let others = promise.longest_disk * (self.guest.places.len() as u64 + 2);
        let before = (disk_started - asked.start).saturating_sub(others);
        let after = now - disk_ended;
        if before + after > bound && !promise.stated {
            // The controller says to what it has eased the promise, and that has an end, too.
            let eased = self.nodes[asked.node].controller.as_ref();
            let allowed = eased.and_then(|controller| controller.progress()?.promise.allowed);
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
