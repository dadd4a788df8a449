//! Disks that change hands together or not at all: given away, or taken over from a lost node.
//!
//! Each disk has its own migration and its own authority. All disks of a group are given away in one step, when the
//! source stores their records:
//!
//! 1. A disk's engine asks for its `Relinquished` record to be stored only after the destination has durably accepted
//!    the disk. Until the record is stored, the source owns the disk and answers as its owner, whatever the destination
//!    accepted.
//! 2. The group holds every such record back until all disks have asked. By then all acceptances of the destinations
//!    are durable. One transaction stores all records, so a crash leaves all of them or none.
//! 3. Until the transaction begins, any caller may fail the group. Disks with a held record learn that the record will
//!    never be stored ([`EngineHandle::not_persisted`]). Their migrations end as if cancelled during preparation, and
//!    the destination withdraws. A disk asking later gets the same answer. One lock makes the start of the transaction
//!    and a failure exclude each other.
//!
//! At any time, before and after a crash, all disks of the group therefore have the same answer to "was it given
//! away?". The destination needs no more to decide whether to run the machine.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_block::engine::EngineHandle;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::AbortReason;
use tokio::sync::watch;

use crate::disks::Disks;
use crate::disks::disk::Disk;
use godwit_context::failpoint;
use godwit_context::store::DiskEntry;
use godwit_context::store::machine::VmEntry;
use godwit_context::store::machine::protections::ProtectionEntry;

/// Time between two attempts to store the records.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// The progress of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupState {
    /// Some disks have not asked yet.
    Gathering,
    /// All disks have asked and the records are being stored. The group can no longer fail.
    Storing,
    /// All disks are given away.
    Given,
    /// No disk is given away, and none will be.
    Failed,
}

/// The disks of one moving machine.
pub struct SwitchGroup {
    vm: String,
    moved: VmEntry,
    disks: usize,
    held: Mutex<Vec<Held>>,
    state: watch::Sender<GroupState>,
    handed_over: HandedOver,
    /// Set if the disks are taken over: the protection from then on.
    taken: Option<ProtectionEntry>,
}

/// Runs once the records are stored that give the machine away, and before its disks hear of them.
pub type HandedOver =
    Box<dyn Fn(VmEntry) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

#[derive(Debug)]
struct Held {
    disk: Arc<Disk>,
    engine: EngineHandle,
    entry: DiskEntry,
    record: AuthorityRecord,
}

impl fmt::Debug for SwitchGroup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SwitchGroup")
            .field("vm", &self.vm)
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}

impl SwitchGroup {
    /// Creates a group of `disks` disks. `moved` is the VM's entry once the disks are given away.
    pub fn new(vm: String, moved: VmEntry, disks: usize, handed_over: HandedOver) -> Arc<Self> {
        Arc::new(Self {
            vm,
            moved,
            disks,
            held: Mutex::default(),
            state: watch::Sender::new(GroupState::Gathering),
            handed_over,
            taken: None,
        })
    }

    /// Creates a group of `disks` disks that this node takes over, with the VM's entry and protection from then on.
    pub fn taking(
        vm: String,
        entry: VmEntry,
        protection: ProtectionEntry,
        disks: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            vm,
            moved: entry,
            disks,
            held: Mutex::default(),
            state: watch::Sender::new(GroupState::Gathering),
            handed_over: Box::new(|_| Box::pin(std::future::ready(()))),
            taken: Some(protection),
        })
    }

    /// Returns true if this record is stored together with those of the other disks.
    pub(crate) fn gathers(&self, record: &AuthorityRecord) -> bool {
        match record.ownership {
            Ownership::Relinquished { .. } => self.taken.is_none(),
            Ownership::Serving => self.taken.is_some(),
            _ => false,
        }
    }

    /// Returns the VM's entry once the disks are given away.
    pub const fn moved(&self) -> &VmEntry {
        &self.moved
    }

    /// Watches the progress of the group.
    pub fn state(&self) -> watch::Receiver<GroupState> {
        self.state.subscribe()
    }

    /// Fails the group. Returns false if the disks are given away or about to be.
    pub fn fail(&self, reason: AbortReason) -> bool {
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

    /// Asks to store a record by which a disk is given away. The disk's engine hears the decision. The call of the last
    /// disk stores all records.
    pub async fn ask(
        &self,
        disks: &Arc<Disks>,
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
            self.give_away(disks, all).await;
        }
    }

    /// Gives away a machine without disks. Returns at once: the transaction goes on even if the caller is dropped.
    pub fn ask_without_disks(self: &Arc<Self>, disks: &Arc<Disks>) {
        if self.disks == 0 && self.begin() {
            let (group, disks) = (Arc::clone(self), Arc::clone(disks));
            godwit_context::spawn(async move { group.give_away(&disks, Vec::new()).await });
        }
    }

    /// Holds a record. Returns all records once they are complete; the caller must then store them.
    fn gather(&self, asked: Held) -> Option<Vec<Held>> {
        let mut held = self.lock();
        if *self.state.borrow() != GroupState::Gathering {
            // No disk asks twice, so the group has failed.
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

    async fn give_away(&self, disks: &Arc<Disks>, all: Vec<Held>) {
        failpoint::reach(String::from("persist::before::group")).await;
        let records: Vec<_> = all
            .iter()
            .map(|held| (held.disk.name.clone(), held.entry.clone(), held.record))
            .collect();
        // Retried until success, as with a single disk's record: a failed commit may still have reached the disk.
        while let Err(error) = disks
            .context
            .store
            .put_group(&records, &self.vm, &self.moved, self.taken.as_ref())
            .await
        {
            tracing::error!(vm = self.vm, %error, "cannot store who has the VM; trying again");
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY) => {}
                () = disks.context.closed() => return,
            }
        }
        failpoint::reach(String::from("persist::after::group")).await;
        (self.handed_over)(self.moved.clone()).await;
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
            takes = self.taken.is_some(),
            "stored who has the VM"
        );
        self.state.send_replace(GroupState::Given);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
