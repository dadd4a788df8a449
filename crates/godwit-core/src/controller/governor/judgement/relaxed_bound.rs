//! A bound that is eased if the migration is not the cause of exceeding the bound.

use crate::controller::governor::tuning::relaxed_bound::{EASE_FACTOR, MOST_FACTOR, UNEASE_FACTOR};

/// Factor on a bound's own value: 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::controller) struct RelaxedBound(f64);

impl RelaxedBound {
    /// The bound as stated.
    pub(in crate::controller) const NONE: Self = Self(1.0);

    /// Returns the factor on the bound.
    pub(in crate::controller) const fn factor(self) -> f64 {
        self.0
    }

    /// Ends a period in which the eased bound was or was not exceeded for reasons other than the migration.
    pub(in crate::controller) fn period_ends(&mut self, exceeded: bool) {
        let change = if exceeded { EASE_FACTOR } else { UNEASE_FACTOR };
        self.0 = (self.0 * change).clamp(1.0, MOST_FACTOR);
    }
}
