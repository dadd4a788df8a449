//! The fact that another node has had a disk or machine since this node became its owner.

use serde::{Deserialize, Serialize};

/// The note about an owner surpassed by another node. The owner holds the disk's I/O, or keeps the machine stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surpassed {
    /// The node with the later record.
    pub by: String,
    /// The epoch of the later record.
    pub epoch: u64,
}

impl Surpassed {
    /// Returns the reason why `what`, with epoch `own` at this node, is held: a sentence.
    pub fn why(&self, what: &str, own: u64) -> String {
        let Self { by, epoch } = self;
        format!(
            "node '{by}' has had {what} since (epoch {epoch} there, {own} here): this node's data directory was put back to an \
             earlier state, or an operator claimed {what} there"
        )
    }

    /// Returns the epoch of an owner to override both records.
    pub fn next(&self, own: u64) -> u64 {
        own.max(self.epoch).saturating_add(1)
    }
}
