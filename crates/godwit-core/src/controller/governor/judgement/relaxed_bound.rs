//! A bound that is eased when what exceeds it is not the migration's doing.

use crate::controller::governor::tuning::relaxed_bound::{EASE_FACTOR, MOST_FACTOR, UNEASE_FACTOR};

/// How many times its own value a bound is taken for: 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::controller) struct RelaxedBound(f64);

impl RelaxedBound {
    /// The bound as it is.
    pub(in crate::controller) const NONE: Self = Self(1.0);

    /// What the bound is multiplied by.
    pub(in crate::controller) const fn factor(self) -> f64 {
        self.0
    }

    /// A period is over in which the eased bound was or was not exceeded by no fault of the
    /// migration.
    pub(in crate::controller) fn period_ends(&mut self, exceeded: bool) {
        let change = if exceeded { EASE_FACTOR } else { UNEASE_FACTOR };
        self.0 = (self.0 * change).clamp(1.0, MOST_FACTOR);
    }
}
