//! Claims of moves on processes. A process that moves is not held for the move of another process meanwhile: the
//! holding move would lose track of the process. If two moves need the same process for different purposes, one waits
//! for the end of the other.
//!
//! A move takes all of its claims or none. The order of claims is the same for all moves. A move that finds a claim
//! taken gives back the claims that it has. Once the move gets the blocking claim, the move either gets all claims or
//! is blocked at a later one. Among moves that block each other, no waiting move blocks the one that is furthest in
//! this order. `several` tries all orders of several moves.

use std::collections::{BTreeMap, BTreeSet};

use super::links::Party;

/// The claims on the processes of one host, by the ids of moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claims {
    of: BTreeMap<u32, Claim>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Claim {
    /// Claimed by the move of the process itself.
    Moved(String),
    /// Held as a partner by these moves, each with other queue pairs.
    Held(BTreeSet<String>),
}

impl Claims {
    /// Claims the process for the move `id`, which moves the process.
    ///
    /// # Errors
    /// The id of another move with a claim on the process.
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

    /// Claims the process for the move `id` as a partner.
    ///
    /// # Errors
    /// The id of the move that moves the process.
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

    /// Gives back the claim of the move `id` on the process.
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

    /// Gives back the claims of the move `id` on processes to move, under any number. Claims on partners are given back
    /// one by one.
    pub fn moved(&mut self, id: &str) {
        self.of
            .retain(|_, claim| !matches!(claim, Claim::Moved(own) if own == id));
    }

    /// Returns a move that holds the process as a partner.
    pub fn holder(&self, pid: u32) -> Option<&str> {
        match self.of.get(&pid) {
            Some(Claim::Held(ids)) => ids.first().map(String::as_str),
            _ => None,
        }
    }

    /// Returns true if a move moves the process.
    #[cfg(test)]
    pub(super) fn is_moved(&self, pid: u32) -> bool {
        matches!(self.of.get(&pid), Some(Claim::Moved(_)))
    }
}

/// A process that a move needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    /// The node of the process's host. Claims are made in the order of nodes, then of numbers.
    pub node: String,
    /// The process.
    pub pid: u32,
    /// True for the process that moves, false for a partner.
    pub moves: bool,
}

/// The progress of a move with its claims.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taking {
    order: Vec<Wanted>,
    taken: usize,
}

impl Taking {
    /// Returns the claims for the move of a process at `node` with these partners. No claim is taken yet.
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

    /// Returns the next claim; none once the move has all.
    pub fn next(&self) -> Option<&Wanted> {
        self.order.get(self.taken)
    }

    /// Records that the move has the claim from [`Taking::next`].
    pub fn took(&mut self) {
        self.taken += 1;
    }

    /// Returns the claims to give back because the next one is taken.
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
