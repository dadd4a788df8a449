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
}

impl Primary {
    /// Starts a primary that runs the machine without a backup.
    pub const fn new(me: Member, known: Grant) -> Self {
        Self {
            asking: Asking::new(me, known),
            state: PrimaryState::Alone,
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
            PrimaryState::Alone | PrimaryState::Severed | PrimaryState::Ended => Vec::new(),
        }
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
