//! The targets of the scene `migrate`.

use crate::report::Migrate;
use crate::report::targets::Target;
use crate::scenes::migrate::movers::godwit::Godwit;
use crate::scenes::migrate::movers::{AUTO, GODWITS};

/// Rate in MB/s at which the guest must not notice the move.
const UNNOTICED: f64 = 40.0;
/// Fraction of its throughput below which a guest is degraded.
const KEPT: f64 = 0.9;
/// Growth of the p99.99 above which a guest is degraded, too.
const GROWN: f64 = 1.5;

const NOT_CONVERGED: &str = "godwit did not converge";

const GODWIT: &str = AUTO.name;
const BACKGROUND: &str = "qemu-background";
const WRITE_BLOCKING: &str = "qemu-write-blocking";
const PEERS: [&str; 3] = [BACKGROUND, WRITE_BLOCKING, "qemu-proxmox"];

/// Judges Godwit's cells against the peers' cells.
pub(crate) fn of(cells: &[Migrate]) -> Vec<Target> {
    let ours = cells.iter().filter_map(|cell| {
        let godwit = GODWITS.iter().find(|godwit| cell.mover == godwit.name)?;
        Some((cell, godwit))
    });
    ours.flat_map(|(ours, godwit)| of_case(ours, godwit, cells))
        .collect()
}

fn of_case(ours: &Migrate, godwit: &Godwit, cells: &[Migrate]) -> Vec<Target> {
    let which = match ours.mover.as_str() {
        GODWIT => String::new(),
        other => format!(", {other}"),
    };
    let name = |what: &str| format!("migrate {}{which}: {what}", case(ours));
    let peer = |mover: &str| {
        let same = |cell: &&Migrate| cell.mover == mover && case(cell) == case(ours);
        cells.iter().find(same)
    };
    let seconds = |cell: Option<&Migrate>| cell.and_then(|cell| cell.lm_seconds);
    let time = |what: &str, goal, theirs| match ours.lm_seconds {
        Some(seconds) => Target::at_most(name(what), goal, seconds / theirs),
        None => Target::unknown(name(what) + ", at most", goal, NOT_CONVERGED),
    };

    let converged = f64::from(u8::from(ours.converged));
    let mut targets = vec![Target::at_least(name("converged"), 1.0, converged)];
    // Without a peer's convergence there is no time to compare: Godwit need only converge.
    if let Some(theirs) = seconds(peer(BACKGROUND)) {
        targets.push(time("LM time / background", 0.5, theirs));
    }
    if let Some(blocking) = peer(WRITE_BLOCKING)
        && let Some(theirs) = blocking.lm_seconds
    {
        targets.push(time("LM time / write-blocking", 1.0, theirs));
        targets.extend(degraded(ours, blocking, &name).into_iter().flatten());
    }
    let guest = (ours.workload.as_str(), ours.rate_mbps, ours.link_gbps);
    if godwit.options == AUTO.options
        && guest == ("randwrite", Some(UNNOTICED), None)
        && let (Some(before), Some(during)) = (ours.guest.before, ours.guest.during)
    {
        let kept = during.mbps / before.mbps;
        targets.push(Target::at_least(
            name("throughput during / before"),
            0.98,
            kept,
        ));
        let grown = during.p9999_us / before.p9999_us;
        targets.push(Target::at_most(name("p99.99 during / before"), 1.1, grown));
    }
    targets.push(cpu(
        ours,
        &PEERS.map(peer),
        name("CPU s per GB / cheapest QEMU mode"),
    ));
    let encrypted = PEERS.map(|mover| peer(&format!("{mover}-tls")));
    if !godwit.unencrypted_data && encrypted.iter().any(Option::is_some) {
        let name = name("CPU s per GB / cheapest QEMU mode that encrypts, too");
        targets.push(cpu(ours, &encrypted, name));
    }
    targets
}

