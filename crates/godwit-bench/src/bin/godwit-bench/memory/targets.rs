//! The targets of zero-copy memory.

use serde::Serialize;

use crate::memory::method::Method;
use crate::memory::run::Run;
use godwit_bench::spread::Spread;

/// A figure and its goal.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Target {
    /// Name of the figure, with the direction of the goal.
    pub(crate) name: &'static str,
    pub(crate) goal: f64,
    /// `None` if the figure was not measured.
    pub(crate) measured: Option<f64>,
    /// True if the figure was measured and reaches the goal.
    pub(crate) holds: bool,
}

const LATENCY: &str =
    "zero-copy: latency of the pointer chase in its worst 100 ms by before, at most";
const LATENCY_AGAINST: &str =
    "post-copy's worst 100 ms of the pointer chase by zero-copy's, at least";
const RATE: &str = "zero-copy: pages written a second while memory follows by before, at least";
const RATE_AGAINST: &str = "pages written while memory follows: zero-copy's least 100 ms by post-copy's same 100 ms, more than";
const MOVER: &str = "the mover, GB/s, at least";
const NETWORK: &str = "zero-copy: MiB over the network, less than";

/// Judges the runs of one rate of writing.
pub(crate) fn of(runs: &[&Run]) -> Vec<Target> {
    let of = |method| runs.iter().copied().filter(move |run| run.method == method);
    let ours = || of(Method::ZeroCopy);
    let median = |values: Vec<f64>| Spread::of(&values).map(|spread| spread.median);
    let by = |run: &Run, pick: fn(&Run) -> Option<f64>, by: fn(&Run) -> Option<f64>| {
        Some(pick(run)? / by(run)?)
    };
    let worst = |method| {
        median(
            of(method)
                .filter_map(|run| run.latency_worst_window_ns)
                .collect(),
        )
    };
    let latency = ours().filter_map(|run| {
        by(
            run,
            |run| run.latency_worst_window_ns,
            |run| run.latency_before_ns,
        )
    });
    let rate =
        ours().filter_map(|run| by(run, |run| run.rate_following_mib, |run| run.rate_before_mib));
    let against = worst(Method::PostCopy).zip(worst(Method::ZeroCopy));
    let mover = ours().filter(|run| run.mover_seconds > 0.0);
    let mover = mover.map(|run| run.bytes_by_mover as f64 / run.mover_seconds / 1e9);
    // Every move counts, not the median.
    let sent = ours().chain(of(Method::StayInPool));
    let sent = sent.map(|run| run.bytes_over_network as f64 / f64::from(1 << 20));
    let post_copies: Vec<&Run> = of(Method::PostCopy).collect();
    let windows = ours().filter_map(|run| {
        let same = post_copies.iter().find(|other| other.round == run.round)?;
        least_ratio(&run.rates_following_mib, &same.rates_following_mib)
    });
    vec![
        at_most(LATENCY, 3.0, median(latency.collect())),
        at_least(
            LATENCY_AGAINST,
            100.0,
            against.map(|(theirs, ours)| theirs / ours),
        ),
        at_least(RATE, 0.8, median(rate.collect())),
        more_than(RATE_AGAINST, 1.0, windows.min_by(f64::total_cmp)),
        at_least(MOVER, 1.0, median(mover.collect())),
        less_than(NETWORK, 1.0, sent.max_by(f64::total_cmp)),
    ]
}

/// Returns the smallest ratio of ours to theirs over the windows that both have.
fn least_ratio(ours: &[f64], theirs: &[f64]) -> Option<f64> {
    // Bounds the ratio when theirs is 0: JSON has no infinity.
    let ratio = |(ours, theirs): (&f64, &f64)| (ours / theirs.max(1e-3)).min(1e6);
    ours.iter().zip(theirs).map(ratio).min_by(f64::total_cmp)
}

fn judged(
    name: &'static str,
    goal: f64,
    measured: Option<f64>,
    holds: fn(f64, f64) -> bool,
) -> Target {
    let measured = measured.filter(|value| value.is_finite());
    Target {
        name,
        goal,
        measured,
        holds: measured.is_some_and(|value| holds(value, goal)),
    }
}

fn at_most(name: &'static str, goal: f64, measured: Option<f64>) -> Target {
    judged(name, goal, measured, |value, goal| value <= goal)
}

fn at_least(name: &'static str, goal: f64, measured: Option<f64>) -> Target {
    judged(name, goal, measured, |value, goal| value >= goal)
}

fn more_than(name: &'static str, goal: f64, measured: Option<f64>) -> Target {
    judged(name, goal, measured, |value, goal| value > goal)
}

fn less_than(name: &'static str, goal: f64, measured: Option<f64>) -> Target {
    judged(name, goal, measured, |value, goal| value < goal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(method: Method, worst: f64, rates: &[f64]) -> Run {
        Run {
            method,
            round: 0,
            dirty_mib: 64,
            ended: true,
            total_seconds: 1.0,
            blackout_ms: 10.0,
            bytes_over_network: 400_000,
            bytes_by_mover: 1 << 30,
            mover_seconds: 0.5,
            longest_hold_us: 900,
            latency_before_ns: Some(500.0),
            latency_moving_ns: Some(600.0),
            latency_worst_window_ns: Some(worst),
            slowest_16_accesses_ns: Some(9000.0),
            rate_before_mib: Some(64.0),
            rate_moving_mib: Some(60.0),
            rate_following_mib: Some(60.0),
            rates_following_mib: rates.to_vec(),
            verified: true,
            latencies_ns: Vec::new(),
            rates_mib: Vec::new(),
        }
    }

    fn holds(runs: &[Run]) -> Vec<bool> {
        let runs: Vec<&Run> = runs.iter().collect();
        of(&runs).iter().map(|target| target.holds).collect()
    }

    #[test]
    fn each_target_can_hold_and_fail() {
        let ours = run(Method::ZeroCopy, 900.0, &[60.0, 50.0]);
        let theirs = run(Method::PostCopy, 100_000.0, &[1.0, 0.0, 64.0]);
        assert_eq!(holds(&[ours, theirs]), [true; 6]);
        let mut ours = run(Method::ZeroCopy, 1600.0, &[60.0, 50.0]);
        ours.rate_following_mib = Some(50.0);
        ours.bytes_over_network = 2 << 20;
        ours.mover_seconds = 2.0;
        let theirs = run(Method::PostCopy, 100_000.0, &[1.0, 51.0]);
        assert_eq!(holds(&[ours, theirs]), [false; 6]);
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        assert_eq!(holds(&[]), [false; 6]);
        let alone = [run(Method::ZeroCopy, 900.0, &[60.0])];
        assert_eq!(holds(&alone), [true, false, true, false, true, true]);
    }
}
