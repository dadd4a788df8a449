//! The figures and their goals.

use std::fmt;

use godwit_testkit::report::median;
use serde::Serialize;

use crate::policies::Scene;
use crate::policies::load::Kind;
use crate::policies::measure::Measured;
use crate::policies::policy::{AUTO, MIRROR, OF_CHOICE, POST_COPY, PRE_COPY, PUSH_PULL, REMOTE};
use crate::policies::report::{Cell, Report};
use crate::policies::scenes::choice::LOADS;
use crate::policies::scenes::table;
use crate::policies::sizes::Sizes;

/// A figure and its goal.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Target {
    /// Name of the figure, with the direction of the goal.
    name: String,
    goal: f64,
    /// Null if the figure was not measured, which meets no goal.
    measured: Option<f64>,
    holds: bool,
}

impl Target {
    fn at_most(name: impl Into<String>, goal: f64, measured: Option<f64>) -> Self {
        Self::new(name.into() + ", at most", goal, measured, |value| {
            value <= goal
        })
    }

    fn at_least(name: impl Into<String>, goal: f64, measured: Option<f64>) -> Self {
        Self::new(name.into() + ", at least", goal, measured, |value| {
            value >= goal
        })
    }

    fn new(name: String, goal: f64, measured: Option<f64>, holds: impl Fn(f64) -> bool) -> Self {
        let measured = measured.filter(|value| value.is_finite());
        Self {
            name,
            goal,
            measured,
            holds: measured.is_some_and(holds),
        }
    }

    pub(crate) const fn holds(&self) -> bool {
        self.holds
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.holds { "holds" } else { "does NOT hold" };
        match self.measured {
            Some(measured) => write!(
                formatter,
                "{} {}: {measured:.3}, {word}",
                self.name, self.goal
            ),
            None => write!(
                formatter,
                "{} {}: not measured, {word}",
                self.name, self.goal
            ),
        }
    }
}

/// Returns the targets of a scene that has run.
pub(crate) fn of(scene: Scene, report: &Report, sizes: &Sizes) -> Vec<Target> {
    match scene {
        Scene::Table => of_the_table(report),
        Scene::Many => of_many(report, sizes),
        Scene::Thin => of_thin(report),
        Scene::Choice => of_the_choice(report),
    }
}

/// Returns the median of a figure; `None` if any measurement lacks the figure, or there are no measurements.
fn of_all<'a>(
    measured: impl Iterator<Item = &'a Measured>,
    value: impl Fn(&Measured) -> Option<f64>,
) -> Option<f64> {
    let values: Vec<_> = measured.map(value).collect::<Option<_>>()?;
    (!values.is_empty()).then(|| median(&values))
}

fn ratio(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.zip(other).map(|(one, other)| one / other)
}

fn of_the_table(report: &Report) -> Vec<Target> {
    let of = |policy, load, value: fn(&Measured) -> Option<f64>| {
        of_all(table::of(report, policy, load), value)
    };
    let time: fn(&Measured) -> Option<f64> = |it| Some(it.seconds);
    let bytes: fn(&Measured) -> Option<f64> = |it| Some(it.wire_bytes as f64);
    let write: fn(&Measured) -> Option<f64> = |it| it.write;
    let against = |load, other, value| {
        let mine = of(PUSH_PULL.name, load, value);
        ratio(mine, of(other, load, value))
    };
    let others = [MIRROR, POST_COPY, PRE_COPY, REMOTE];
    let best = others.map(|other| of(other.name, Kind::Ior, write));
    let best = best.into_iter().flatten().fold(f64::NAN, f64::max);
    let told = [PUSH_PULL, MIRROR, POST_COPY]
        .into_iter()
        .flat_map(|policy| {
            let both = [Kind::Ior, Kind::AsyncWr];
            both.map(|load| of(policy.name, load, |it| it.source_needed_seconds))
        });
    vec![
        Target::at_most(
            "ior: time of push-pull in that of pre-copy",
            0.1,
            against(Kind::Ior, PRE_COPY.name, time),
        ),
        Target::at_most(
            "ior: bytes of push-pull in those of pre-copy",
            0.1,
            against(Kind::Ior, PRE_COPY.name, bytes),
        ),
        Target::at_least(
            "ior: write throughput with push-pull in the best of mirror, post-copy, pre-copy, remote",
            1.0,
            ratio(of(PUSH_PULL.name, Kind::Ior, write), Some(best)),
        ),
        Target::at_most(
            "async-wr: bytes of push-pull in those of mirror",
            1.0,
            against(Kind::AsyncWr, MIRROR.name, bytes),
        ),
        Target::at_least(
            "moves of which it is known how long the source was needed",
            6.0,
            Some(told.flatten().count() as f64),
        ),
    ]
}