/// Returns the comparisons for cases in which write-blocking degrades the guest.
fn degraded(
    ours: &Migrate,
    blocking: &Migrate,
    name: &dyn Fn(&str) -> String,
) -> Option<[Target; 2]> {
    let (before, theirs) = (blocking.guest.before?, blocking.guest.during?);
    let during = ours.guest.during?;
    let degrades = theirs.mbps < before.mbps * KEPT || theirs.p9999_us > before.p9999_us * GROWN;
    degrades.then(|| {
        let (mbps, tail) = (during.mbps / theirs.mbps, during.p9999_us / theirs.p9999_us);
        [
            Target::at_least(name("throughput during / write-blocking"), 3.0, mbps),
            Target::at_most(name("p99.99 during / write-blocking"), 1.0 / 3.0, tail),
        ]
    })
}

fn cpu(ours: &Migrate, peers: &[Option<&Migrate>], name: String) -> Target {
    const GOAL: f64 = 0.5;
    let per_byte = |cell: &Migrate| cell.cpu_seconds / cell.image_bytes as f64;
    let converged = peers.iter().flatten().filter(|cell| cell.converged);
    match converged.map(|cell| per_byte(cell)).min_by(f64::total_cmp) {
        Some(cheapest) if ours.converged => Target::at_most(name, GOAL, per_byte(ours) / cheapest),
        Some(_) => Target::unknown(name + ", at most", GOAL, NOT_CONVERGED),
        None => Target::unknown(name + ", at most", GOAL, "no QEMU mode converged"),
    }
}

