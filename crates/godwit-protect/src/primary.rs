//! The node that runs a protected machine.

use serde::{Deserialize, Serialize};

use crate::Order;
use crate::grant::{Ask, Asking, Grant, Member};

/// State of a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrimaryState {
    /// The machine runs without a backup.
    Alone,
    /// The backup has every write so far and receives all others. The witness is asked to say so.
    Pairing,
    /// The backup may take the machine.
    Paired,
    /// The backup is lost. Nothing is acknowledged until the witness has answered.
    Severed,
    /// The witness gave the machine to the backup.
    Ended,
}

/// The durable knowledge of a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrimaryRecord {
    /// This node.
    pub me: Member,
    /// The newest grant that this node has seen.
    pub known: Grant,
    /// True if this node needs no answer of the witness to run the machine after a restart.
    pub alone: bool,
}

/// The primary of a protected machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Primary {
    asking: Asking,
    state: PrimaryState,
    /// True while a severed primary leaves the machine to its backup, until the backup counts as lost.
    leaves: bool,
}

impl Primary {
    /// Starts a primary that runs the machine without a backup.
    pub const fn new(me: Member, known: Grant) -> Self {
        Self {
            asking: Asking::new(me, known),
            state: PrimaryState::Alone,
            leaves: false,
        }
    }

    /// Starts a primary after a restart of its node. The machine's I/O is held unless the record says otherwise.
    pub fn restarted(record: PrimaryRecord) -> (Self, Vec<Order>) {
        let mut primary = Self::new(record.me, record.known);
        let orders = match (record.alone, record.known.owner == record.me) {
            (true, _) => Vec::new(),
            (false, true) => primary.sever(),
            (false, false) => {
                primary.state = PrimaryState::Ended;
                let mut orders = vec![Order::End];
                orders.extend(primary.ask());
                orders
            }
        };
        (primary, orders)
    }

    /// Returns the state.
    pub const fn state(&self) -> PrimaryState {
        self.state
    }

    /// Returns the record that the node stores before carrying out any order.
    pub const fn record(&self) -> PrimaryRecord {
        PrimaryRecord {
            me: self.asking.me,
            known: self.asking.known,
            alone: matches!(self.state, PrimaryState::Alone),
        }
    }

    /// Notes that the backup has every write so far, follows, and that no write is acknowledged any more before the
    /// backup has the write.
    pub fn in_sync(&mut self) -> Vec<Order> {
        if self.state != PrimaryState::Alone {
            return Vec::new();
        }
        self.state = PrimaryState::Pairing;
        self.ask()
    }

    /// Notes that the backup is lost, or that the protection is to end.
    pub fn backup_lost(&mut self) -> Vec<Order> {
        match self.state {
            PrimaryState::Pairing | PrimaryState::Paired => self.sever(),
            PrimaryState::Severed if self.leaves => {
                self.leaves = false;
                self.ask()
            }
            PrimaryState::Alone | PrimaryState::Severed | PrimaryState::Ended => Vec::new(),
        }
    }

    /// Notes that the machine has died here, although its node lives: the backup, which is told, is to take the machine. A
    /// backup that counts as [lost](Self::backup_lost) later does not.
    pub fn machine_died(&mut self) -> Vec<Order> {
        if self.state != PrimaryState::Paired {
            return Vec::new();
        }
        self.leaves = true;
        self.sever()
    }

    /// Returns true while the machine is left to the backup.
    pub const fn leaves(&self) -> bool {
        self.leaves
    }

    fn sever(&mut self) -> Vec<Order> {
        self.state = PrimaryState::Severed;
        let mut orders = vec![Order::Hold];
        orders.extend(self.ask());
        orders
    }

    /// Asks for the grant that the state needs.
    fn ask(&mut self) -> Vec<Order> {
        let me = self.asking.me;
        match self.state {
            PrimaryState::Alone | PrimaryState::Paired => Vec::new(),
            PrimaryState::Pairing => self.asking.ask(me, true),
            PrimaryState::Severed if self.leaves => self.asking.look(),
            PrimaryState::Severed => self.asking.ask(me, false),
            // The backup may die before it runs the machine, and gives the machine back then.
            PrimaryState::Ended => self.asking.look(),
        }
    }

    /// Asks again, because no answer has come.
    pub fn retry(&mut self) -> Vec<Order> {
        let again = self.asking.again();
        if again.is_empty() { self.ask() } else { again }
    }

    /// Takes the witness's answer to a request: the grant afterwards.
    pub fn answered(&mut self, ask: &Ask, current: Grant) -> Vec<Order> {
        if !self.asking.answered(ask, current) {
            return Vec::new();
        }
        if current.owner != self.asking.me {
            self.leaves = false;
            let ended = self.state == PrimaryState::Ended;
            self.state = PrimaryState::Ended;
            return if ended { Vec::new() } else { vec![Order::End] };
        }
        let granted = current == ask.wanted;
        match self.state {
            PrimaryState::Pairing if granted => {
                self.state = PrimaryState::Paired;
                vec![Order::Protected]
            }
            // The backup has not taken the machine yet: see `retry`.
            PrimaryState::Severed if self.leaves => Vec::new(),
            // The new term voids earlier requests of both nodes.
            PrimaryState::Severed if granted => {
                self.state = PrimaryState::Alone;
                vec![Order::GoAlone]
            }
            PrimaryState::Pairing | PrimaryState::Severed => self.ask(),
            PrimaryState::Ended => self.sever(),
            PrimaryState::Alone | PrimaryState::Paired => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paired() -> Primary {
        let mut primary = Primary::new(Member::First, Grant::FIRST);
        let [Order::Ask(ask)] = primary.in_sync()[..] else {
            panic!("asks to pair");
        };
        assert_eq!(primary.answered(&ask, ask.wanted), [Order::Protected]);
        primary
    }

    #[test]
    fn a_dead_machine_is_left_to_its_backup() {
        let mut primary = paired();
        let [Order::Hold, Order::Ask(look)] = primary.machine_died()[..] else {
            panic!("holds and looks");
        };
        assert_eq!(look.wanted, look.expected, "asks for nothing");
        assert_eq!(primary.answered(&look, look.expected), []);
        assert_eq!(primary.retry(), [Order::Ask(look)]);
        let taken = Grant {
            owner: Member::Second,
            paired: false,
            term: look.expected.term,
        };
        assert_eq!(primary.answered(&look, taken), [Order::End]);
        assert!(!primary.leaves());
    }

    #[test]
    fn a_dead_machine_whose_backup_is_lost_stays() {
        let mut primary = paired();
        primary.machine_died();
        let [Order::Ask(ask)] = primary.backup_lost()[..] else {
            panic!("asks to go on alone");
        };
        assert_eq!(primary.answered(&ask, ask.wanted), [Order::GoAlone]);
        assert_eq!(primary.machine_died(), [], "there is no backup");
    }
}
