//! Summary of all rounds of one case and mover.

use std::time::Duration;

use godwit_testkit::report::median;

use crate::noise::{disagree, outliers};
use crate::report::{Guest, Migrate, Move, Seen, spread};
use crate::scenes::migrate::case::Case;
use crate::site::{Data, Destination};

/// Largest factor between the rounds' guests before the move, or between the move times of an idle guest. Rounds with a
/// larger factor disagree.
const NOISY: f64 = 1.3;
/// Fraction of the rate from which a guest counts as having reached the rate.
const REACHED: f64 = 0.98;
/// Fraction of the rate below which a guest was held back, if other guests of the case reached the rate.
const HELD_BACK: f64 = 0.9;
/// Factor over the best p99.99 of the case from which a guest was disturbed before its move.
const DISTURBED: f64 = 10.0;

/// The machine's best service to any guest of a case before the move, regardless of the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standard {
    /// Rate, if a guest reached it.
    rate: Option<f64>,
    /// Best p99.99.
    p9999_us: f64,
}

impl Standard {
    /// Returns the standard of all moves of the case.
    pub(crate) fn new<'a>(case: &Case, moves: impl Iterator<Item = &'a Move>) -> Self {
        let before: Vec<Seen> = moves.filter_map(|round| round.guest.before).collect();
        let most = before.iter().map(|seen| seen.mbps).fold(0.0, f64::max);
        let best = before
            .iter()
            .map(|seen| seen.p9999_us)
            .fold(f64::MAX, f64::min);
        Self {
            rate: case.rate.mbps().filter(|rate| most >= rate * REACHED),
            p9999_us: best,
        }
    }

    /// Returns true if a guest was far below the standard.
    fn missed(&self, before: &Seen) -> bool {
        self.rate.is_some_and(|rate| before.mbps < rate * HELD_BACK)
            || before.p9999_us > self.p9999_us * DISTURBED
    }
}

/// Returns the medians over the rounds, with the `standard` of the case.
pub(crate) fn summary(
    case: &Case,
    mover: &str,
    image_bytes: u64,
    limit: Duration,
    standard: &Standard,
    rounds: Vec<Move>,
) -> Migrate {
    let all = |pick: &dyn Fn(&Move) -> Option<f64>| -> Vec<f64> {
        rounds.iter().filter_map(pick).collect()
    };
    let of = |pick: &dyn Fn(&Move) -> Option<f64>| {
        let values = all(pick);
        (!values.is_empty()).then(|| median(&values))
    };
    let converged = rounds.iter().all(|round| round.converged);
    let seconds = all(&|round| Some(round.seconds));
    let before: Vec<Seen> = rounds
        .iter()
        .filter_map(|round| round.guest.before)
        .collect();
    let noisy = if before.is_empty() {
        disagree(&seconds, NOISY)
    } else {
        let mbps: Vec<f64> = before.iter().map(|seen| seen.mbps).collect();
        let missed = before.iter().filter(|seen| standard.missed(seen)).count();
        missed > outliers(before.len()) || disagree(&mbps, NOISY)
    };
    Migrate {
        workload: case.workload.name().to_owned(),
        rate_mbps: case.rate.mbps(),
        link_gbps: case.link.0,
        destination_in_memory: case.destination == Destination::Memory,
        files: case.data == Data::Files,
        mover: mover.to_owned(),
        image_bytes,
        limit_seconds: limit.as_secs_f64(),
        converged,
        lm_seconds: converged.then(|| median(&seconds)),
        wire_bytes: of(&|round| Some(round.wire_bytes as f64)).unwrap_or_default(),
        guest: Guest {
            before: seen(&rounds, |guest| guest.before),
            during: seen(&rounds, |guest| guest.during),
        },
        cpu_seconds: of(&|round| Some(round.cpu_seconds)).unwrap_or_default(),
        blackout_ms: of(&|round| round.blackout_ms),
        noisy,
        lm_seconds_spread: converged.then(|| spread(&seconds)),
        series: median_round(&rounds).map_or_else(Vec::new, |round| round.series.clone()),
        rounds,
    }
}

fn seen(rounds: &[Move], pick: fn(&Guest) -> Option<Seen>) -> Option<Seen> {
    let all: Vec<Seen> = rounds
        .iter()
        .filter_map(|round| pick(&round.guest))
        .collect();
    Seen::median(&all)
}