/// Relates the time of many simultaneous moves to the link's time for as many times the bytes of one move.
fn of_many(report: &Report, sizes: &Sizes) -> Vec<Target> {
    let machines = sizes.machines();
    let (Some(&fewest), Some(&most)) = (machines.first(), machines.last()) else {
        return Vec::new();
    };
    let of = |machines: usize, value: fn(&Measured) -> Option<f64>| {
        let many = report.measured(Cell::Many);
        let these = many.filter(|it| it.machines == machines && it.policy == PUSH_PULL.name);
        of_all(these, value)
    };
    let alone = of(fewest, |it| Some(it.wire_bytes as f64 / it.machines as f64));
    let share = alone.map(|bytes| bytes * most as f64 / sizes.link_bytes());
    vec![Target::at_most(
        format!("push-pull: time of {most} at once in their shares of the link"),
        1.3,
        ratio(of(most, |it| Some(it.seconds)), share),
    )]
}

fn of_thin(report: &Report) -> Vec<Target> {
    let of = |thin: bool, value: fn(&crate::policies::scenes::thin::Moved) -> f64| {
        let these = report.thin().iter().filter(|moved| moved.thin == thin);
        let values: Vec<_> = these.map(value).collect();
        (!values.is_empty()).then(|| median(&values))
    };
    let there = |thin| of(thin, |moved| moved.allocated_at_destination as f64);
    let here = of(true, |moved| moved.allocated_at_source as f64);
    vec![
        Target::at_most(
            "time of the thin disk of 100 GiB in that of the full one",
            1.1,
            ratio(
                of(true, |moved| moved.seconds),
                of(false, |moved| moved.seconds),
            ),
        ),
        Target::at_most(
            "bytes that the thin disk takes at the destination in those at the source",
            1.01,
            ratio(there(true), here),
        ),
    ]
}

/// Relates the cost of the node's choice to the cost of the best policy.
fn of_the_choice(report: &Report) -> Vec<Target> {
    let of = |load: Kind| {
        let cost = |policy: &'static str| {
            let choice = report.measured(Cell::Choice);
            let these = choice.filter(|it| it.load == load && it.policy == policy);
            of_all(these, |it| Some(it.cost()))
        };
        let fixed = OF_CHOICE.iter().filter(|policy| **policy != AUTO);
        let best = fixed.filter_map(|policy| cost(policy.name));
        let best = best.fold(f64::NAN, f64::min);
        Target::at_most(
            format!("{}: cost of auto in that of the best policy", load.name()),
            1.1,
            ratio(cost(AUTO.name), Some(best)),
        )
    };
    LOADS.map(of).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_holds_nothing() {
        assert!(Target::at_most("x", 1.0, Some(1.0)).holds());
        assert!(!Target::at_most("x", 1.0, Some(1.01)).holds());
        assert!(Target::at_least("x", 1.0, Some(1.0)).holds());
        assert!(!Target::at_least("x", 1.0, Some(f64::NAN)).holds());
        let unknown = Target::at_most("x", 1.0, None);
        assert!(!unknown.holds() && unknown.to_string().contains("not measured"));
    }
}
