//! The scene `vm`: a machine moves with its disk while its guest works and verifies. Godwit and QEMU, driven as by
//! libvirt, move it in turns.

mod end;
mod godwit;
mod in_step;
mod measure;
mod mover;
mod qemu;

use std::io;
use std::time::Duration;

use godwit_testkit::report::{Report, Runs, Target};
use godwit_testkit::vm::GuestLoad;

pub(crate) use self::godwit::Godwit;
pub(crate) use self::in_step::measure_in_step;
use self::measure::{BLOCK, measure};
pub(crate) use self::mover::Mover;
pub(crate) use self::qemu::Qemu;
use crate::common::{in_turns, named};
use crate::suite::noise::{disagree, outliers};
use crate::suite::site::{Data, Destination, Site};
use crate::suite::{Extent, Options};

/// Longest time for a move.
const LIMIT: Duration = Duration::from_secs(60);
/// Writes a second of a paced guest.
const PACED: u64 = 500;
/// Largest factor between the rounds' guests before the move. Rounds with a larger factor disagree.
const NOISY: f64 = 1.3;
/// Fraction of the best guest's throughput below which a guest with a rate was held back. The fraction is not closer to
/// 1, because a guest behind a slower back end falls back more often and does not catch up.
const HELD_BACK: f64 = 0.8;
const GODWIT: &str = "godwit";
/// Fraction of its throughput that a guest keeps.
const KEPT: f64 = 0.98;

const FIGURES: &str = "lm_seconds s, blackout_ms ms, stopped_ms ms, wire_bytes B, mbps_before MB/s, mbps_during MB/s, \
    p50_us_before µs, p50_us_during µs, p99_us_before µs, p99_us_during µs, p999_us_before µs, \
    p999_us_during µs, max_us_before µs, max_us_during µs, cpu_seconds s, cpu_per_second_before s";

const ABOUT: &str = "A machine moves with its disk while its guest works. The guest runs on an emulated processor, so its own \
    work is part of the CPU time. Latencies are on the guest's clock. A move without a time had not converged when it was \
    given up.";

pub(crate) fn run(options: &Options, extent: Extent, report: &mut Report) -> io::Result<()> {
    let rounds = options.rounds.unwrap_or(extent.of(1, 5));
    let bytes = options.migrate.image_bytes(extent);
    let settle = options.settle(extent);
    let site = Site::new(None, bytes, Destination::SameDisk, Data::Random, settle)?;
    let movers = mover::all();
    report.table("vm", "load, mover", FIGURES, ABOUT);
    let loads: &[u64] = extent.of(&[PACED], &[PACED, 0]);
    for &rate in loads {
        // A file of half of the disk, and memory that is partly rewritten.
        let load = GuestLoad {
            rate,
            file_mb: bytes >> 21,
            ..GuestLoad::default()
        };
        let mbps = (rate > 0).then_some(rate as f64 * BLOCK / 1e6);
        let name = mbps.map_or_else(
            || "as much as goes".to_owned(),
            |mbps| format!("{mbps:.1} MB/s"),
        );
        in_turns(rounds, movers.len(), |_, turn| {
            let mover = movers[turn].as_ref();
            let run = measure(mover, &site, &load, LIMIT);
            let mut run = run.map_err(named(&format!("{} with a machine", mover.name())))?;
            run["load"] = name.clone().into();
            run["rate_mbps"] = mbps.into();
            run["mover"] = mover.name().into();
            report.add("vm", run)
        })?;
        report.mark_noisy("vm", is_noisy);
    }
    Ok(())
}

/// Judges a mover's runs by the highest throughput of any guest of the load before its move.
fn is_noisy(cell: &Runs<'_>, all: &Runs<'_>) -> bool {
    let load = all.only("load", cell.first("load").clone());
    let before = cell.values("mbps_before");
    let best = load.most("mbps_before").unwrap_or_default();
    let paced = !cell.first("rate_mbps").is_null();
    let missed = before
        .iter()
        .filter(|mbps| paced && **mbps < best * HELD_BACK);
    missed.count() > outliers(before.len()) || disagree(&before, NOISY)
}

