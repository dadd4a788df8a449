//! The targets of the scene `migrate`.

use godwit_testkit::report::{Runs, Target};

use super::movers::godwit::Godwit;
use super::movers::{AUTO, judged};

/// Case in which the guest must not notice the move.
const UNNOTICED: &str = "randwrite 40 MB/s, uncapped";
/// Fraction of its throughput below which a guest is degraded.
const KEPT: f64 = 0.9;
/// Growth of the p99.99 above which a guest is degraded, too.
const GROWN: f64 = 1.5;
/// Largest share of the CPU time of the cheapest peer.
const CPU: f64 = 0.5;

const NOT_CONVERGED: &str = "godwit did not converge";
const BACKGROUND: &str = "qemu-background";
const WRITE_BLOCKING: &str = "qemu-write-blocking";
const PEERS: [&str; 3] = [BACKGROUND, WRITE_BLOCKING, "qemu-proxmox"];

/// Judges Godwit's runs against the peers' runs, case by case.
pub(crate) fn of(runs: &Runs<'_>) -> Vec<Target> {
    let judged = judged();
    let mut targets = Vec::new();
    for case in runs.groups(&["case"]) {
        for ours in case.groups(&["mover"]) {
            let name = ours.first("mover").as_str();
            if let Some(godwit) = judged
                .iter()
                .find(|godwit| name == Some(godwit.name.as_ref()))
            {
                targets.extend(of_mover(&ours, godwit, &case));
            }
        }
    }
    targets
}

fn of_mover(ours: &Runs<'_>, godwit: &Godwit, case: &Runs<'_>) -> Vec<Target> {
    let case_name = ours.first("case").as_str().unwrap_or_default();
    let which = match godwit.name == super::movers::godwit().name {
        true => String::new(),
        false => format!(", {}", godwit.name),
    };
    let name = |what: &str| format!("migrate {case_name}{which}: {what}");
    let peer = |mover: &str| case.only("mover", mover);
    let over = |figure: &str, one: &Runs<'_>, other: &Runs<'_>, of: &str| {
        Some(one.median(&format!("{figure}_during"))? / other.median(&format!("{figure}_{of}"))?)
    };
    let time = |what: &str, goal, theirs: f64| {
        let ratio = ours.median("lm_seconds").map(|seconds| seconds / theirs);
        Target::at_most(name(what), goal, ratio).unless(NOT_CONVERGED)
    };

    let converged = f64::from(u8::from(ours.all("converged")));
    let mut targets = vec![Target::at_least(name("converged"), 1.0, Some(converged))];
    // Without a peer's convergence there is no time to compare: Godwit need only converge.
    if let Some(theirs) = peer(BACKGROUND).median("lm_seconds") {
        targets.push(time("LM time / background", 0.5, theirs));
    }
    let blocking = peer(WRITE_BLOCKING);
    if let Some(theirs) = blocking.median("lm_seconds") {
        targets.push(time("LM time / write-blocking", 1.0, theirs));
        let kept = over("mbps", &blocking, &blocking, "before");
        let grown = over("p9999_us", &blocking, &blocking, "before");
        if kept.is_some_and(|kept| kept < KEPT) || grown.is_some_and(|grown| grown > GROWN) {
            let (mbps, tail) = (
                over("mbps", ours, &blocking, "during"),
                over("p9999_us", ours, &blocking, "during"),
            );
            targets.push(Target::at_least(
                name("throughput during / write-blocking"),
                3.0,
                mbps,
            ));
            targets.push(Target::at_most(
                name("p99.99 during / write-blocking"),
                1.0 / 3.0,
                tail,
            ));
        }
    }
    if godwit.options == AUTO && case_name == UNNOTICED {
        let (kept, grown) = (
            over("mbps", ours, ours, "before"),
            over("p9999_us", ours, ours, "before"),
        );
        targets.push(Target::at_least(
            name("throughput during / before"),
            0.98,
            kept,
        ));
        targets.push(Target::at_most(name("p99.99 during / before"), 1.1, grown));
    }
    let cheapest = name("CPU s per GB / cheapest QEMU mode");
    targets.push(cpu(ours, &PEERS.map(peer), cheapest));
    let encrypted = PEERS.map(|mover| peer(&format!("{mover}-tls")));
    if !godwit.unencrypted_data && encrypted.iter().any(|peer| !peer.0.is_empty()) {
        let cheapest = name("CPU s per GB / cheapest QEMU mode that encrypts, too");
        targets.push(cpu(ours, &encrypted, cheapest));
    }
    targets
}

