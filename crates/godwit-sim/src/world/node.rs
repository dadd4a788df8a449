//! The state of a node around the controller.

use std::collections::{HashMap, HashSet};

use godwit_core::Controller;
use godwit_core::action::{DiskOperation, DiskTag, PULL_SLOTS, SourceSlot};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::request::{RequestError, RequestTag};
use godwit_core::units::{Generation, MigrationId, Time};

use crate::disk::{Data, Disk};
use crate::history::WriteNumber;
use crate::plan::{ClockPlan, Plan};
use crate::world::deltas::StoredWritten;
use crate::world::images::OnImage;
use crate::world::wires::pulling::{StoredMissing, StoringMissing};

/// The holder of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    Nobody,
    /// A place in the guest's queue.
    Client(usize),
    /// A client that has hung up; `told` once the controller knows.
    Gone {
        told: bool,
    },
    /// The other node, which forwarded a request.
    Peer {
        session: usize,
        theirs: RequestTag,
        number: u32,
        read: bool,
        /// The forwarded write, if it brought data.
        write: Option<WriteNumber>,
    },
    /// A frame of the migration.
    Replica,
}

/// A disk operation in flight.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) tag: DiskTag,
    pub(super) operation: DiskOperation,
    /// Data to write, or data already read.
    pub(super) data: Data,
    pub(super) error: Option<RequestError>,
    /// True if the operation takes effect at the start instead of the end; either may happen.
    pub(super) early: bool,
    /// Last write made durable by a flush.
    pub(super) mark: u32,
    pub(super) started: u64,
}

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

#[derive(Debug)]
pub(super) struct Node {
    /// `None` while the process is down.
    pub(super) controller: Option<Controller>,
    pub(super) incarnation: u32,
    pub(super) clock: Clock,
    /// Time of the controller's next deadline.
    pub(super) deadline: Option<u64>,
    pub(super) disk: Disk,
    /// Record in durable storage.
    pub(super) record: AuthorityRecord,
    /// Record with which the node has served, possibly before the next one is stored.
    pub(super) served_on: Option<AuthorityRecord>,
    pub(super) storing: Option<AuthorityRecord>,
    /// True if more than one party may have written: the stored value, and the value being stored.
    pub(super) shared: bool,
    pub(super) storing_shared: Option<bool>,
    /// The disk's missing blocks: the stored map, and the update being stored.
    pub(super) missing: Option<StoredMissing>,
    pub(super) storing_missing: Option<StoringMissing>,
    /// Migration by which the disk left, while the image durably equals the disk of that moment.
    pub(super) base: Option<MigrationId>,
    /// Writes since the disk came, stored by a process when ending.
    pub(super) written: Option<StoredWritten>,
    /// Knowledge of the disk's image.
    pub(super) image: OnImage,
    /// Duration of storing a record, and the time until which the duration applies.
    pub(super) slow_store: (u64, u64),
    /// Number of the node's buffers, each named by a tag.
    tags: u32,
    pub(super) free_tags: Vec<RequestTag>,
    pub(super) holders: Vec<Holder>,
    pub(super) buffers: Vec<Data>,
    pub(super) source_buffers: HashMap<SourceSlot, Data>,
    /// Pulled data by slot.
    pub(super) pull_buffers: Vec<Data>,
    pub(super) pending: Vec<Option<Pending>>,
    pub(super) free_pending: Vec<usize>,
    /// Double writes not acknowledged by the destination, by tag: the names in their frames.
    pub(super) doubled: Vec<Option<u32>>,
    /// Names of double writes whose requests were answered first.
    pub(super) posted: Vec<u32>,
    /// Additions to `posted` in this call.
    pub(super) early_answers: u64,
    /// Total delayed bytes at the last look.
    pub(super) delayed: u64,
    /// True if a migration from this node paused or ended in this call.
    pub(super) excused: bool,
    /// True while a migration leaves this node.
    pub(super) outgoing: bool,
    /// Highest generation seen from a migration to this node.
    pub(super) generation: Generation,
    /// Youngest arrived copy.
    pub(super) last_copy: u64,
    /// Session of the node's migration, and session on which the node forwards.
    pub(super) migration: Option<usize>,
    pub(super) forward: Option<usize>,
    /// Session on which the owner pulls.
    pub(super) pull: Option<usize>,
    /// Earliest time of the next search for the owner.
    pub(super) reconnects_at: u64,
    /// Session on which the other node forwards.
    pub(super) served: Option<usize>,
    /// Forwarded writes done by this process.
    pub(super) done: HashSet<WriteNumber>,
    /// Connections whose next frame waits for a tag.
    pub(super) blocked: Vec<(usize, usize)>,
}

