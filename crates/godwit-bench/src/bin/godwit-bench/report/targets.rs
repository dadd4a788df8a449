//! The goals of the numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::report::Report;
use crate::scenes::idle_copy;
use crate::scenes::migrate;
use crate::scenes::steady;
use crate::scenes::vm;

/// A goal and its result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Target {
    /// The compared figure, and the direction of the goal.
    pub(crate) name: String,
    /// Least or greatest allowed value, by the direction in the name.
    pub(crate) goal: f64,
    /// Measured value; null when not measured.
    pub(crate) value: Option<f64>,
    /// True if the figure was measured and reaches the goal.
    pub(crate) met: bool,
    /// Reason for a missing measurement.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) reason: Option<String>,
}

/// Returns the targets of the scenes that ran.
pub(crate) fn all(report: &Report) -> Vec<Target> {
    let mut targets = migrate::targets::of(&report.migrate);
    targets.extend(steady::targets(&report.steady));
    targets.extend(vm::targets::of(&report.vm));
    targets.extend(report.idle_copy.as_ref().map(idle_copy::target));
    targets
}

impl Target {
    /// Returns a target with a lower limit.
    pub(crate) fn at_least(name: impl Into<String>, goal: f64, value: f64) -> Self {
        Self::measured(name.into() + ", at least", goal, value, value >= goal)
    }

    /// Returns a target with an upper limit.
    pub(crate) fn at_most(name: impl Into<String>, goal: f64, value: f64) -> Self {
        Self::measured(name.into() + ", at most", goal, value, value <= goal)
    }

    /// Returns a target without a measurement.
    pub(crate) fn unknown(name: impl Into<String>, goal: f64, reason: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            goal,
            value: None,
            met: false,
            reason: Some(reason.into()),
        }
    }

    fn measured(name: String, goal: f64, value: f64, met: bool) -> Self {
        Self {
            name,
            goal,
            // JSON has no infinity or NaN, so a non-finite value counts as not measured.
            value: value.is_finite().then_some(value),
            met: met && value.is_finite(),
            reason: (!value.is_finite()).then(|| "a peer measured nothing".to_owned()),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.met { "met" } else { "NOT met" };
        match (self.value, &self.reason) {
            (Some(value), _) => write!(
                formatter,
                "{} {:.2}: {value:.3}, {word}",
                self.name, self.goal
            ),
            (None, reason) => write!(
                formatter,
                "{} {:.2}: not measured ({}), {word}",
                self.name,
                self.goal,
                reason.as_deref().unwrap_or("no reason given")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_not_met() {
        assert!(Target::at_least("ratio", 1.0, 1.0).met);
        assert!(!Target::at_least("ratio", 1.0, 0.99).met);
        assert!(Target::at_most("ratio", 1.0, 1.0).met);
        assert!(!Target::at_most("ratio", 1.0, 1.01).met);
        let infinite = Target::at_least("ratio", 1.0, f64::INFINITY);
        assert!(!infinite.met && infinite.value.is_none() && infinite.reason.is_some());
        let unknown = Target::unknown("ratio", 1.0, "no peer converged");
        assert!(!unknown.met && unknown.to_string().contains("no peer converged"));
    }
}