fn cpu(ours: &Runs<'_>, peers: &[Runs<'_>], name: String) -> Target {
    let cost = |runs: &Runs<'_>| runs.median("cpu_seconds").filter(|_| runs.all("converged"));
    let cheapest = peers.iter().filter_map(cost).min_by(f64::total_cmp);
    let ratio = cost(ours).zip(cheapest).map(|(ours, theirs)| ours / theirs);
    let reason = cheapest.map_or("no QEMU mode converged", |_| NOT_CONVERGED);
    Target::at_most(name, CPU, ratio).unless(reason)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns a run with random writes at 40 MB/s over an uncapped link.
    fn run(mover: &str, seconds: Option<f64>, mbps: f64, p9999_us: f64, cpu: f64) -> Value {
        json!({
            "case": UNNOTICED, "mover": mover, "converged": seconds.is_some(), "lm_seconds": seconds,
            "cpu_seconds": cpu, "mbps_before": 40.0, "mbps_during": mbps,
            "p9999_us_before": 1000.0, "p9999_us_during": p9999_us,
        })
    }

    fn met(rows: &[Value]) -> Vec<(String, bool)> {
        let targets = of(&Runs(rows.iter().collect())).into_iter();
        let short = |target: Target| {
            (
                target.name.rsplit_once(": ").unwrap().1.to_owned(),
                target.holds,
            )
        };
        targets.map(short).collect()
    }

    fn expect(rows: &[Value], expected: &[(&str, bool)]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|(name, met)| ((*name).to_owned(), *met))
            .collect();
        assert_eq!(met(rows), expected);
    }

    #[test]
    fn everything_is_compared_where_all_converge() {
        let rows = [
            run("godwit", Some(2.0), 40.0, 1050.0, 1.0),
            run("qemu-background", Some(4.0), 40.0, 1000.0, 3.0),
            run("qemu-write-blocking", Some(1.9), 10.0, 9000.0, 1.9),
        ];
        expect(
            &rows,
            &[
                ("converged, at least", true),
                ("LM time / background, at most", true),
                ("LM time / write-blocking, at most", false),
                ("throughput during / write-blocking, at least", true),
                ("p99.99 during / write-blocking, at most", true),
                ("throughput during / before, at least", true),
                ("p99.99 during / before, at most", true),
                ("CPU s per GB / cheapest QEMU mode, at most", false),
            ],
        );
    }

    #[test]
    fn a_promise_that_leaves_room_need_not_go_unnoticed() {
        let rows = [
            run("godwit-20ms", Some(1.8), 20.0, 5000.0, 1.0),
            run("qemu-write-blocking", Some(1.9), 4.0, 90_000.0, 1.9),
        ];
        expect(
            &rows,
            &[
                ("converged, at least", true),
                ("LM time / write-blocking, at most", true),
                ("throughput during / write-blocking, at least", true),
                ("p99.99 during / write-blocking, at most", true),
                ("CPU s per GB / cheapest QEMU mode, at most", false),
            ],
        );
        let name = &of(&Runs(rows.iter().collect()))[0].name;
        assert!(
            name.ends_with("uncapped, godwit-20ms: converged, at least"),
            "{name}"
        );
    }

    #[test]
    fn the_cost_of_encryption_is_compared_with_movers_that_encrypt() {
        let beside_peers = |ours: &str| {
            let all = met(&[
                run(ours, Some(2.0), 40.0, 1000.0, 1.0),
                run("qemu-write-blocking", Some(3.0), 40.0, 1000.0, 1.5),
                run("qemu-write-blocking-tls", Some(3.0), 40.0, 1000.0, 2.5),
            ]);
            let cpu = all.into_iter().filter(|(name, _)| name.starts_with("CPU"));
            cpu.map(|(_, met)| met).collect::<Vec<_>>()
        };
        assert_eq!(beside_peers("godwit"), [false, true]);
        assert_eq!(beside_peers("godwit-unencrypted"), [false]);
    }

    #[test]
    fn a_peer_that_does_not_converge_or_degrade_leaves_fewer_targets() {
        let rows = [
            run("godwit", Some(2.0), 30.0, 1200.0, 1.0),
            run("qemu-background", None, 40.0, 1000.0, 0.1),
            run("qemu-write-blocking", Some(3.0), 39.0, 1400.0, 2.0),
        ];
        expect(
            &rows,
            &[
                ("converged, at least", true),
                ("LM time / write-blocking, at most", true),
                ("throughput during / before, at least", false),
                ("p99.99 during / before, at most", false),
                ("CPU s per GB / cheapest QEMU mode, at most", true),
            ],
        );
    }

    #[test]
    fn a_disk_for_each_end_is_not_compared_with_one_for_both() {
        let mut theirs = run("qemu-write-blocking", Some(3.0), 10.0, 9000.0, 2.0);
        theirs["case"] = format!("{UNNOTICED}, to memory").into();
        expect(
            &[run("godwit", Some(2.0), 40.0, 1000.0, 1.0), theirs],
            &[
                ("converged, at least", true),
                ("throughput during / before, at least", true),
                ("p99.99 during / before, at most", true),
                ("CPU s per GB / cheapest QEMU mode, at most", false),
            ],
        );
    }

    #[test]
    fn a_move_that_does_not_converge_meets_no_target_of_time() {
        let mut rows = vec![
            run("godwit", None, 40.0, 1000.0, 1.0),
            run("qemu-write-blocking", Some(3.0), 39.0, 1400.0, 2.0),
        ];
        let found = met(&rows);
        assert!(
            !found[0].1 && !found[1].1 && !found.last().unwrap().1,
            "{found:?}"
        );
        // One round that did not converge is enough.
        rows.push(run("godwit", Some(2.0), 40.0, 1000.0, 1.0));
        assert!(!met(&rows)[0].1 && !met(&rows)[1].1);
    }
}
