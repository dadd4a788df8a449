//! A bound that is eased when what exceeds it is not the migration's doing.

/// How it is eased, and how it comes back in each period without such evidence: at last about one
/// period in fifty exceeds it.
const EASE: f64 = 1.25;
const UNEASE: f64 = 0.995;
const MOST: f64 = 100.0;

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
        let change = if exceeded { EASE } else { UNEASE };
        self.0 = (self.0 * change).clamp(1.0, MOST);
    }
}
