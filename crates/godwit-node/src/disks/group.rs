//! Disks that change hands together or not at all.
//!
//! Each disk has its own migration and its own authority. What makes them one is the moment when
//! the source stores that it gave them away:
//!
//! 1. A disk's engine asks for its `Relinquished` record to be stored only after the destination
//!    has durably accepted that disk. Until the record is stored the source owns the disk, whatever
//!    the destination accepted, and whoever asks the source hears so.
//! 2. The group holds every such record back until all its disks have asked. Then all destinations'
//!    acceptances are durable, and one transaction stores all records: a crash leaves all of them or
//!    none.
//! 3. Until that transaction begins anybody may fail the group. Disks whose record is held are told
//!    that it will never be stored ([`EngineHandle::not_persisted`]): their migrations end as if they
//!    had been cancelled while being prepared, and the destination withdraws. A disk that asks later
//!    is told the same. Beginning the transaction and failing exclude each other under one lock.
//!
//! So for every disk of the group the answer to "was it given away?" is the same at any time, before
//! and after a crash, which is all that the destination needs in order to run the machine or not.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_block::engine::EngineHandle;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::AbortReason;
use tokio::sync::watch;

use crate::disks::disk::Disk;
use crate::failpoint;
use crate::node::Node;
use crate::store::DiskEntry;
use crate::store::machine::VmEntry;
use crate::vms::memory::pooled;

/// How long to wait before a failed store is tried again.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// How far a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupState {
    /// Not all disks have asked.
    Gathering,
    /// All have asked: the records are being stored, and nothing stops that any more.
    Storing,
    /// All disks are given away.
    Given,
    /// None is, and none will be.
    Failed,
}

/// The disks of one machine on their way.
#[derive(Debug)]
pub(crate) struct SwitchGroup {
    vm: String,
    moved: VmEntry,
    disks: usize,
    held: Mutex<Vec<Held>>,
    state: watch::Sender<GroupState>,
}

#[derive(Debug)]
struct Held {
    disk: Arc<Disk>,
    engine: EngineHandle,
    entry: DiskEntry,
    record: AuthorityRecord,
}

impl SwitchGroup {
    /// A group of this many disks; `moved` is how the VM is stored once they are given away.
    pub(crate) fn new(vm: String, moved: VmEntry, disks: usize) -> Arc<Self> {
        Arc::new(Self {
            vm,
            moved,
            disks,
            held: Mutex::default(),
            state: watch::Sender::new(GroupState::Gathering),
        })
    }

    /// How the VM is stored once the disks are given away.
    pub(crate) const fn moved(&self) -> &VmEntry {
        &self.moved
    }

    /// How far it is, now and whenever that changes.
    pub(crate) fn state(&self) -> watch::Receiver<GroupState> {
        self.state.subscribe()
    }

    /// Gives the group up. False when its disks are given away, or are about to be.
    pub(crate) fn fail(&self, reason: AbortReason) -> bool {
        let mut held = self.lock();
        match *self.state.borrow() {
            GroupState::Storing | GroupState::Given => return false,
            GroupState::Failed => return true,
            GroupState::Gathering => {}
        }
        self.state.send_replace(GroupState::Failed);
        for held in held.drain(..) {
            held.engine.not_persisted(reason);
        }
        true
    }

    /// A disk asks for the record to be stored that gives it away. It hears when that is decided;
    /// the last disk's call stores all records.
    pub(crate) async fn ask(
        &self,
        node: &Arc<Node>,
        disk: &Arc<Disk>,
        engine: EngineHandle,
        record: AuthorityRecord,
    ) {
        let mut entry = disk.lock().entry.clone();
        entry.adopt(&record);
        let asked = Held {
            disk: Arc::clone(disk),
            engine,
            entry,
            record,
        };
        if let Some(all) = self.gather(asked) {
            self.give_away(node, all).await;
        }
    }

    /// Gives away a machine that has no disks. Returns at once: what has begun is not given up, as whoever asks may be.
    pub(crate) fn ask_without_disks(self: &Arc<Self>, node: &Arc<Node>) {
        if self.disks == 0 && self.begin() {
            let (group, node) = (Arc::clone(self), Arc::clone(node));
            tokio::spawn(async move { group.give_away(&node, Vec::new()).await });
        }
    }

    /// Holds a record. Returns all of them once they are complete: then they must be stored.
    fn gather(&self, asked: Held) -> Option<Vec<Held>> {
        let mut held = self.lock();
        if *self.state.borrow() != GroupState::Gathering {
            // Nobody asks twice, so the group has failed.
            asked.engine.not_persisted(AbortReason::Cancelled);
            return None;
        }
        held.push(asked);
        if held.len() < self.disks {
            return None;
        }
        self.state.send_replace(GroupState::Storing);
        Some(std::mem::take(&mut held))
    }

    fn begin(&self) -> bool {
        let _held = self.lock();
        let free = *self.state.borrow() == GroupState::Gathering;
        if free {
            self.state.send_replace(GroupState::Storing);
        }
        free
    }

    async fn give_away(&self, node: &Arc<Node>, all: Vec<Held>) {
        failpoint::reach(String::from("persist::before::group")).await;
        let records: Vec<_> = all
            .iter()
            .map(|held| (held.disk.name.clone(), held.entry.clone(), held.record))
            .collect();
        // As with a single disk's record: it is tried until it works, because a failed commit may
        // have reached the disk all the same.
        while let Err(error) = node.store.put_group(&records, &self.vm, &self.moved).await {
            tracing::error!(vm = self.vm, %error, "cannot store that the VM is given away; trying again");
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY) => {}
                () = node.closed() => return,
            }
        }
        failpoint::reach(String::from("persist::after::group")).await;
        pooled::hand_over(node, &self.vm, &self.moved).await;
        failpoint::reach(String::from("vm::memory-given")).await;
        for held in all {
            {
                let mut inner = held.disk.lock();
                inner.entry = held.entry;
                inner.record = held.record;
                inner.problem = None;
            }
            held.engine.persisted();
        }
        tracing::info!(
            vm = self.vm,
            disks = self.disks,
            "stored that the VM is given away"
        );
        self.state.send_replace(GroupState::Given);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
