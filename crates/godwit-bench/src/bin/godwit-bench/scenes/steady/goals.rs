//! The goals of a server that does not move a disk.

use std::collections::BTreeSet;

use godwit_bench::steady::Kind;

use crate::report::Steady;
use crate::report::targets::Target;

/// Depth at which requests per CPU second count.
const BUSY: u32 = 32;
/// Depth at which latency counts.
const ALONE: u32 = 1;

/// Returns targets for each front end and load, against the best peer of the same front end.
pub(crate) fn targets(rows: &[Steady]) -> Vec<Target> {
    let loads: BTreeSet<_> = rows
        .iter()
        .map(|row| (&row.front_end, row.depth, &row.rw))
        .collect();
    let mut targets = Vec::new();
    for (front_end, depth, rw) in loads {
        let (ours, peers): (Vec<&Steady>, Vec<&Steady>) = rows
            .iter()
            .filter(|row| (&row.front_end, row.depth, &row.rw) == (front_end, depth, rw))
            .partition(|row| row.server == Kind::Godwit.name());
        let Some(ours) = ours.first() else { continue };
        if depth == BUSY {
            let best = least(&peers, |row| row.cpu_seconds_per_mio);
            targets.push(Target::at_least(
                format!(
                    "steady {front_end} {rw} at depth {depth}: requests per CPU second over the \
                     best peer's"
                ),
                1.1,
                best / ours.cpu_seconds_per_mio,
            ));
        }
        if depth == ALONE {
            let latency = |peers: &[&Steady], who: &str| {
                let name = format!(
                    "steady {front_end} {rw} at depth {depth}: median latency over the best {who}"
                );
                let best = least(peers, |row| row.p50_us);
                Target::at_most(name, 1.0, ours.p50_us / best)
            };
            targets.push(latency(&peers, "peer's"));
            let direct: Vec<&Steady> = peers.iter().copied().filter(|row| row.direct).collect();
            if direct.len() < peers.len() {
                // Other peers answer a write once it is in memory.
                targets.push(latency(&direct, "peer's with direct I/O"));
            }
        }
    }
    targets
}

/// Returns the least value among the peers. Without peers the NaN makes the ratio non-finite, which counts as not
/// measured.
fn least(peers: &[&Steady], pick: fn(&Steady) -> f64) -> f64 {
    let least = peers.iter().map(|row| pick(row)).min_by(f64::total_cmp);
    least.unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(server: &str, depth: u32, p50_us: f64, cpu_seconds_per_mio: f64) -> Steady {
        Steady {
            front_end: "nbd".to_owned(),
            server: server.to_owned(),
            bs: 4096,
            depth,
            rw: "randread".to_owned(),
            iops: 1.0,
            p50_us,
            cpu_seconds_per_mio,
            direct: server != "cached",
            disk_options: String::new(),
            noisy: false,
            rounds: Vec::new(),
        }
    }

    #[test]
    fn the_best_peer_is_the_one_to_beat() {
        let rows = [
            row("godwit", 1, 50.0, 30.0),
            row("slow", 1, 70.0, 90.0),
            row("fast", 1, 40.0, 80.0),
            row("godwit", 32, 500.0, 10.0),
            row("slow", 32, 300.0, 20.0),
            row("fast", 32, 200.0, 12.0),
        ];
        let targets = targets(&rows);
        let values: Vec<_> = targets.iter().map(|target| target.value).collect();
        assert_eq!(values, [Some(50.0 / 40.0), Some(12.0 / 10.0)]);
        assert!(!targets[0].met && targets[1].met);
    }

    #[test]
    fn a_peer_without_direct_io_counts_and_is_told_apart() {
        let targets = targets(&[
            row("godwit", 1, 50.0, 30.0),
            row("cached", 1, 40.0, 30.0),
            row("direct", 1, 60.0, 30.0),
        ]);
        let values: Vec<_> = targets.iter().map(|target| target.value).collect();
        assert_eq!(values, [Some(50.0 / 40.0), Some(50.0 / 60.0)]);
    }

    #[test]
    fn without_a_peer_nothing_is_met() {
        let targets = targets(&[row("godwit", 1, 50.0, 30.0)]);
        assert!(targets[0].value.is_none() && !targets[0].met);
    }
}