/// Returns the name of a cell's case, equal for all movers.
pub(crate) fn case(cell: &Migrate) -> String {
    let rate = match cell.rate_mbps {
        Some(0.0) => "idle".to_owned(),
        Some(rate) => format!("{} {rate} MB/s", cell.workload),
        None => format!("{} unthrottled", cell.workload),
    };
    let link = cell
        .link_gbps
        .map_or_else(|| "uncapped".to_owned(), |link| format!("{link} Gb/s"));
    let destination = if cell.destination_in_memory {
        ", to memory"
    } else {
        ""
    };
    let data = if cell.files { ", files" } else { "" };
    format!("{rate}, {link}{destination}{data}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::report::{Guest, Seen};

    /// Returns a cell with random writes at 40 MB/s over an uncapped link.
    pub(crate) fn cell(
        mover: &str,
        seconds: Option<f64>,
        mbps: f64,
        p9999_us: f64,
        cpu: f64,
    ) -> Migrate {
        let seen = |mbps, p9999_us| {
            Some(Seen {
                mbps,
                p9999_us,
                ..Seen::default()
            })
        };
        Migrate {
            workload: "randwrite".to_owned(),
            rate_mbps: Some(40.0),
            link_gbps: None,
            destination_in_memory: false,
            files: false,
            mover: mover.to_owned(),
            image_bytes: 1 << 30,
            limit_seconds: 30.0,
            converged: seconds.is_some(),
            lm_seconds: seconds,
            wire_bytes: 0.0,
            guest: Guest {
                before: seen(40.0, 1000.0),
                during: seen(mbps, p9999_us),
            },
            cpu_seconds: cpu,
            blackout_ms: None,
            noisy: false,
            lm_seconds_spread: None,
            series: Vec::new(),
            rounds: Vec::new(),
        }
    }

    fn met(cells: &[Migrate]) -> Vec<(String, bool)> {
        let short = |target: Target| {
            let name = target.name.rsplit_once(": ").unwrap().1.to_owned();
            (name, target.met)
        };
        of(cells).into_iter().map(short).collect()
    }

    #[test]
    fn everything_is_compared_where_all_converge() {
        let cells = [
            cell("godwit", Some(2.0), 40.0, 1050.0, 1.0),
            cell("qemu-background", Some(4.0), 40.0, 1000.0, 3.0),
            cell("qemu-write-blocking", Some(1.9), 10.0, 9000.0, 1.9),
        ];
        let expected = [
            ("converged, at least", true),
            ("LM time / background, at most", true),
            ("LM time / write-blocking, at most", false),
            ("throughput during / write-blocking, at least", true),
            ("p99.99 during / write-blocking, at most", true),
            ("throughput during / before, at least", true),
            ("p99.99 during / before, at most", true),
            ("CPU s per GB / cheapest QEMU mode, at most", false),
        ];
        assert_eq!(
            met(&cells),
            expected.map(|(name, met)| (name.to_owned(), met))
        );
    }

    #[test]
    fn a_promise_that_leaves_room_need_not_go_unnoticed() {
        let cells = [
            cell("godwit-20ms", Some(1.8), 20.0, 5000.0, 1.0),
            cell("qemu-write-blocking", Some(1.9), 4.0, 90_000.0, 1.9),
        ];
        let expected = [
            ("converged, at least", true),
            ("LM time / write-blocking, at most", true),
            ("throughput during / write-blocking, at least", true),
            ("p99.99 during / write-blocking, at most", true),
            ("CPU s per GB / cheapest QEMU mode, at most", false),
        ];
        assert_eq!(
            met(&cells),
            expected.map(|(name, met)| (name.to_owned(), met))
        );
        let named = &of(&cells)[0].name;
        assert!(
            named.ends_with("uncapped, godwit-20ms: converged, at least"),
            "{named}"
        );
    }

    /// Returns the result of each target about CPU time.
    fn cpu_met(cells: &[Migrate]) -> Vec<bool> {
        let met = met(cells).into_iter();
        met.filter(|(name, _)| name.starts_with("CPU"))
            .map(|(_, met)| met)
            .collect()
    }

    #[test]
    fn what_encryption_costs_is_compared_with_who_pays_it_too() {
        let peers = [
            cell("qemu-write-blocking", Some(3.0), 40.0, 1000.0, 1.5),
            cell("qemu-write-blocking-tls", Some(3.0), 40.0, 1000.0, 2.5),
        ];
        let beside_peers = |ours: &str| {
            let ours = cell(ours, Some(2.0), 40.0, 1000.0, 1.0);
            cpu_met(&[&[ours], &peers[..]].concat())
        };
        assert_eq!(beside_peers("godwit"), [false, true]);
        assert_eq!(beside_peers("godwit-unencrypted"), [false]);
    }

    #[test]
    fn a_peer_that_does_not_converge_or_degrade_leaves_fewer_targets() {
        let cells = [
            cell("godwit", Some(2.0), 30.0, 1200.0, 1.0),
            cell("qemu-background", None, 40.0, 1000.0, 0.1),
            cell("qemu-write-blocking", Some(3.0), 39.0, 1400.0, 2.0),
        ];
        let expected = [
            ("converged, at least", true),
            ("LM time / write-blocking, at most", true),
            ("throughput during / before, at least", false),
            ("p99.99 during / before, at most", false),
            ("CPU s per GB / cheapest QEMU mode, at most", true),
        ];
        assert_eq!(
            met(&cells),
            expected.map(|(name, met)| (name.to_owned(), met))
        );
    }

    #[test]
    fn a_disk_for_each_end_is_not_compared_with_one_for_both() {
        let ours = cell("godwit", Some(2.0), 40.0, 1000.0, 1.0);
        let mut theirs = cell("qemu-write-blocking", Some(3.0), 10.0, 9000.0, 2.0);
        theirs.destination_in_memory = true;
        let alone = [
            ("converged, at least", true),
            ("throughput during / before, at least", true),
            ("p99.99 during / before, at most", true),
            ("CPU s per GB / cheapest QEMU mode, at most", false),
        ];
        assert_eq!(
            met(&[ours, theirs]),
            alone.map(|(name, met)| (name.to_owned(), met))
        );
    }

    #[test]
    fn what_does_not_converge_meets_nothing_about_time() {
        let cells = [
            cell("godwit", None, 40.0, 1000.0, 1.0),
            cell("qemu-write-blocking", Some(3.0), 39.0, 1400.0, 2.0),
        ];
        let met = met(&cells);
        assert!(!met[0].1 && !met[1].1 && !met.last().unwrap().1, "{met:?}");
    }
}
