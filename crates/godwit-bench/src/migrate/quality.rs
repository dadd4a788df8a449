//! Marks the cells of the scene that a busy machine has disturbed.

use godwit_testkit::report::Runs;

use crate::suite::noise::{disagree, outliers};

/// Largest factor between the rounds' guests before the move, or between the move times of an idle guest. Rounds with a
/// larger factor disagree.
const NOISY: f64 = 1.3;
/// Fraction of the rate from which a guest counts as having reached the rate.
const REACHED: f64 = 0.98;
/// Fraction of the rate below which a guest was held back, if other guests of the case reached the rate.
const HELD_BACK: f64 = 0.9;
/// Factor over the best p99.99 of the case from which a guest was disturbed before its move.
const DISTURBED: f64 = 10.0;

/// Judges a mover's runs by the best service to any guest of the case before the move, regardless of the server.
pub(super) fn is_noisy(cell: &Runs<'_>, all: &Runs<'_>) -> bool {
    let case = all.only("case", cell.first("case").clone());
    let rate = cell.first("rate_mbps").as_f64();
    let before = cell.values("mbps_before");
    if before.is_empty() {
        return disagree(&cell.values("seconds"), NOISY);
    }
    let most = case.most("mbps_before").unwrap_or_default();
    let reached = rate.filter(|rate| most >= rate * REACHED);
    let best = case.least("p9999_us_before").unwrap_or(f64::MAX);
    let tails = cell.values("p9999_us_before");
    let missed = before.iter().zip(tails).filter(|(mbps, tail)| {
        reached.is_some_and(|rate| **mbps < rate * HELD_BACK) || *tail > best * DISTURBED
    });
    missed.count() > outliers(before.len()) || disagree(&before, NOISY)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn moved(mbps: f64, p9999_us: f64) -> Value {
        json!({"case": "x", "seconds": 2.0, "mbps_before": mbps, "p9999_us_before": p9999_us})
    }

    fn noisy(rate: Option<f64>, ours: &[Value], other: &Value) -> bool {
        let mut ours = ours.to_vec();
        ours.iter_mut()
            .for_each(|run| run["rate_mbps"] = rate.into());
        let cell = Runs(ours.iter().collect());
        is_noisy(&cell, &Runs(ours.iter().chain([other]).collect()))
    }

    #[test]
    fn a_guest_that_missed_what_others_got_was_disturbed() {
        let paced = Some(40.0);
        let usual = moved(40.0, 1000.0);
        assert!(!noisy(paced, &[moved(40.0, 4000.0)], &usual));
        assert!(noisy(paced, &[moved(30.0, 4000.0)], &usual));
        assert!(noisy(paced, &[moved(40.0, 40_000.0)], &usual));
        // A rate that no guest reaches is no sign of noise.
        assert!(!noisy(paced, &[moved(30.0, 1000.0)], &moved(31.0, 1000.0)));
        assert!(!noisy(None, &[moved(90.0, 1000.0)], &moved(200.0, 1000.0)));
    }

    #[test]
    fn one_disturbed_round_of_five_does_not_make_a_cell_noisy_but_two_do() {
        let mut rounds = vec![moved(40.0, 1000.0); 5];
        for (disturbed, expected) in [(0, false), (1, true)] {
            rounds[disturbed] = moved(30.0, 1000.0);
            let found = noisy(Some(40.0), &rounds, &moved(40.0, 1000.0));
            assert_eq!(found, expected, "{disturbed}");
        }
    }
}
