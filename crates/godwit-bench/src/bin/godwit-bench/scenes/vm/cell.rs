//! Summary of all rounds of one load and mover.

use std::time::Duration;

use godwit_testkit::report::median;

use crate::noise::{disagree, outliers};
use crate::report::{Vm, VmGuest, VmMove, VmSeen, spread};

/// Largest factor between the rounds' guests before the move. Rounds with a larger factor disagree.
const NOISY: f64 = 1.3;
/// Fraction of the best guest's throughput below which a guest with a rate was held back. The fraction is not closer to
/// 1, because a guest behind a slower back end falls back more often and does not catch up.
const HELD_BACK: f64 = 0.8;

/// Returns the highest throughput of any guest before its move.
pub(crate) fn best_before<'a>(moves: impl Iterator<Item = &'a VmMove>) -> f64 {
    moves
        .map(|round| round.guest.before.mbps)
        .fold(0.0, f64::max)
}

/// Returns the medians over the rounds. `best` is the highest throughput of any guest of this load before its move.
pub(crate) fn summary(
    rate_mbps: Option<f64>,
    mover: &str,
    image_bytes: u64,
    limit: Duration,
    best: f64,
    rounds: Vec<VmMove>,
) -> Vm {
    let of = |pick: &dyn Fn(&VmMove) -> f64| median(&rounds.iter().map(pick).collect::<Vec<_>>());
    let converged = rounds.iter().all(|round| round.converged);
    // A round without convergence lacks this number.
    let when_converged = |pick: fn(&VmMove) -> Option<f64>| {
        let values: Vec<f64> = rounds.iter().filter_map(pick).collect();
        converged.then(|| median(&values))
    };
    let seconds: Vec<f64> = rounds.iter().map(|round| round.seconds).collect();
    let before: Vec<f64> = rounds.iter().map(|round| round.guest.before.mbps).collect();
    let missed = |mbps: f64| rate_mbps.is_some() && mbps < best * HELD_BACK;
    let missed = before.iter().filter(|mbps| missed(**mbps)).count();
    Vm {
        rate_mbps,
        mover: mover.to_owned(),
        image_bytes,
        limit_seconds: limit.as_secs_f64(),
        converged,
        lm_seconds: when_converged(|round| Some(round.seconds)),
        lm_seconds_spread: converged.then(|| spread(&seconds)),
        blackout_ms: when_converged(|round| round.blackout_ms),
        stopped_ms: when_converged(|round| round.stopped_ms),
        guest: VmGuest {
            before: seen(&rounds, |guest| guest.before),
            during: seen(&rounds, |guest| guest.during),
        },
        cpu_seconds: of(&|round| round.cpu_seconds),
        cpu_before: of(&|round| round.cpu_before),
        wire_bytes: of(&|round| round.wire_bytes as f64),
        noisy: missed > outliers(before.len()) || disagree(&before, NOISY),
        rounds,
    }
}

fn seen(rounds: &[VmMove], pick: fn(&VmGuest) -> VmSeen) -> VmSeen {
    let of = |value: fn(&VmSeen) -> f64| {
        let all = rounds.iter().map(|round| value(&pick(&round.guest)));
        median(&all.collect::<Vec<_>>())
    };
    VmSeen {
        mbps: of(|seen| seen.mbps),
        p50_us: of(|seen| seen.p50_us),
        p99_us: of(|seen| seen.p99_us),
        p999_us: of(|seen| seen.p999_us),
        max_us: of(|seen| seen.max_us),
    }
}

/// Describes the load for the screen.
pub(crate) fn load(rate_mbps: Option<f64>) -> String {
    rate_mbps.map_or_else(
        || "as much as goes".to_owned(),
        |mbps| format!("{mbps:.1} MB/s"),
    )
}

