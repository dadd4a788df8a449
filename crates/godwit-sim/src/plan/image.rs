//! A disk that is created from an image, and a repository that is away.

use godwit_core::units::MigrationId;

use super::{MILLISECOND, MigrationPlan};
use crate::random::Random;

/// What becomes of a disk that was created from an image.
#[derive(Clone, Debug)]
pub(crate) struct ImagePlan {
    /// The migrations that leave the image behind although the disk has all of it.
    leaves: Vec<MigrationId>,
    /// When the repository is away, from and until.
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

    /// Whether this migration leaves the image behind although the disk has all of it.
    pub(crate) fn leaves(&self, migration: MigrationId) -> bool {
        self.leaves.contains(&migration)
    }

    /// Whether the repository is away.
    pub(crate) fn is_away(&self, now: u64) -> bool {
        self.away
            .iter()
            .any(|(from, until)| (*from..*until).contains(&now))
    }
}
