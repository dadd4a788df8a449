//! The moves of one kind that a node knows: all under way, and the last that ended.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_api::{AnyMove, ErrorBody, ErrorCode};
use godwit_peers::clock;

/// A table of moves. `V` is a move as the API shows it, `S` the further state of a move at this node, `ENDED` the
/// longest history.
#[derive(Debug)]
pub struct MoveTable<V, S, const ENDED: usize = 1000>(Mutex<Moves<V, S, ENDED>>);

/// The moves of a locked table, oldest first. Only ended moves are dropped.
#[derive(Debug)]
pub struct Moves<V, S, const ENDED: usize> {
    next: u64,
    all: VecDeque<Tracked<V, S>>,
}

/// A move in a table.
#[derive(Debug)]
pub struct Tracked<V, S> {
    /// The number in the store.
    pub number: u64,
    /// The move as the API shows it.
    pub view: V,
    /// The state that the API does not show.
    pub state: S,
}

impl<V, S, const ENDED: usize> Default for MoveTable<V, S, ENDED> {
    fn default() -> Self {
        Self(Mutex::new(Moves {
            next: 0,
            all: VecDeque::new(),
        }))
    }
}

impl<V: AnyMove + Clone, S, const ENDED: usize> MoveTable<V, S, ENDED> {
    /// Locks the table.
    pub fn lock(&self) -> MutexGuard<'_, Moves<V, S, ENDED>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all moves, oldest first.
    pub fn all(&self) -> Vec<V> {
        self.lock().all().map(|one| one.view.clone()).collect()
    }

    /// Returns a move.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, id: &str) -> Result<V, ErrorBody> {
        self.lock().get(id).map(|tracked| tracked.view.clone())
    }

    /// Changes a move that has not ended.
    pub fn change(&self, id: &str, change: impl FnOnce(&mut V)) {
        let mut moves = self.lock();
        if let Some(tracked) = moves.under_way(id) {
            change(&mut tracked.view);
        }
    }

    /// Ends a move, once, after `last` has brought its view up to date. With an error the subject has not moved. Returns
    /// the number and the view to store.
    pub fn end(
        &self,
        id: &str,
        error: Option<ErrorBody>,
        last: impl FnOnce(&mut Tracked<V, S>),
    ) -> Option<(u64, V)> {
        let mut moves = self.lock();
        let tracked = moves.under_way(id)?;
        last(tracked);
        tracked.view.end(clock::now_text(), error);
        Some((tracked.number, tracked.view.clone()))
    }
}

impl<V: AnyMove + Clone, S, const ENDED: usize> Moves<V, S, ENDED> {
    /// Returns the moves, oldest first.
    pub fn all(&self) -> impl Iterator<Item = &Tracked<V, S>> {
        self.all.iter()
    }

    /// Returns the moves to be changed, oldest first.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Tracked<V, S>> {
        self.all.iter_mut()
    }

    /// Returns a move, if the node knows it.
    pub fn find(&mut self, id: &str) -> Option<&mut Tracked<V, S>> {
        self.all_mut().find(|tracked| tracked.view.id() == id)
    }

    /// Returns a move that has not ended.
    pub fn under_way(&mut self, id: &str) -> Option<&mut Tracked<V, S>> {
        self.find(id).filter(|tracked| !tracked.view.ended())
    }

    /// Returns a move.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&mut self, id: &str) -> Result<&mut Tracked<V, S>, ErrorBody> {
        self.find(id).ok_or_else(|| {
            let shown: String = id.chars().take(64).collect();
            let text = format!("this node knows no migration {shown}");
            ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit migration list'")
        })
    }

    /// Adds a move that begins. Returns its number in the store.
    pub fn add(&mut self, view: V, state: S) -> u64 {
        let number = self.next;
        self.push(number, view, state);
        while self.all.len() > ENDED
            && let Some(oldest) = self.all.iter().position(|tracked| tracked.view.ended())
        {
            self.all.remove(oldest);
        }
        number
    }

    /// Takes the stored moves. `settle` ends an unfinished move unless the move goes on. Returns the moves that ended
    /// now, to be stored.
    pub fn restore(&mut self, stored: Vec<(u64, V)>, settle: impl Fn(&mut V)) -> Vec<(u64, V)>
    where
        S: Default,
    {
        let mut ended = Vec::new();
        for (number, mut view) in stored {
            if !view.ended() {
                settle(&mut view);
                if view.ended() {
                    ended.push((number, view.clone()));
                }
            }
            self.push(number, view, S::default());
        }
        ended
    }

    fn push(&mut self, number: u64, view: V, state: S) {
        self.next = self.next.max(number + 1);
        self.all.push_back(Tracked {
            number,
            view,
            state,
        });
    }
}

/// Ends a move of `subject` that ended with its node.
pub fn end_with_node(subject: &str, view: &mut impl AnyMove) {
    let text = format!("the node ended while {subject} was migrating");
    let error = ErrorBody::new(ErrorCode::ShuttingDown, text);
    view.end(
        clock::now_text(),
        Some(error.hint("start the migration again")),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_api::ProcessMigration;

    fn begun(id: &str) -> ProcessMigration {
        let view = serde_json::json!({
            "id": id, "pid": 7, "command": "", "from": "a", "to": "b", "phase": "waiting", "partners": [],
            "queue_pairs": 1, "image_bytes": 0, "started_at": "", "warnings": [],
            "breakdown_ms": godwit_api::ProcessBreakdown::default(),
        });
        serde_json::from_value(view).expect("a move")
    }

    #[test]
    fn only_ended_moves_are_forgotten() {
        let table = MoveTable::<ProcessMigration, (), 2>::default();
        let add = |id| table.lock().add(begun(id), ());
        assert_eq!([add("1"), add("2"), add("3")], [0, 1, 2]);
        let (number, view) = table.end("2", None, |_| ()).expect("ends");
        assert!(number == 1 && view.ended() && view.error.is_none());
        assert!(table.end("2", None, |_| ()).is_none(), "it has ended");
        add("4");
        let ids: Vec<_> = table.all().into_iter().map(|view| view.id).collect();
        assert_eq!(ids, ["1", "3", "4"]);
        assert_eq!(
            table.get("2").expect_err("forgotten").code,
            ErrorCode::NotFound
        );
    }

    #[test]
    fn a_restart_ends_what_does_not_go_on() {
        let table = MoveTable::<ProcessMigration, (), 9>::default();
        let stored = vec![(4, begun("1")), (5, begun("2"))];
        let settle = |view: &mut ProcessMigration| match view.id.as_str() {
            "1" => end_with_node("process 7", view),
            _ => view.command = String::from("goes on"),
        };
        let ended = table.lock().restore(stored, settle);
        assert!(matches!(&ended[..], [(4, view)] if view.ended() && view.error.is_some()));
        assert_eq!(table.get("2").expect("known").command, "goes on");
        assert_eq!(table.lock().add(begun("3"), ()), 6);
    }
}
