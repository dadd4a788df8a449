//! Moves of VMs away from here: all under way, and the last that ended.

use std::sync::Arc;
use std::time::Instant;

use godwit_core::units::MigrationId;
use godwit_move::{Course, Outcome, Plane, Step, Subject, Word};
use tokio::sync::Notify;

use crate::vms::Vms;
use godwit_api::{AnyMove, ErrorBody, Migration, VmMigration, VmMigrationPhase};
use godwit_context::moves::{self, MoveTable, end_with_node};
use godwit_context::store::machine::{VmEntry, VmMark};
use godwit_disks::migrations::live;
use godwit_peers::clock;

type Tracked = moves::Tracked<VmMigration, State>;

/// Moves under way and ended.
#[derive(Debug, Default)]
pub struct VmMigrations {
    table: MoveTable<VmMigration, State>,
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

/// The state of a move that the API does not show.
#[derive(Debug, Default)]
struct State {
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
        let settle = |view: &mut VmMigration| match course(view) {
            Some(course) if matches!(course.step(), Step::Pull(_)) => {
                view.phase = VmMigrationPhase::PullingMemory;
            }
            Some(course) if course.word() == Word::Given => view.end(clock::now_text(), None),
            _ => end_with_node(&format!("VM {}", view.vm), view),
        };
        self.table.lock().restore(stored, settle)
    }

    /// Begins a move. Returns its number in the store, and the signal for its cancellation.
    pub fn begin(&self, view: VmMigration, memory_bandwidth: Option<u64>) -> (u64, Arc<Notify>) {
        let cancelled = Arc::<Notify>::default();
        let state = State {
            disks: Vec::new(),
            began: Some(Instant::now()),
            cancelled: Arc::clone(&cancelled),
            memory_bandwidth,
        };
        (self.table.lock().add(view, state), cancelled)
    }

    /// Changes the view of a move that has not ended.
    pub fn change(&self, id: MigrationId, change: impl FnOnce(&mut VmMigration)) {
        self.table.change(&id.to_string(), change);
    }

    /// Adds the migration of a disk to a move.
    pub(crate) fn add_disk(&self, id: MigrationId, disk: String) {
        self.with(&id.to_string(), |state| state.disks.push(disk));
    }

    /// Ends a move, once. Returns its number and the view to store.
    pub fn end(
        &self,
        vms: &Vms,
        id: MigrationId,
        result: Result<(), ErrorBody>,
    ) -> Option<(u64, VmMigration)> {
        let last = |tracked: &mut Tracked| refresh(tracked, vms);
        self.table.end(&id.to_string(), result.err(), last)
    }

    /// Returns all moves, oldest first.
    pub fn all(&self, vms: &Vms) -> Vec<VmMigration> {
        let mut moves = self.table.lock();
        moves.all_mut().map(|tracked| shown(tracked, vms)).collect()
    }

    /// Returns a move.
    ///
    /// # Errors
    /// [`godwit_api::ErrorCode::NotFound`].
    pub fn get(&self, vms: &Vms, id: &str) -> Result<VmMigration, ErrorBody> {
        let mut moves = self.table.lock();
        moves.get(id).map(|tracked| shown(tracked, vms))
    }

    /// Returns the bandwidth limit of a VM's memory in bytes per second.
    pub(crate) fn memory_bandwidth(&self, id: MigrationId) -> Option<u64> {
        self.with(&id.to_string(), |state| state.memory_bandwidth)?
    }

    pub(crate) fn set_memory_bandwidth(&self, id: &str, memory_bandwidth: Option<u64>) {
        self.with(id, |state| state.memory_bandwidth = memory_bandwidth);
    }

    /// Tells the task of a move to cancel.
    pub fn cancel(&self, id: &str) {
        self.with(id, |state| state.cancelled.notify_one());
    }

    fn with<T>(&self, id: &str, of: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut moves = self.table.lock();
        moves.find(id).map(|tracked| of(&mut tracked.state))
    }
}

fn shown(tracked: &mut Tracked, vms: &Vms) -> VmMigration {
    if !tracked.view.ended() {
        refresh(tracked, vms);
    }
    tracked.view.clone()
}

/// Takes the present state of the disks' migrations.
fn refresh(Tracked { view, state, .. }: &mut Tracked, vms: &Vms) {
    let found = state.disks.iter();
    let disks: Vec<Migration> = found
        .filter_map(|id| vms.disk_migrations.get(id).ok())
        .map(|(id, view)| live(&vms.disk_migrations, id, view))
        .collect();
    let sent = |disk: &Migration| {
        let delayed = disk.promise.as_ref().map_or(0, |p| p.delayed_bytes_sent);
        disk.progress.bytes_sent + disk.progress.double_write_bytes + delayed
    };
    view.disk_bytes = disks.iter().map(sent).sum();
    view.disks = disks;
    view.memory_bytes = view.memory.bytes_sent;
    view.total_seconds = state.began.map(|began| began.elapsed().as_secs_f64());
}
