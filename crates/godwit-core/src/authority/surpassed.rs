//! Two owners that see each other: which of both is a thing of the past.
//!
//! One node serves one epoch, so this never happens unless something that was durable is not any more: a data directory
//! was put back to an earlier state, or an operator claimed what the other node still had. Nodes that meet show each other
//! their records. A record may be old when it is looked at; what was true of an epoch stays true.

use super::{AuthorityRecord, Ownership};

impl AuthorityRecord {
    /// Whether `other`, which another node has or had of the same disk, shows that this node must not serve it, though it
    /// is the owner by its own record: the disk has been served in a later epoch, or in the same one elsewhere.
    ///
    /// Never true of a node that is the owner by right, also while the disk changes hands: a node that has accepted is in
    /// the epoch after its source's.
    pub const fn is_surpassed_by(&self, other: &Self) -> bool {
        let (own, other_epoch) = (self.epoch.0, other.epoch.0);
        if !matches!(self.ownership, Ownership::Serving) {
            return false;
        }
        match other.ownership {
            Ownership::Serving => other_epoch >= own,
            // It is this node's epoch when it was given away to this one.
            Ownership::Relinquished { .. } | Ownership::Departed { .. } | Ownership::Vacant => {
                other_epoch > own
            }
            // Its source may be this node.
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
