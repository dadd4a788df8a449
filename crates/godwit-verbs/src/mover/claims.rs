//! Which move has a process. A process that moves is not held for the move of another one meanwhile: what holds it would
//! lose sight of it. So of two moves that need the same process for different things one waits for the other's end.
//!
//! A move takes all that it needs or nothing: first its claims, in one order that is the same for all moves, and what it
//! has is given back as soon as one is another's. Then a move that has the claim that stopped it either gets all of its
//! own, or is itself stopped at a later one; of moves that stop each other the one that is stopped last is stopped by
//! none that waits. `several` tries all orders of several moves.

use std::collections::{BTreeMap, BTreeSet};

use super::links::Party;

/// The processes of one host that moves have, by the moves' ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claims {
    of: BTreeMap<u32, Claim>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Claim {
    /// One move moves it.
    Moved(String),
    /// These hold it as a partner, each with other queue pairs.
    Held(BTreeSet<String>),
}

impl Claims {
    /// The move `id` wants to move the process.
    ///
    /// # Errors
    /// The id of another move that has it.
    pub fn to_move(&mut self, pid: u32, id: &str) -> Result<(), String> {
        match self.of.get(&pid) {
            Some(Claim::Moved(other)) if other != id => Err(other.clone()),
            Some(Claim::Held(others)) if !others.is_empty() => {
                Err(others.first().cloned().unwrap_or_default())
            }
            _ => {
                self.of.insert(pid, Claim::Moved(id.to_owned()));
                Ok(())
            }
        }
    }

    /// The move `id` wants to hold the process as a partner.
    ///
    /// # Errors
    /// The id of the move that moves it.
    pub fn to_hold(&mut self, pid: u32, id: &str) -> Result<(), String> {
        match self
            .of
            .entry(pid)
            .or_insert_with(|| Claim::Held(BTreeSet::new()))
        {
            Claim::Moved(other) => Err(other.clone()),
            Claim::Held(ids) => {
                ids.insert(id.to_owned());
                Ok(())
            }
        }
    }

    /// The move `id` does not need the process any more.
    pub fn give_back(&mut self, pid: u32, id: &str) {
        let empty = match self.of.get_mut(&pid) {
            Some(Claim::Moved(own)) => own == id,
            Some(Claim::Held(ids)) => {
                ids.remove(id);
                ids.is_empty()
            }
            None => false,
        };
        if empty {
            self.of.remove(&pid);
        }
    }

    /// The move `id` has ended: it moves no process any more, under whatever number. What it holds as partners is given back
    /// one by one.
    pub fn moved(&mut self, id: &str) {
        self.of
            .retain(|_, claim| !matches!(claim, Claim::Moved(own) if own == id));
    }

    /// A move that holds the process as a partner.
    pub fn holder(&self, pid: u32) -> Option<&str> {
        match self.of.get(&pid) {
            Some(Claim::Held(ids)) => ids.first().map(String::as_str),
            _ => None,
        }
    }

    /// Whether a move moves the process.
    #[cfg(test)]
    pub(super) fn is_moved(&self, pid: u32) -> bool {
        matches!(self.of.get(&pid), Some(Claim::Moved(_)))
    }
}

/// A process that a move needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    /// The node of its host. Names come before numbers: this is the order in which claims are made.
    pub node: String,
    /// The process.
    pub pid: u32,
    /// Whether it is the one that moves, and no partner.
    pub moves: bool,
}

/// How far a move is with what it needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taking {
    order: Vec<Wanted>,
    taken: usize,
}

impl Taking {
    /// Of a process at a node, and of its partners at theirs. Nothing is taken yet.
    pub fn new(node: &str, pid: u32, partners: &[(String, Party)]) -> Self {
        let partners = partners.iter().map(|(node, party)| Wanted {
            node: node.clone(),
            pid: party.pid,
            moves: false,
        });
        let own = Wanted {
            node: node.to_owned(),
            pid,
            moves: true,
        };
        let mut order: Vec<Wanted> = partners.chain([own]).collect();
        order.sort();
        order.dedup();
        Self { order, taken: 0 }
    }

    /// What is to be claimed next; nothing once the move has all.
    pub fn next(&self) -> Option<&Wanted> {
        self.order.get(self.taken)
    }

    /// What [`Taking::next`] says is this move's now.
    pub fn took(&mut self) {
        self.taken += 1;
    }

    /// Gives what is to be given back, since the next one is another's.
    pub fn give_back(&mut self) -> &[Wanted] {
        let taken = std::mem::take(&mut self.taken);
        self.order.get(..taken).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_has_ended_moves_nothing_under_whatever_number() {
        let mut claims = Claims::default();
        claims.to_move(7, "1").unwrap();
        claims.to_move(8, "1").unwrap();
        claims.to_move(9, "2").unwrap();
        claims.to_hold(10, "1").unwrap();
        claims.moved("1");
        assert_eq!(
            [7, 8, 9].map(|pid| claims.is_moved(pid)),
            [false, false, true]
        );
        assert_eq!(claims.holder(10), Some("1"));
    }
}
