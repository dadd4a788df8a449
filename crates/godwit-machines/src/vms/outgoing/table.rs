//! Moves of VMs away from here: all under way, and the last that ended.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use godwit_core::units::MigrationId;
use godwit_move::{Course, Outcome, Plane, Step, Subject, Word};
use tokio::sync::Notify;

use crate::vms::Vms;
use godwit_api::{ErrorBody, ErrorCode, Migration, VmMigration, VmMigrationPhase};
use godwit_context::store::machine::{VmEntry, VmMark};
use godwit_disks::migrations::live;
use godwit_peers::clock;

/// Most ended moves in the history.
const MAX_ENDED: usize = 1000;

/// Moves under way and ended.
#[derive(Debug, Default)]
pub struct VmMigrations {
    table: Mutex<Table>,
}

/// Returns the course of the VM's move of this id, which was under way when the node ended: the stored VM knows the
/// decision alone. `lives` is true if the VM's QEMU may run here.
pub fn course(entry: &VmEntry, id: &str, lives: bool) -> Course {
    let gives = matches!(&entry.mark, Some(VmMark::Giving { migration }) if migration == id);
    let left_out = (!gives).then_some(Step::Pull(Plane::Memory));
    let mut course = Course::found(Subject::Machine, left_out, entry.moved_to.is_some(), lives);
    if course.step() == Step::Resume {
        // The destination hears from the disks, or asks.
        course.happened(Outcome::Done);
    }
    course
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// Oldest first. Only ended moves are dropped.
    all: VecDeque<Tracked>,
}

#[derive(Debug)]
struct Tracked {
    number: u64,
    view: VmMigration,
    /// The migrations of the VM's disks.
    disks: Vec<String>,
    began: Option<Instant>,
    cancelled: Arc<Notify>,
    /// Bandwidth limit of the memory in bytes per second.
    memory_bandwidth: Option<u64>,
}

impl VmMigrations {
    /// Takes the stored moves. `course` returns the course of an unfinished move if its VM is known. Returns the changed
    /// moves, to be stored.
    pub fn restore(
        &self,
        stored: Vec<(u64, VmMigration)>,
        course: impl Fn(&VmMigration) -> Option<Course>,
    ) -> Vec<(u64, VmMigration)> {
        let mut table = self.lock();
        let mut changed = Vec::new();
        for (number, mut view) in stored {
            let is_open = !view.phase.ended();
            let course = is_open.then(|| course(&view)).flatten();
            if course
                .as_ref()
                .is_some_and(|it| matches!(it.step(), Step::Pull(_)))
            {
                view.phase = VmMigrationPhase::PullingMemory;
            } else if is_open {
                view.ended_at = Some(clock::now_text());
                if course.is_some_and(|course| course.word() == Word::Given) {
                    view.phase = VmMigrationPhase::Completed;
                } else {
                    view.phase = VmMigrationPhase::Aborted;
                    let text = format!("the node ended while VM {} was migrating", view.vm);
                    let error = ErrorBody::new(ErrorCode::ShuttingDown, text);
                    view.error = Some(error.hint("start the migration again"));
                }
                changed.push((number, view.clone()));
            }
            table.next = table.next.max(number + 1);
            table.all.push_back(Tracked {
                number,
                view,
                disks: Vec::new(),
                began: None,
                cancelled: Arc::default(),
                memory_bandwidth: None,
            });
        }
        changed
    }

    /// Begins a move. Returns its number in the store, and the signal for its cancellation.
    pub fn begin(&self, view: VmMigration, memory_bandwidth: Option<u64>) -> (u64, Arc<Notify>) {
        let mut table = self.lock();
        let number = table.next;
        table.next += 1;
        let cancelled = Arc::new(Notify::new());
        table.all.push_back(Tracked {
            number,
            view,
            disks: Vec::new(),
            began: Some(Instant::now()),
            cancelled: Arc::clone(&cancelled),
            memory_bandwidth,
        });
        while table.all.len() > MAX_ENDED
            && let Some(oldest) = table.all.iter().position(|t| t.view.phase.ended())
        {
            table.all.remove(oldest);
        }
        (number, cancelled)
    }

