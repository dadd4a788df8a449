//! The node that takes a protected machine over.

use crate::Order;
use crate::grant::{Ask, Asking, Grant, Member};

/// State of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackupState {
    /// The disks here are not the machine's disks yet.
    Syncing,
    /// Every acknowledged write is here.
    Following,
    /// The primary is lost. No write is accepted until the witness has answered.
    Asking,
    /// The witness gave the machine to this node.
    Took,
}

/// The backup of a protected machine. A restart of the node loses the backup's state: writes that were acknowledged and
/// not yet durable may be lost, so the disks are synchronized again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backup {
    asking: Asking,
    state: BackupState,
}

impl Backup {
    /// Starts a backup whose disks are not in sync. A grant that an earlier process may have left is given back.
    pub fn new(me: Member, known: Grant) -> (Self, Vec<Order>) {
        let mut backup = Self {
            asking: Asking::new(me, known),
            state: BackupState::Syncing,
        };
        let orders = backup.give_back();
        (backup, orders)
    }

    /// Returns the state.
    pub const fn state(&self) -> BackupState {
        self.state
    }

    /// Returns the newest grant that this node has seen.
    pub const fn known(&self) -> Grant {
        self.asking.known
    }

    /// Begins a new synchronization: the disks here are no copy of the machine's disks until its end.
    pub fn resync(&mut self) {
        if self.state != BackupState::Took {
            self.state = BackupState::Syncing;
            self.asking.forget();
        }
    }

    /// Notes that every write so far is here. The primary hears of this before it asks the witness to pair.
    pub fn in_sync(&mut self) {
        if self.state == BackupState::Syncing {
            self.state = BackupState::Following;
        }
    }

    /// Notes that the primary is lost.
    pub fn primary_lost(&mut self) -> Vec<Order> {
        if self.state != BackupState::Following {
            return Vec::new();
        }
        self.state = BackupState::Asking;
        let mut orders = vec![Order::Sever];
        orders.extend(self.ask());
        orders
    }

    /// Asks for the machine. Only a paired grant may be replaced.
    fn ask(&mut self) -> Vec<Order> {
        let Grant { owner, paired, .. } = self.asking.known;
        match paired && owner != self.asking.me {
            true => self.asking.ask(self.asking.me, false),
            false => self.asking.look(),
        }
    }

    /// Asks that the primary own the machine, unpaired: there is no copy here.
    fn give_back(&mut self) -> Vec<Order> {
        self.asking.ask(self.asking.me.other(), false)
    }

    /// Asks again, because no answer has come, or the last answer gave nothing.
    pub fn retry(&mut self) -> Vec<Order> {
        let again = self.asking.again();
        match again.is_empty() && self.state == BackupState::Asking {
            true => self.ask(),
            false => again,
        }
    }

    /// Takes the witness's answer to a request: the grant afterwards.
    pub fn answered(&mut self, ask: &Ask, current: Grant) -> Vec<Order> {
        if !self.asking.answered(ask, current) {
            return Vec::new();
        }
        match self.state {
            BackupState::Asking if current.owner == self.asking.me => {
                self.state = BackupState::Took;
                vec![Order::Take(current.term)]
            }
            BackupState::Asking if current.paired => self.ask(),
            // The primary goes on alone, or has not paired yet: see `retry`.
            BackupState::Asking => Vec::new(),
            BackupState::Syncing if current.paired || current.owner == self.asking.me => {
                self.give_back()
            }
            BackupState::Syncing | BackupState::Following | BackupState::Took => Vec::new(),
        }
    }
}
