//! Medians and spread.

use godwit_testkit::report::median;
use serde::Serialize;

/// A figure of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    /// Nothing of no values.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let least = values.iter().copied().min_by(f64::total_cmp)?;
        let most = values.iter().copied().max_by(f64::total_cmp)?;
        Some(Self {
            median: median(values),
            least,
            most,
        })
    }
}
