//! Moves of processes away from here: all under way, and the last that ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_api::{ErrorBody, ErrorCode, ProcessMigration, ProcessMigrationPhase as Phase};
use godwit_context::moves::{self, MoveTable};
use godwit_verbs::shim::Redirect;
use godwit_verbs::tables::Gid;

/// Most ended moves in the history.
const MAX_ENDED: usize = 200;
/// Most moves under way at once.
const MAX_MOVES: usize = 16;
/// Most redirects that a process can miss; its library takes no more.
const MAX_MISSED: usize = 1 << 16;

type Tracked = moves::Tracked<ProcessMigration, State>;

/// Moves under way and ended.
#[derive(Debug, Default)]
pub struct ProcessMigrations {
    /// The moves as the API shows them.
    pub table: MoveTable<ProcessMigration, State, MAX_ENDED>,
}

/// The state of a move that the API does not show.
#[derive(Debug, Default)]
pub struct State {
    cancelled: Arc<AtomicBool>,
    /// True once all steps are done: the process works if alive.
    works: bool,
    /// Redirects of datagram queue pairs that moved while the process stood still, keyed by the address and the number
    /// that applications know.
    missed: BTreeMap<(Gid, u32), Redirect>,
}

impl State {
    fn misses(&mut self, redirects: &[Redirect]) {
        for redirect in redirects {
            let key = (redirect.remote, redirect.number);
            if self.missed.len() < MAX_MISSED || self.missed.contains_key(&key) {
                self.missed.insert(key, *redirect);
            }
        }
    }
}

/// Returns true while the move keeps the process from working.
fn stands_still(Tracked { view, state, .. }: &Tracked) -> bool {
    let still = matches!(
        view.phase,
        Phase::Dumping | Phase::Sending | Phase::Restoring | Phase::InDoubt | Phase::GoingBack
    );
    still && !state.works
}

impl ProcessMigrations {
    /// Begins a move and returns its cancellation flag.
    ///
    /// # Errors
    /// The process is being moved already, or too many processes are.
    pub fn begin(&self, view: ProcessMigration) -> Result<Arc<AtomicBool>, ErrorBody> {
        let mut moves = self.table.lock();
        let running = || moves.all().filter(|tracked| !tracked.view.phase.ended());
        if running().any(|tracked| tracked.view.pid == view.pid) {
            let text = format!("process {} is being moved already", view.pid);
            return Err(
                ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit migration list'")
            );
        }
        if running().count() >= MAX_MOVES {
            let text = format!("{MAX_MOVES} processes are being moved already");
            return Err(ErrorBody::new(ErrorCode::Busy, text).hint("try again when one has ended"));
        }
        let state = State::default();
        let cancelled = Arc::clone(&state.cancelled);
        moves.add(view, state);
        Ok(cancelled)
    }

    /// Notes redirects for the processes that stand still in a move from here. Returns the numbers of these processes.
    pub(crate) fn note_missed(&self, redirects: &[Redirect]) -> Vec<u32> {
        let mut still = Vec::new();
        for tracked in self.table.lock().all_mut() {
            let stands = stands_still(tracked);
            if stands {
                still.push(tracked.view.pid);
            }
            // A working process with missed redirects gets this one too: otherwise the older redirect would be told
            // last.
            if stands || !tracked.state.missed.is_empty() {
                tracked.state.misses(redirects);
            }
        }
        still
    }

    /// Marks all steps of a move as done: from now on a living process hears redirects itself.
    pub(crate) fn works(&self, id: &str) {
        if let Some(tracked) = self.table.lock().find(id) {
            tracked.state.works = true;
        }
    }

    /// Takes the redirects that the process of a move missed while standing still.
    pub(crate) fn take_missed(&self, id: &str) -> Vec<Redirect> {
        let mut moves = self.table.lock();
        let tracked = moves.find(id);
        let missed = tracked.map(|tracked| std::mem::take(&mut tracked.state.missed));
        missed.unwrap_or_default().into_values().collect()
    }

    /// Asks the task of a move to cancel.
    pub fn cancel(&self, id: &str) {
        if let Some(tracked) = self.table.lock().find(id) {
            tracked.state.cancelled.store(true, Ordering::Release);
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
        let goes = |phase| moves.table.change("1", |view| view.phase = phase);
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
        moves.table.change("1", |view| view.phase = Phase::Sending);
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
