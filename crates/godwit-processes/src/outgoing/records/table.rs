//! Moves of processes away from here: all under way, and the last that ended.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_api::{ErrorBody, ErrorCode, ProcessMigration, ProcessMigrationPhase as Phase};
use godwit_peers::clock;
use godwit_verbs::shim::Redirect;
use godwit_verbs::tables::Gid;

/// Most ended moves in the history.
const MAX_ENDED: usize = 200;
/// Most moves under way at once.
const MAX_MOVES: usize = 16;
/// Most redirects that a process can miss; its library takes no more.
const MAX_MISSED: usize = 1 << 16;

/// Moves under way and ended.
#[derive(Debug, Default)]
pub struct ProcessMigrations {
    table: Mutex<VecDeque<Tracked>>,
}

#[derive(Debug)]
struct Tracked {
    view: ProcessMigration,
    cancelled: Arc<AtomicBool>,
    /// True once all steps are done: the process works if alive.
    works: bool,
    /// Redirects of datagram queue pairs that moved while the process stood still, keyed by the address and the number
    /// that applications know.
    missed: BTreeMap<(Gid, u32), Redirect>,
}

impl Tracked {
    /// Returns true while the move keeps the process from working.
    fn stands_still(&self) -> bool {
        let still = matches!(
            self.view.phase,
            Phase::Dumping | Phase::Sending | Phase::Restoring | Phase::InDoubt | Phase::GoingBack
        );
        still && !self.works
    }

    fn misses(&mut self, redirects: &[Redirect]) {
        for redirect in redirects {
            let key = (redirect.remote, redirect.number);
            if self.missed.len() < MAX_MISSED || self.missed.contains_key(&key) {
                self.missed.insert(key, *redirect);
            }
        }
    }
}

fn moved(table: &VecDeque<Tracked>, pid: u32) -> bool {
    let mut running = table.iter().filter(|tracked| !tracked.view.phase.ended());
    running.any(|tracked| tracked.view.pid == pid)
}

impl ProcessMigrations {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Tracked>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a move and returns its cancellation flag.
    ///
    /// # Errors
    /// The process is being moved already, or too many processes are.
    pub fn begin(&self, view: ProcessMigration) -> Result<Arc<AtomicBool>, ErrorBody> {
        let mut table = self.lock();
        if moved(&table, view.pid) {
            let text = format!("process {} is being moved already", view.pid);
            return Err(
                ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit migration list'")
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
            works: false,
            missed: BTreeMap::new(),
        });
        while table.len() > MAX_ENDED
            && let Some(oldest) = table.iter().position(|tracked| tracked.view.phase.ended())
        {
            table.remove(oldest);
        }
        Ok(cancelled)
    }

    /// Changes the view of a move that has not ended.
    pub fn change(&self, id: &str, change: impl FnOnce(&mut ProcessMigration)) {
        let mut table = self.lock();
        let tracked = table.iter_mut().find(|tracked| tracked.view.id == id);
        if let Some(tracked) = tracked.filter(|tracked| !tracked.view.phase.ended()) {
            change(&mut tracked.view);
        }
    }

    /// Notes the end of a move.
    pub fn end(&self, id: &str, error: Option<ErrorBody>) {
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

    /// Returns all moves, oldest first.
    pub fn all(&self) -> Vec<ProcessMigration> {
        self.lock()
            .iter()
            .map(|tracked| tracked.view.clone())
            .collect()
    }

    /// Returns a move.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, id: &str) -> Result<ProcessMigration, ErrorBody> {
        let table = self.lock();
        let tracked = table.iter().find(|tracked| tracked.view.id == id);
        tracked.map(|tracked| tracked.view.clone()).ok_or_else(|| {
            let shown: String = id.chars().take(64).collect();
            let text = format!("this node knows no move {shown} of a process");
            ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit migration list'")
        })
    }

