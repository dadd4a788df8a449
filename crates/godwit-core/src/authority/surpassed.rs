//! Comparison of two owners that see each other: which owner is out of date.
//!
//! One node serves one epoch, so two owners never meet unless durable state was lost: a data directory was put back to
//! an earlier state, or an operator claimed a disk that the other node still had. Nodes that meet show each other their
//! records. A record may be old by the time of the comparison. A fact about an epoch stays true.

use super::{AuthorityRecord, Ownership};

impl AuthorityRecord {
    /// Returns true if `other`, another node's present or past record of the same disk, shows that this node must not
    /// serve the disk despite being the owner in its own record. The disk has then been served in a later epoch, or
    /// elsewhere in the same epoch.
    ///
    /// Never true of the rightful owner, even while the disk changes hands: a node after acceptance is in the epoch
    /// after its source's epoch.
    pub const fn is_surpassed_by(&self, other: &Self) -> bool {
        let (own, other_epoch) = (self.epoch.0, other.epoch.0);
        if !matches!(self.ownership, Ownership::Serving) {
            return false;
        }
        match other.ownership {
            Ownership::Serving => other_epoch >= own,
            // In this node's epoch the other node gave the disk to this node.
            Ownership::Relinquished { .. } | Ownership::Departed { .. } | Ownership::Vacant => {
                other_epoch > own
            }
            // This node may be the source.
            Ownership::Accepted { .. } => other_epoch > own.saturating_add(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{Epoch, MigrationId};

    const BY: MigrationId = MigrationId([1; 16]);

    fn record(epoch: u64, ownership: Ownership) -> AuthorityRecord {
        AuthorityRecord {
            epoch: Epoch(epoch),
            ownership,
            remainder: None,
        }
    }

    #[test]
    fn an_owner_is_surpassed_by_a_later_one_and_by_its_like() {
        let own = record(2, Ownership::Serving);
        for (other, surpasses) in [
            (record(1, Ownership::Serving), false),
            (record(2, Ownership::Serving), true),
            (record(3, Ownership::Serving), true),
            (record(2, Ownership::Departed { migration: BY }), false),
            (record(3, Ownership::Departed { migration: BY }), true),
            (record(2, Ownership::Relinquished { migration: BY }), false),
            (record(3, Ownership::Relinquished { migration: BY }), true),
            (record(3, Ownership::Accepted { migration: BY }), false),
            (record(4, Ownership::Accepted { migration: BY }), true),
            (record(2, Ownership::Vacant), false),
            (record(3, Ownership::Vacant), true),
        ] {
            assert_eq!(own.is_surpassed_by(&other), surpasses, "{other:?}");
            let gone = record(2, Ownership::Departed { migration: BY });
            assert!(!gone.is_surpassed_by(&other), "it serves nothing");
        }
    }
}