fn median_round(rounds: &[Move]) -> Option<&Move> {
    let mut sorted: Vec<&Move> = rounds.iter().collect();
    sorted.sort_by(|one, two| one.seconds.total_cmp(&two.seconds));
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

/// Prints the column headings of [`print`].
pub(crate) fn print_header() {
    println!(
        "{:<44} {:<20} {:>8} {:>9} {:>8} {:>9} {:>9} {:>12} {:>12} {:>9}",
        "migrate",
        "mover",
        "LM s",
        "wire MB",
        "CPU s",
        "MB/s bef.",
        "MB/s dur.",
        "p99.99 bef.",
        "p99.99 dur.",
        "blackout"
    );
}

/// Prints one move.
pub(crate) fn print(case: &Case, mover: &str, measured: &Move) {
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let guest = &measured.guest;
    let of = |seen: Option<Seen>, pick: fn(&Seen) -> f64| seen.as_ref().map(pick);
    println!(
        "{:<44} {mover:<20} {:>8} {:>9.0} {:>8.2} {:>9} {:>9} {:>12} {:>12} {:>9}",
        case.to_string(),
        if measured.converged {
            format!("{:.2}", measured.seconds)
        } else {
            format!("(> {:.0})", measured.seconds)
        },
        measured.wire_bytes as f64 / 1e6,
        measured.cpu_seconds,
        number(of(guest.before, |seen| seen.mbps), 1),
        number(of(guest.during, |seen| seen.mbps), 1),
        number(of(guest.before, |seen| seen.p9999_us), 0),
        number(of(guest.during, |seen| seen.p9999_us), 0),
        number(measured.blackout_ms, 0),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenes::migrate::case::{Bandwidth, Rate, Workload};

    fn moved(mbps: f64, p9999_us: f64) -> Move {
        let seen = Some(Seen {
            mbps,
            p9999_us,
            ..Seen::default()
        });
        Move {
            converged: true,
            seconds: 2.0,
            wire_bytes: 1,
            guest: Guest {
                before: seen,
                during: seen,
            },
            cpu_seconds: 1.0,
            blackout_ms: None,
            disk_at_rest: None,
            compared_blocks: Some(1),
            series: Vec::new(),
        }
    }

    fn noisy(rate: Rate, ours: Move, others: &[Move]) -> bool {
        let case = Case {
            workload: Workload::Randwrite,
            rate,
            link: Bandwidth(None),
            destination: Destination::SameDisk,
            data: Data::Random,
        };
        let standard = Standard::new(&case, others.iter().chain([&ours]));
        summary(&case, "godwit", 1, Duration::ZERO, &standard, vec![ours]).noisy
    }

    #[test]
    fn a_guest_that_missed_what_others_got_was_disturbed() {
        let paced = Rate::Megabytes(40.0);
        assert!(!noisy(paced, moved(40.0, 4000.0), &[moved(40.0, 1000.0)]));
        assert!(noisy(paced, moved(30.0, 4000.0), &[moved(40.0, 1000.0)]));
        assert!(noisy(paced, moved(40.0, 40_000.0), &[moved(40.0, 1000.0)]));
        // A rate that no guest reaches is no sign of noise.
        assert!(!noisy(paced, moved(30.0, 1000.0), &[moved(31.0, 1000.0)]));
        assert!(!noisy(
            Rate::Unthrottled,
            moved(90.0, 1000.0),
            &[moved(200.0, 1000.0)]
        ));
    }

    #[test]
    fn one_disturbed_round_of_five_does_not_make_a_cell_noisy_but_two_do() {
        let case = Case {
            workload: Workload::Randwrite,
            rate: Rate::Megabytes(40.0),
            link: Bandwidth(None),
            destination: Destination::SameDisk,
            data: Data::Random,
        };
        let mut rounds = vec![moved(40.0, 1000.0); 5];
        for (disturbed, noisy) in [(0, false), (1, true)] {
            rounds[disturbed] = moved(30.0, 1000.0);
            let standard = Standard::new(&case, rounds.iter());
            let all = summary(&case, "x", 1, Duration::ZERO, &standard, rounds.clone());
            assert_eq!(all.noisy, noisy, "{disturbed}");
        }
    }

    #[test]
    fn one_round_that_did_not_converge_is_enough() {
        let case = Case {
            workload: Workload::Randwrite,
            rate: Rate::Megabytes(40.0),
            link: Bandwidth(None),
            destination: Destination::SameDisk,
            data: Data::Random,
        };
        let mut rounds = vec![moved(40.0, 1000.0), moved(40.0, 1000.0)];
        let standard = Standard::new(&case, rounds.iter());
        let all = summary(&case, "x", 1, Duration::ZERO, &standard, rounds.clone());
        assert_eq!((all.converged, all.lm_seconds), (true, Some(2.0)));
        rounds[1].converged = false;
        let all = summary(&case, "x", 1, Duration::ZERO, &standard, rounds);
        assert_eq!((all.converged, all.lm_seconds), (false, None));
    }
}
