//! All rounds of one case and mover.

use std::time::Duration;

use godwit_testkit::report::median;

use super::case::Case;
use crate::noise::disagree;
use crate::report::{Guest, Migrate, Move, Seen};

/// Rounds whose guests did that much differently before anything moved disagree, as do rounds with
/// an idle guest whose moves took that much longer.
const NOISY: f64 = 1.3;
/// A guest got its rate with at least this part of it.
const REACHED: f64 = 0.98;
/// And was held back by something else with less than this part, when others got it.
const HELD_BACK: f64 = 0.9;

/// Whether the machine gives the guest its rate, by what it gave before any of these moves.
pub(crate) fn reachable<'a>(case: &Case, mut moves: impl Iterator<Item = &'a Move>) -> bool {
    let rate = case.rate.mbps();
    moves.any(|round| {
        let before = round.guest.before.map(|seen| seen.mbps);
        before
            .zip(rate)
            .is_some_and(|(mbps, rate)| mbps >= rate * REACHED)
    })
}

/// Medians over the rounds. `reachable` is whether the machine can give the guest its rate.
pub(crate) fn summary(
    case: &Case,
    mover: &str,
    image_bytes: u64,
    limit: Duration,
    reachable: bool,
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
    let before = all(&|round| round.guest.before.map(|seen| seen.mbps));
    let noisy = if before.is_empty() {
        disagree(&seconds, NOISY)
    } else {
        let needed = case.rate.mbps().unwrap_or_default() * HELD_BACK;
        let held_back = reachable && before.iter().any(|mbps| *mbps < needed);
        held_back || disagree(&before, NOISY)
    };
    Migrate {
        workload: case.workload.name().to_owned(),
        rate_mbps: case.rate.mbps(),
        link_gbps: case.link.0,
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
    let of = |value: fn(&Seen) -> f64| median(&all.iter().map(value).collect::<Vec<_>>());
    (!all.is_empty()).then(|| Seen {
        mbps: of(|seen| seen.mbps),
        p50_us: of(|seen| seen.p50_us),
        p99_us: of(|seen| seen.p99_us),
        p999_us: of(|seen| seen.p999_us),
        p9999_us: of(|seen| seen.p9999_us),
        max_us: of(|seen| seen.max_us),
    })
}

fn spread(values: &[f64]) -> [f64; 2] {
    [
        values.iter().copied().fold(f64::MAX, f64::min),
        values.iter().copied().fold(f64::MIN, f64::max),
    ]
}

fn median_round(rounds: &[Move]) -> Option<&Move> {
    let mut sorted: Vec<&Move> = rounds.iter().collect();
    sorted.sort_by(|one, two| one.seconds.total_cmp(&two.seconds));
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

/// The names of what [`print`] prints.
pub(crate) fn print_header() {
    println!(
        "{:<38} {:<20} {:>8} {:>9} {:>8} {:>9} {:>9} {:>12} {:>12} {:>9}",
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

/// One move, for people who wait.
pub(crate) fn print(case: &Case, mover: &str, measured: &Move) {
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let guest = &measured.guest;
    let of = |seen: Option<Seen>, pick: fn(&Seen) -> f64| seen.as_ref().map(pick);
    println!(
        "{:<38} {mover:<20} {:>8} {:>9.0} {:>8.2} {:>9} {:>9} {:>12} {:>12} {:>9}",
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