impl Node {
    pub(super) fn new(plan: &Plan, index: usize, record: AuthorityRecord) -> Self {
        Self {
            tags: plan.tags,
            controller: None,
            incarnation: 0,
            clock: Clock(plan.clocks[index]),
            deadline: None,
            disk: Disk::new(plan.sectors, plan.disks[index]),
            record,
            served_on: None,
            storing: None,
            shared: false,
            storing_shared: None,
            missing: None,
            storing_missing: None,
            base: None,
            written: None,
            image: OnImage::default(),
            slow_store: (0, 0),
            free_tags: Vec::new(),
            holders: Vec::new(),
            buffers: Vec::new(),
            source_buffers: HashMap::new(),
            pull_buffers: Vec::new(),
            pending: Vec::new(),
            free_pending: Vec::new(),
            doubled: Vec::new(),
            posted: Vec::new(),
            early_answers: 0,
            delayed: 0,
            excused: false,
            outgoing: false,
            generation: Generation(0),
            last_copy: 0,
            migration: None,
            forward: None,
            pull: None,
            reconnects_at: 0,
            done: HashSet::new(),
            served: None,
            blocked: Vec::new(),
        }
    }

    /// Clears the state of a process's memory.
    pub(super) fn clear(&mut self) {
        let tags = self.tags as usize;
        self.controller = None;
        self.deadline = None;
        self.storing = None;
        self.storing_shared = None;
        self.free_tags = (0..self.tags).rev().map(RequestTag).collect();
        self.holders = vec![Holder::Nobody; tags];
        self.buffers = vec![None; tags];
        self.source_buffers.clear();
        self.pull_buffers = vec![None; usize::from(PULL_SLOTS)];
        self.pending.clear();
        self.free_pending.clear();
        self.doubled = vec![None; tags];
        self.posted.clear();
        self.early_answers = 0;
        self.delayed = 0;
        self.outgoing = false;
        self.generation = Generation(0);
        self.migration = None;
        self.forward = None;
        self.pull = None;
        self.served = None;
        self.done.clear();
        self.blocked.clear();
        self.image.clear();
    }

    /// Stores the missing blocks of a new disk, durably.
    pub(super) fn store_missing_of_new_disk(&mut self, words: Vec<u64>, heat: Vec<u8>) {
        self.missing = Some(StoredMissing::new(words, heat));
    }

    pub(super) fn is_up(&self) -> bool {
        self.controller.is_some()
    }

    /// Returns true while the end of a migration is not stored.
    pub(super) fn is_undecided(&self) -> bool {
        matches!(
            self.record.ownership,
            Ownership::Accepted { .. } | Ownership::Relinquished { .. }
        )
    }

    pub(super) fn serves(&self) -> bool {
        self.controller.as_ref().is_some_and(Controller::serves)
    }

    /// Takes a free tag and puts the data into its buffer.
    pub(super) fn take_tag(&mut self, holder: Holder, data: Data) -> Option<RequestTag> {
        let tag = self.free_tags.pop()?;
        self.holders[tag.0 as usize] = holder;
        self.buffers[tag.0 as usize] = data;
        Some(tag)
    }

    /// Returns true if nothing is in flight and all tags are free.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.iter().all(Option::is_none)
            && self.storing.is_none()
            && self.storing_missing.is_none()
            && self.free_tags.len() == self.holders.len()
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