    /// Changes the view of a move that has not ended.
    pub fn change(&self, id: MigrationId, change: impl FnOnce(&mut VmMigration)) {
        let id = id.to_string();
        let mut table = self.lock();
        let tracked = table.all.iter_mut().find(|tracked| tracked.view.id == id);
        if let Some(tracked) = tracked.filter(|tracked| !tracked.view.phase.ended()) {
            change(&mut tracked.view);
        }
    }

    /// Adds the migration of a disk to a move.
    pub(crate) fn add_disk(&self, id: MigrationId, disk: String) {
        let id = id.to_string();
        let mut table = self.lock();
        if let Some(tracked) = table.all.iter_mut().find(|tracked| tracked.view.id == id) {
            tracked.disks.push(disk);
        }
    }

    /// Ends a move, once. Returns its number and the view to store.
    pub fn end(
        &self,
        vms: &Vms,
        id: MigrationId,
        result: Result<(), ErrorBody>,
    ) -> Option<(u64, VmMigration)> {
        let id = id.to_string();
        let mut table = self.lock();
        let tracked = table.all.iter_mut().find(|tracked| tracked.view.id == id)?;
        if tracked.view.phase.ended() {
            return None;
        }
        tracked.refresh(vms);
        let view = &mut tracked.view;
        view.ended_at = Some(clock::now_text());
        match result {
            Ok(()) => view.phase = VmMigrationPhase::Completed,
            Err(error) => {
                view.phase = VmMigrationPhase::Aborted;
                view.error = Some(error);
            }
        }
        Some((tracked.number, view.clone()))
    }

    /// Returns all moves, oldest first.
    pub fn all(&self, vms: &Vms) -> Vec<VmMigration> {
        let mut table = self.lock();
        let shown = table.all.iter_mut().map(|tracked| tracked.shown(vms));
        shown.collect()
    }

    /// Returns a move.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, vms: &Vms, id: &str) -> Result<VmMigration, ErrorBody> {
        let mut table = self.lock();
        match table.all.iter_mut().find(|tracked| tracked.view.id == id) {
            Some(tracked) => Ok(tracked.shown(vms)),
            None => {
                let shown: String = id.chars().take(64).collect();
                let text = format!("this node knows no migration {shown} of a VM");
                Err(ErrorBody::new(ErrorCode::NotFound, text))
            }
        }
    }

    /// Returns the bandwidth limit of a VM's memory in bytes per second.
    pub(crate) fn memory_bandwidth(&self, id: MigrationId) -> Option<u64> {
        let (table, id) = (self.lock(), id.to_string());
        table
            .all
            .iter()
            .find(|it| it.view.id == id)?
            .memory_bandwidth
    }

    pub(crate) fn set_memory_bandwidth(&self, id: &str, memory_bandwidth: Option<u64>) {
        if let Some(tracked) = self.lock().all.iter_mut().find(|it| it.view.id == id) {
            tracked.memory_bandwidth = memory_bandwidth;
        }
    }

    /// Tells the task of a move to cancel.
    pub fn cancel(&self, id: &str) {
        let table = self.lock();
        if let Some(tracked) = table.all.iter().find(|tracked| tracked.view.id == id) {
            tracked.cancelled.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tracked {
    fn shown(&mut self, vms: &Vms) -> VmMigration {
        if !self.view.phase.ended() {
            self.refresh(vms);
        }
        self.view.clone()
    }

    /// Takes the present state of the disks' migrations.
    fn refresh(&mut self, vms: &Vms) {
        let disks: Vec<Migration> = self
            .disks
            .iter()
            .filter_map(|id| vms.disk_migrations.get(id).ok())
            .map(|(id, view)| live(&vms.disk_migrations, id, view))
            .collect();
        let sent = |disk: &Migration| {
            let delayed = disk.promise.as_ref().map_or(0, |p| p.delayed_bytes_sent);
            disk.progress.bytes_sent + disk.progress.double_write_bytes + delayed
        };
        self.view.disk_bytes = disks.iter().map(sent).sum();
        self.view.disks = disks;
        self.view.memory_bytes = self.view.memory.bytes_sent;
        self.view.total_seconds = self.began.map(|began| began.elapsed().as_secs_f64());
    }
}
