//! Moves of processes away from here: those under way, and the last that ended.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock;
use godwit_api::{ErrorBody, ErrorCode, ProcessMigration, ProcessMigrationPhase as Phase};

/// Ended moves that are remembered.
const MAX_ENDED: usize = 200;
/// Moves under way at once.
const MAX_MOVES: usize = 16;

/// Moves under way and ended.
#[derive(Debug, Default)]
pub(crate) struct ProcessMigrations {
    table: Mutex<VecDeque<Tracked>>,
}

#[derive(Debug)]
struct Tracked {
    view: ProcessMigration,
    cancelled: Arc<AtomicBool>,
}

fn moved(table: &VecDeque<Tracked>, pid: u32) -> bool {
    let mut running = table.iter().filter(|tracked| !tracked.view.phase.ended());
    running.any(|tracked| tracked.view.pid == pid)
}

impl ProcessMigrations {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Tracked>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A move begins. Gives what tells its task to give up.
    ///
    /// # Errors
    /// The process is being moved already, or too many are.
    pub(crate) fn begin(&self, view: ProcessMigration) -> Result<Arc<AtomicBool>, ErrorBody> {
        let mut table = self.lock();
        if moved(&table, view.pid) {
            let text = format!("process {} is being moved already", view.pid);
            return Err(
                ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit process moves'")
            );
        }
        let running = table
            .iter()
            .filter(|tracked| !tracked.view.phase.ended())
            .count();
        if running >= MAX_MOVES {
            let text = format!("{MAX_MOVES} processes are being moved already");
            return Err(ErrorBody::new(ErrorCode::Busy, text).hint("try again when one has ended"));
        }
        let cancelled = Arc::new(AtomicBool::new(false));
        table.push_back(Tracked {
            view,
            cancelled: Arc::clone(&cancelled),
        });
        while table.len() > MAX_ENDED
            && let Some(oldest) = table.iter().position(|tracked| tracked.view.phase.ended())
        {
            table.remove(oldest);
        }
        Ok(cancelled)
    }

    /// Changes what is shown of a move that has not ended.
    pub(crate) fn change(&self, id: &str, change: impl FnOnce(&mut ProcessMigration)) {
        let mut table = self.lock();
        let tracked = table.iter_mut().find(|tracked| tracked.view.id == id);
        if let Some(tracked) = tracked.filter(|tracked| !tracked.view.phase.ended()) {
            change(&mut tracked.view);
        }
    }

    /// Ends a move.
    pub(crate) fn end(&self, id: &str, error: Option<ErrorBody>) {
        self.change(id, |view| {
            view.ended_at = Some(clock::now_text());
            view.phase = if error.is_some() {
                Phase::Aborted
            } else {
                Phase::Completed
            };
            view.error = error;
        });
    }

    /// All moves, oldest first.
    pub(crate) fn all(&self) -> Vec<ProcessMigration> {
        self.lock()
            .iter()
            .map(|tracked| tracked.view.clone())
            .collect()
    }

    /// One move.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub(crate) fn get(&self, id: &str) -> Result<ProcessMigration, ErrorBody> {
        let table = self.lock();
        let tracked = table.iter().find(|tracked| tracked.view.id == id);
        tracked.map(|tracked| tracked.view.clone()).ok_or_else(|| {
            let shown: String = id.chars().take(64).collect();
            let text = format!("this node knows no move {shown} of a process");
            ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit process moves'")
        })
    }

    /// Whether a move of this node's has taken the process out of work. At its end the process hears where others are.
    pub(crate) fn stands_still(&self, pid: u32) -> bool {
        self.lock().iter().any(|tracked| {
            let still = matches!(
                tracked.view.phase,
                Phase::Dumping
                    | Phase::Sending
                    | Phase::Restoring
                    | Phase::InDoubt
                    | Phase::GoingBack
            );
            still && tracked.view.pid == pid
        })
    }

    /// Asks the task of a move to give up.
    pub(crate) fn cancel(&self, id: &str) {
        if let Some(tracked) = self.lock().iter().find(|tracked| tracked.view.id == id) {
            tracked.cancelled.store(true, Ordering::Release);
        }
    }
}
