//! Figures beside their goals.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A figure and its goal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// Name of the figure, with the direction of the goal.
    pub name: String,
    /// Least or greatest allowed value, by the direction in the name.
    pub goal: f64,
    /// Measured value; null when not measured, which reaches no goal.
    pub measured: Option<f64>,
    /// True if the figure was measured and reaches the goal.
    pub holds: bool,
    /// True if nothing is promised.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reported_only: bool,
    /// Reason for a missing measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Target {
    /// Returns a target with a lower limit.
    pub fn at_least(name: impl fmt::Display, goal: f64, measured: Option<f64>) -> Self {
        Self::new(format!("{name}, at least"), goal, measured, |value| {
            value >= goal
        })
    }

    /// Returns a target with an upper limit.
    pub fn at_most(name: impl fmt::Display, goal: f64, measured: Option<f64>) -> Self {
        Self::new(format!("{name}, at most"), goal, measured, |value| {
            value <= goal
        })
    }

    /// Returns a target above the goal.
    pub fn more_than(name: impl fmt::Display, goal: f64, measured: Option<f64>) -> Self {
        Self::new(format!("{name}, more than"), goal, measured, |value| {
            value > goal
        })
    }

    /// Returns a target below the goal.
    pub fn less_than(name: impl fmt::Display, goal: f64, measured: Option<f64>) -> Self {
        Self::new(format!("{name}, less than"), goal, measured, |value| {
            value < goal
        })
    }

    /// Adds the reason for a missing measurement.
    #[must_use]
    pub fn unless(mut self, reason: &str) -> Self {
        if self.measured.is_none() {
            self.reason = Some(reason.to_owned());
        }
        self
    }

    fn new(name: String, goal: f64, measured: Option<f64>, holds: impl Fn(f64) -> bool) -> Self {
        // JSON has no infinity or NaN: such a value counts as not measured.
        let measured = measured.filter(|value| value.is_finite());
        Self {
            name,
            goal,
            measured,
            holds: measured.is_some_and(holds),
            reported_only: false,
            reason: None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, goal, .. } = self;
        let word = match (self.holds, self.reported_only) {
            (_, true) => "reported",
            (true, _) => "holds",
            (false, _) => "does NOT hold",
        };
        match (self.measured, &self.reason) {
            (Some(measured), _) => write!(formatter, "{name} {goal:.2}: {measured:.3}, {word}"),
            (None, None) => write!(formatter, "{name} {goal:.2}: not measured, {word}"),
            (None, Some(why)) => {
                write!(formatter, "{name} {goal:.2}: not measured ({why}), {word}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_that_was_not_measured_does_not_hold() {
        assert!(Target::at_least("ratio", 1.0, Some(1.0)).holds);
        assert!(!Target::at_least("ratio", 1.0, Some(0.99)).holds);
        assert!(Target::at_most("ratio", 1.0, Some(1.0)).holds);
        assert!(!Target::at_most("ratio", 1.0, Some(1.01)).holds);
        assert!(!Target::less_than("ratio", 1.0, Some(1.0)).holds);
        assert!(!Target::more_than("ratio", 1.0, Some(1.0)).holds);
        let infinite = Target::at_least("ratio", 1.0, Some(f64::INFINITY));
        assert!(!infinite.holds && infinite.measured.is_none());
        let unknown = Target::at_most("ratio", 1.0, None).unless("no peer converged");
        assert!(!unknown.holds && unknown.to_string().contains("no peer converged"));
    }
}
