//! Ownership without the source's word: a backup takes a disk, and the primary gives the disk up.

use super::{Attempt, Authority, Effect, Ownership};
use crate::event::AbortReason;
use crate::units::{Epoch, MigrationId};

impl Authority {
    /// Backup: becomes the owner of a disk that is being received, in an epoch after its source's, without the source's
    /// word. The caller knows that the disk is complete here, and that the source acknowledges no write any more.
    /// Nothing of the source is taken from here on, and an end of the connection changes nothing. Does nothing unless
    /// the migration is being received, and in a later epoch than this node's.
    pub fn take(&mut self, migration: MigrationId, epoch: Epoch) -> Vec<Effect> {
        let later = epoch > self.record.epoch && epoch != Epoch(u64::MAX);
        if self.attempt != (Attempt::Receiving { migration }) || !later {
            return Vec::new();
        }
        self.attempt = Attempt::Taking { migration, epoch };
        vec![Effect::Flush]
    }

    /// Backup: returns true while this node becomes the owner without the source's word.
    pub const fn is_taking(&self) -> bool {
        matches!(self.attempt, Attempt::Taking { .. })
    }

    /// Backup: ends a taking whose data cannot be made durable. Does nothing once the ownership is being stored.
    pub fn fail_taking(&mut self, reason: AbortReason) -> Vec<Effect> {
        match self.attempt {
            Attempt::Taking { migration, .. } if self.storing.is_none() => {
                self.attempt = Attempt::None;
                vec![Effect::ReceiveAborted(migration, reason)]
            }
            _ => Vec::new(),
        }
    }

    /// Backup: notes that the record of a taking was not stored and never will be.
    pub fn untake(&mut self, reason: AbortReason) -> Vec<Effect> {
        if self.is_taking() {
            self.storing = None;
        }
        self.fail_taking(reason)
    }

    /// Primary: gives up a disk that a backup has taken, and serves in this later epoch. Does nothing if this node is
    /// not the durable owner of an earlier epoch.
    pub fn yield_to(&mut self, epoch: Epoch) -> Vec<Effect> {
        let owner = matches!(self.record.ownership, Ownership::Serving) && self.storing.is_none();
        if !owner || epoch <= self.record.epoch {
            return Vec::new();
        }
        self.surpassed = true;
        self.attempt = Attempt::None;
        self.store(epoch, Ownership::Vacant, None)
    }
}