    /// Notes redirects for the processes that stand still in a move from here. Returns the numbers of these processes.
    pub(crate) fn note_missed(&self, redirects: &[Redirect]) -> Vec<u32> {
        let mut still = Vec::new();
        for tracked in self.lock().iter_mut() {
            let stands = tracked.stands_still();
            if stands {
                still.push(tracked.view.pid);
            }
            // A working process with missed redirects gets this one too: otherwise the older redirect would be told
            // last.
            if stands || !tracked.missed.is_empty() {
                tracked.misses(redirects);
            }
        }
        still
    }

    /// Marks all steps of a move as done: from now on a living process hears redirects itself.
    pub(crate) fn works(&self, id: &str) {
        if let Some(tracked) = self.lock().iter_mut().find(|one| one.view.id == id) {
            tracked.works = true;
        }
    }

    /// Takes the redirects that the process of a move missed while standing still.
    pub(crate) fn take_missed(&self, id: &str) -> Vec<Redirect> {
        let mut table = self.lock();
        let tracked = table.iter_mut().find(|tracked| tracked.view.id == id);
        let missed = tracked.map(|tracked| std::mem::take(&mut tracked.missed));
        missed.unwrap_or_default().into_values().collect()
    }

    /// Asks the task of a move to cancel.
    pub fn cancel(&self, id: &str) {
        if let Some(tracked) = self.lock().iter().find(|tracked| tracked.view.id == id) {
            tracked.cancelled.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::ProcessBreakdown;

    use super::*;

    fn view(id: &str, pid: u32) -> ProcessMigration {
        let seen = serde_json::json!({
            "id": id, "pid": pid, "command": "", "from": "a", "to": "b", "phase": "waiting", "partners": [],
            "queue_pairs": 1, "image_bytes": 0, "started_at": "", "breakdown_ms": ProcessBreakdown::default(),
            "warnings": [],
        });
        serde_json::from_value(seen).expect("a move")
    }

    /// Redirects queue pair 17 of `remote` to `to`.
    fn redirect(remote: u8, to: u8) -> Redirect {
        Redirect {
            remote: Gid([remote; 16]),
            number: 17,
            to: Gid([to; 16]),
            physical: 21,
        }
    }

    #[test]
    fn a_process_misses_what_is_told_while_it_stands_still_and_nothing_older() {
        let moves = ProcessMigrations::default();
        for (id, pid) in [("1", 7), ("2", 8)] {
            moves.begin(view(id, pid)).expect("it begins");
        }
        let goes = |phase| moves.change("1", |view| view.phase = phase);
        for phase in [Phase::Waiting, Phase::PreSetup, Phase::Stopping] {
            goes(phase);
            assert!(moves.note_missed(&[redirect(1, 2)]).is_empty());
        }
        for phase in [
            Phase::Dumping,
            Phase::Sending,
            Phase::Restoring,
            Phase::InDoubt,
            Phase::GoingBack,
        ] {
            goes(phase);
            assert_eq!(moves.note_missed(&[redirect(3, 4)]), [7]);
        }
        // The process works and hears this redirect. The missed redirects are told later, and must not be older.
        moves.works("1");
        assert!(moves.note_missed(&[redirect(3, 5)]).is_empty());
        assert_eq!(moves.take_missed("1"), [redirect(3, 5)]);
        assert!(moves.note_missed(&[redirect(3, 6)]).is_empty());
        for id in ["1", "2"] {
            assert!(moves.take_missed(id).is_empty());
        }
    }

    #[test]
    fn what_a_process_misses_is_bounded_and_the_last_place_counts() {
        let moves = ProcessMigrations::default();
        moves.begin(view("1", 7)).expect("it begins");
        moves.change("1", |view| view.phase = Phase::Sending);
        let numbered = |number| Redirect {
            number,
            ..redirect(1, 2)
        };
        let many: Vec<_> = (0..MAX_MISSED as u32 + 9).map(numbered).collect();
        moves.note_missed(&many);
        let last = Redirect {
            physical: 22,
            ..numbered(0)
        };
        moves.note_missed(&[last]);
        let missed = moves.take_missed("1");
        assert_eq!((missed.len(), missed[0]), (MAX_MISSED, last));
    }
}
