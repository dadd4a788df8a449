//! The targets of zero-copy memory.

use godwit_testkit::report::{Runs, Target, median};
use serde_json::Value;

use super::Method;

const LATENCY: &str = "zero-copy: latency of the pointer chase in its worst 100 ms by before";
const LATENCY_AGAINST: &str = "post-copy's worst 100 ms of the pointer chase by zero-copy's";
const RATE: &str = "zero-copy: pages written a second while memory follows by before";
const RATE_AGAINST: &str =
    "pages written while memory follows: zero-copy's least 100 ms by post-copy's same 100 ms";
const MOVER: &str = "the mover, GB/s";
const NETWORK: &str = "zero-copy: MiB over the network";

/// Judges the runs of one rate of writing.
pub(super) fn of(runs: &Runs<'_>) -> Vec<Target> {
    let of = |method: Method| runs.only("method", method.name());
    let (ours, theirs) = (of(Method::ZeroCopy), of(Method::PostCopy));
    let by = |figure: &str, before: &str| {
        let ratio = |run: &&Value| Some(run[figure].as_f64()? / run[before].as_f64()?);
        let ratios: Vec<f64> = ours.0.iter().filter_map(ratio).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    };
    let worst = "latency_worst_window_ns";
    let against = theirs
        .median(worst)
        .zip(ours.median(worst))
        .map(|(theirs, ours)| theirs / ours);
    let windows = ours.0.iter().filter_map(|run| {
        let same = theirs
            .0
            .iter()
            .find(|other| other["round"] == run["round"])?;
        least_ratio(&run["rates_following_mib"], &same["rates_following_mib"])
    });
    let mover = ours
        .median("mover_bytes_per_second")
        .map(|bytes| bytes / 1e9);
    // Every move counts, not the median.
    let uses_pool = |run: &Value| {
        [Method::ZeroCopy, Method::StayInPool]
            .iter()
            .any(|one| run["method"] == one.name())
    };
    let sent = runs.filter(uses_pool).most("bytes_over_network");
    vec![
        Target::at_most(LATENCY, 3.0, by(worst, "latency_before_ns")),
        Target::at_least(LATENCY_AGAINST, 100.0, against),
        Target::at_least(RATE, 0.8, by("rate_following_mib", "rate_before_mib")),
        Target::more_than(RATE_AGAINST, 1.0, windows.min_by(f64::total_cmp)),
        Target::at_least(MOVER, 1.0, mover),
        Target::less_than(NETWORK, 1.0, sent.map(|bytes| bytes / f64::from(1 << 20))),
    ]
}

/// Returns the smallest ratio of ours to theirs over the windows that both have.
fn least_ratio(ours: &Value, theirs: &Value) -> Option<f64> {
    // Bounds the ratio when theirs is 0: JSON has no infinity.
    let ratio = |(ours, theirs): (&Value, &Value)| {
        Some((ours.as_f64()? / theirs.as_f64()?.max(1e-3)).min(1e6))
    };
    let pairs = ours.as_array()?.iter().zip(theirs.as_array()?);
    pairs.filter_map(ratio).min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(method: Method, worst: f64, rates: &[f64]) -> Value {
        json!({
            "method": method.name(), "round": 0, "bytes_over_network": 400_000, "mover_bytes_per_second": 2e9,
            "latency_before_ns": 500.0, "latency_worst_window_ns": worst, "rate_before_mib": 64.0,
            "rate_following_mib": 60.0, "rates_following_mib": rates,
        })
    }

    fn holds(runs: &[Value]) -> Vec<bool> {
        of(&Runs(runs.iter().collect()))
            .iter()
            .map(|target| target.holds)
            .collect()
    }

    #[test]
    fn each_target_can_hold_and_fail() {
        let ours = run(Method::ZeroCopy, 900.0, &[60.0, 50.0]);
        let theirs = run(Method::PostCopy, 100_000.0, &[1.0, 0.0, 64.0]);
        assert_eq!(holds(&[ours, theirs]), [true; 6]);
        let mut ours = run(Method::ZeroCopy, 1600.0, &[60.0, 50.0]);
        ours["rate_following_mib"] = 50.0.into();
        ours["bytes_over_network"] = (2 << 20).into();
        ours["mover_bytes_per_second"] = 5e8.into();
        let theirs = run(Method::PostCopy, 100_000.0, &[1.0, 51.0]);
        assert_eq!(holds(&[ours, theirs]), [false; 6]);
    }

    #[test]
    fn a_figure_that_was_not_measured_does_not_hold() {
        assert_eq!(holds(&[]), [false; 6]);
        let alone = [run(Method::ZeroCopy, 900.0, &[60.0])];
        assert_eq!(holds(&alone), [true, false, true, false, true, true]);
    }
}
