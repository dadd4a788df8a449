//! A disk created from an image, and a repository that is away.

use godwit_core::units::MigrationId;

use super::{MILLISECOND, MigrationPlan};
use crate::random::Random;

/// The plan for a disk created from an image.
#[derive(Clone, Debug)]
pub(crate) struct ImagePlan {
    /// Migrations that leave a completely fetched image behind.
    leaves: Vec<MigrationId>,
    /// Times without the repository, as start and end.
    away: Vec<(u64, u64)>,
}

impl ImagePlan {
    pub(super) fn new(random: &mut Random, load: u64, migrations: &[MigrationPlan]) -> Self {
        let leaves = migrations.iter().filter(|_| random.permille(700));
        let leaves = leaves.map(|planned| planned.options.migration).collect();
        let away = (0..random.below(4)).map(|_| {
            let from = random.below(load);
            (
                from,
                from + random.magnitude(MILLISECOND, 100 * MILLISECOND),
            )
        });
        Self {
            leaves,
            away: away.collect(),
        }
    }

    /// Returns true if this migration leaves a completely fetched image behind.
    pub(crate) fn leaves(&self, migration: MigrationId) -> bool {
        self.leaves.contains(&migration)
    }

    /// Returns true while the repository is away.
    pub(crate) fn is_away(&self, now: u64) -> bool {
        self.away
            .iter()
            .any(|(from, until)| (*from..*until).contains(&now))
    }
}