/// Judges Godwit's runs against the peers' runs: the promises for a moving disk hold with a machine, too.
pub(crate) fn targets(runs: &Runs<'_>) -> Vec<Target> {
    let mut targets = Vec::new();
    for load in runs.groups(&["load"]) {
        let ours = load.only("mover", GODWIT);
        if ours.0.is_empty() {
            continue;
        }
        let load_name = load.first("load").as_str().unwrap_or_default();
        let name = |what: &str| format!("vm {load_name}: {what}");
        let kept =
            |runs: &Runs<'_>| Some(runs.median("mbps_during")? / runs.median("mbps_before")?);
        let over = |ours: Option<f64>, theirs: Option<f64>| Some(ours? / theirs?);
        let converged = f64::from(u8::from(ours.all("converged")));
        targets.push(Target::at_least(name("converged"), 1.0, Some(converged)));
        targets.push(Target::at_least(
            name("throughput during / before"),
            KEPT,
            kept(&ours),
        ));
        let peers = load.filter(|run| run["mover"] != GODWIT).groups(&["mover"]);
        for peer in peers.iter().filter(|peer| peer.all("converged")) {
            let mover = peer.first("mover").as_str().unwrap_or_default();
            let against = |what: &str| name(&format!("{what} / {mover}"));
            for (what, figure) in [("LM time", "lm_seconds"), ("blackout", "blackout_ms")] {
                let ratio = over(ours.median(figure), peer.median(figure));
                let target = Target::at_most(against(what), 1.0, ratio);
                targets.push(target.unless("godwit did not converge"));
            }
            // A guest cannot keep more than the whole rate, so the kept fractions may differ by the loss allowed to a
            // guest.
            let ratio = over(kept(&ours), kept(peer));
            targets.push(Target::at_least(against("throughput kept"), KEPT, ratio));
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn moved(mover: &str, seconds: Option<f64>, blackout_ms: f64, during: f64) -> Value {
        json!({
            "load": "4.0 MB/s", "rate_mbps": 4.0, "mover": mover, "converged": seconds.is_some(), "lm_seconds": seconds,
            "blackout_ms": seconds.map(|_| blackout_ms), "mbps_before": 4.0, "mbps_during": during,
        })
    }

    fn expect(rows: &[Value], expected: &[(&str, bool)]) {
        let targets = targets(&Runs(rows.iter().collect()));
        let found: Vec<_> = targets
            .iter()
            .map(|target| {
                (
                    target.name.trim_start_matches("vm 4.0 MB/s: "),
                    target.holds,
                )
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_peer_that_converges_is_compared() {
        expect(
            &[
                moved("godwit", Some(2.0), 100.0, 3.9),
                moved("qemu-background", None, 100.0, 4.0),
                moved("qemu-write-blocking", Some(3.0), 99.0, 2.0),
            ],
            &[
                ("converged, at least", true),
                ("throughput during / before, at least", false),
                ("LM time / qemu-write-blocking, at most", true),
                ("blackout / qemu-write-blocking, at most", false),
                ("throughput kept / qemu-write-blocking, at least", true),
            ],
        );
    }

    #[test]
    fn a_move_that_does_not_converge_meets_no_target_of_time() {
        expect(
            &[
                moved("godwit", None, 100.0, 4.0),
                moved("qemu-background", Some(3.0), 100.0, 4.0),
            ],
            &[
                ("converged, at least", false),
                ("throughput during / before, at least", true),
                ("LM time / qemu-background, at most", false),
                ("blackout / qemu-background, at most", false),
                ("throughput kept / qemu-background, at least", true),
            ],
        );
    }

    #[test]
    fn a_guest_that_missed_what_others_got_was_disturbed() {
        let noisy = |rate: Option<f64>, best: f64, before: &[f64]| {
            let row = |mbps: f64| json!({"load": "x", "rate_mbps": rate, "mbps_before": mbps});
            let (rows, other) = (
                before.iter().map(|mbps| row(*mbps)).collect::<Vec<_>>(),
                row(best),
            );
            let cell = Runs(rows.iter().collect());
            is_noisy(&cell, &Runs(rows.iter().chain([&other]).collect()))
        };
        let paced = Some(4.0);
        assert!(!noisy(paced, 4.0, &[3.9]) && noisy(paced, 4.0, &[3.1]));
        assert!(
            !noisy(paced, 4.0, &[3.1, 3.9, 3.9, 3.9, 3.9]),
            "one of five"
        );
        assert!(noisy(paced, 4.0, &[3.1, 3.1, 3.9, 3.9, 3.9]), "two of five");
        assert!(!noisy(None, 9.0, &[3.5, 4.0]) && noisy(None, 9.0, &[3.0, 4.0]));
    }
}