/// Prints the column headings of [`print`].
pub(crate) fn print_header() {
    println!(
        "{:<16} {:<20} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>11} {:>11} {:>8} {:>8}",
        "vm",
        "mover",
        "LM s",
        "blackout",
        "stopped",
        "wire MB",
        "MB/s bef.",
        "MB/s dur.",
        "p99 us bef.",
        "p99 us dur.",
        "CPU s",
        "CPU bef."
    );
}

/// Prints one move.
pub(crate) fn print(rate_mbps: Option<f64>, mover: &str, measured: &VmMove) {
    let number =
        |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
    let guest = &measured.guest;
    println!(
        "{:<16} {mover:<20} {:>8} {:>9} {:>9} {:>9.0} {:>9.2} {:>9.2} {:>11.0} {:>11.0} {:>8.2} {:>8.2}",
        load(rate_mbps),
        if measured.converged {
            format!("{:.2}", measured.seconds)
        } else {
            format!("(> {:.0})", measured.seconds)
        },
        number(measured.blackout_ms),
        number(measured.stopped_ms),
        measured.wire_bytes as f64 / 1e6,
        guest.before.mbps,
        guest.during.mbps,
        guest.before.p99_us,
        guest.during.p99_us,
        measured.cpu_seconds,
        measured.cpu_before,
    );
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn moved(seconds: f64, before: f64, during: f64) -> VmMove {
        let seen = |mbps| VmSeen {
            mbps,
            p99_us: 1000.0,
            ..VmSeen::default()
        };
        VmMove {
            converged: true,
            seconds,
            blackout_ms: Some(100.0),
            stopped_ms: Some(50.0),
            guest: VmGuest {
                before: seen(before),
                during: seen(during),
            },
            cpu_seconds: 2.0,
            cpu_before: 0.5,
            wire_bytes: 1,
            disk_at_rest: None,
            verified_writes: 1,
        }
    }

    pub(crate) fn cell(mover: &str, rounds: Vec<VmMove>) -> Vm {
        summary(Some(4.0), mover, 1, Duration::from_secs(60), 4.0, rounds)
    }

    #[test]
    fn medians_of_rounds_that_all_converged() {
        let mut rounds = vec![
            moved(4.0, 4.0, 3.0),
            moved(2.0, 4.0, 4.0),
            moved(3.0, 4.0, 3.5),
        ];
        let all = cell("x", rounds.clone());
        assert_eq!(
            (all.converged, all.lm_seconds, all.lm_seconds_spread),
            (true, Some(3.0), Some([2.0, 4.0]))
        );
        assert_eq!(all.guest.during.mbps.to_bits(), 3.5_f64.to_bits());
        rounds[1].converged = false;
        let all = cell("x", rounds);
        assert_eq!((all.converged, all.lm_seconds), (false, None));
        assert_eq!((all.blackout_ms, all.stopped_ms), (None, None));
    }

    #[test]
    fn a_guest_that_missed_what_others_got_was_disturbed() {
        assert!(!cell("x", vec![moved(2.0, 3.9, 1.0)]).noisy);
        assert!(cell("x", vec![moved(2.0, 3.1, 1.0)]).noisy);
        let mut five = vec![moved(2.0, 3.9, 1.0); 5];
        five[0] = moved(2.0, 3.1, 1.0);
        assert!(!cell("x", five.clone()).noisy, "one of five");
        five[1] = moved(2.0, 3.1, 1.0);
        assert!(cell("x", five).noisy, "two of five");
        let unpaced = |rounds| summary(None, "x", 1, Duration::ZERO, 9.0, rounds).noisy;
        assert!(!unpaced(vec![moved(2.0, 3.5, 1.0), moved(2.0, 4.0, 1.0)]));
        assert!(unpaced(vec![moved(2.0, 3.0, 1.0), moved(2.0, 4.0, 1.0)]));
        let rounds = [moved(2.0, 3.0, 1.0), moved(2.0, 4.0, 1.0)];
        assert_eq!(best_before(rounds.iter()).to_bits(), 4.0_f64.to_bits());
    }
}
