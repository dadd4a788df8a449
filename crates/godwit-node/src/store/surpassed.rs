//! That another node has had a disk or machine since this node became its owner.

use serde::{Deserialize, Serialize};

/// What is stored of an owner that another node has surpassed: it holds what it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Surpassed {
    /// The node whose record showed it.
    pub(crate) by: String,
    /// The epoch of that record.
    pub(crate) epoch: u64,
}

impl Surpassed {
    /// Why `what`, of which this node has epoch `own`, is held: a sentence.
    pub(crate) fn why(&self, what: &str, own: u64) -> String {
        let Self { by, epoch } = self;
        format!(
            "node '{by}' has had {what} since (epoch {epoch} there, {own} here): this node's data directory was put back to an \
             earlier state, or an operator claimed {what} there"
        )
    }

    /// The epoch of an owner that overrides that.
    pub(crate) fn next(&self, own: u64) -> u64 {
        own.max(self.epoch).saturating_add(1)
    }
}
