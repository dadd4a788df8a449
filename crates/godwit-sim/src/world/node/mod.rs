//! The state of a node around the controller.

mod buffers;
mod doubles;
mod kept;
mod operations;
mod store;

use std::collections::HashSet;

use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{Generation, Time};
use godwit_core::{Controller, Progress};

pub(super) use self::buffers::{Buffers, Holder};
use self::doubles::DoubleWrites;
pub(super) use self::kept::{Kept, KeptWrite};
pub(super) use self::operations::{Operations, Pending};
pub(super) use self::store::{BLOCK, Store, StoredMissing, StoringMissing, has, insert};
use crate::disk::Disk;
use crate::history::WriteNumber;
use crate::plan::{ClockPlan, Plan};
use crate::world::images::OnImage;

/// A node's clock, with a separate origin and drift.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(pub(super) ClockPlan);

impl Clock {
    pub(super) fn local(self, now: u64) -> Time {
        let drift = now as i64 * self.0.drift / 1_000_000;
        Time(self.0.offset + now.saturating_add_signed(drift))
    }

    /// Returns the first moment at which the clock shows this time.
    pub(super) fn global(self, time: Time) -> u64 {
        let elapsed = i128::from(time.0.saturating_sub(self.0.offset));
        let drift = i128::from(self.0.drift);
        let estimate = elapsed * 1_000_000 / (1_000_000 + drift) - 2;
        let mut now = u64::try_from(estimate.max(0)).unwrap_or(u64::MAX >> 1);
        while self.local(now) < time {
            now += 1;
        }
        now
    }
}

/// The sessions that a node uses, by purpose.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    pub(super) migration: Option<usize>,
    /// Session on which the node forwards.
    pub(super) forward: Option<usize>,
    /// Session on which the owner pulls.
    pub(super) pull: Option<usize>,
    /// Session on which the other node forwards.
    pub(super) served: Option<usize>,
    /// Earliest time of the next search for the owner.
    pub(super) reconnects_at: u64,
}

/// The frames seen of a migration to this node.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Highest generation.
    pub(super) generation: Generation,
    /// Youngest arrived copy.
    pub(super) last_copy: u64,
}

#[derive(Debug)]
pub(super) struct Node {
    /// `None` while the process is down.
    pub(super) controller: Option<Controller>,
    pub(super) incarnation: u32,
    pub(super) clock: Clock,
    /// Time of the controller's next deadline.
    pub(super) deadline: Option<u64>,
    pub(super) disk: Disk,
    pub(super) store: Store,
    /// Knowledge of the disk's image.
    pub(super) image: OnImage,
    /// Number of tags of a process.
    tags: u32,
    pub(super) buffers: Buffers,
    pub(super) operations: Operations,
    pub(super) kept: Kept,
    pub(super) doubles: DoubleWrites,
    pub(super) sessions: Sessions,
    pub(super) seen: Seen,
    /// Total delayed bytes at the last look.
    pub(super) delayed: u64,
    /// True while a migration leaves this node.
    pub(super) outgoing: bool,
    /// Forwarded writes done by this process.
    pub(super) done: HashSet<WriteNumber>,
}

impl Node {
    pub(super) fn new(plan: &Plan, index: usize, record: AuthorityRecord) -> Self {
        Self {
            controller: None,
            incarnation: 0,
            clock: Clock(plan.clocks[index]),
            deadline: None,
            disk: Disk::new(plan.sectors, plan.disks[index]),
            store: Store::new(record, plan.store),
            image: OnImage::default(),
            tags: plan.tags,
            buffers: Buffers::new(plan.tags),
            operations: Operations::default(),
            kept: Kept::default(),
            doubles: DoubleWrites::new(plan.tags),
            sessions: Sessions::default(),
            seen: Seen::default(),
            delayed: 0,
            outgoing: false,
            done: HashSet::new(),
        }
    }

    /// Clears the state of a process's memory.
    pub(super) fn clear(&mut self) {
        self.controller = None;
        self.deadline = None;
        self.image.clear();
        self.buffers = Buffers::new(self.tags);
        self.operations = Operations::default();
        self.kept = Kept::default();
        self.doubles = DoubleWrites::new(self.tags);
        self.sessions = Sessions::default();
        self.seen = Seen::default();
        self.delayed = 0;
        self.outgoing = false;
        self.done.clear();
    }

    pub(super) fn is_up(&self) -> bool {
        self.controller.is_some()
    }

    pub(super) fn serves(&self) -> bool {
        self.controller.as_ref().is_some_and(Controller::serves)
    }

    /// Returns the progress of the outgoing migration.
    pub(super) fn progress(&self) -> Option<Progress> {
        self.controller.as_ref()?.progress()
    }

    pub(super) fn lacks_in_two_places(&self) -> bool {
        self.controller
            .as_ref()
            .is_some_and(Controller::lacks_in_two_places)
    }

    /// Returns true if nothing is in flight and all tags are free.
    pub(super) fn is_idle(&self) -> bool {
        let disk = self.operations.is_empty() && !self.kept.is_applying();
        disk && self.store.is_idle() && self.buffers.all_free()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_of_a_skewed_clock_is_met_at_the_first_moment() {
        for drift in [-300, -1, 0, 7, 299] {
            let clock = Clock(ClockPlan {
                offset: 1_000_000_000,
                drift,
            });
            for now in [0, 1, 999, 123_456_789, 5_000_000_000] {
                let time = clock.local(now);
                let found = clock.global(time);
                assert!(clock.local(found) >= time && found <= now);
                assert!(found == 0 || clock.local(found - 1) < time);
            }
        }
    }
}
