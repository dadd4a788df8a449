//! The goals of the figures.

use std::fmt;

use godwit_testkit::report::median;
use serde::Serialize;

use super::PeerRuns;
use crate::net::loads::Load;
use crate::net::loads::iperf::Workload;
use crate::net::measure::{Moved, Steady};
use crate::net::peers::Peer;

/// Largest share of the service gap of QEMU's cards, as in the paper (section 5.3: 0.7 s beside 1.4 s).
const OF_OWN_CARDS: f64 = 0.5;
/// Largest share of the service gap of a card that is unplugged for the move (section 5.3: 1.0 s beside 3.5 s).
const OF_FAILOVER: f64 = 0.29;

/// A goal and its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Target {
    /// The compared figure, and the direction of the goal.
    name: String,
    goal: f64,
    /// Median of the rounds' ratios; null when a side was not measured.
    measured: Option<f64>,
    /// True if the figure was measured and reaches the goal.
    holds: bool,
    /// True if the figure is only reported and nothing is promised.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    reported_only: bool,
}

#[derive(Clone, Copy)]
enum Direction {
    AtMost,
    AtLeast,
}

/// Judges the Godwit peer against the others.
pub(crate) fn judge(peers: &[PeerRuns]) -> Vec<Target> {
    let ours = runs_of(peers, Peer::Godwit);
    let mut targets = Vec::new();
    for (peer, goal) in [
        (Peer::E1000, OF_OWN_CARDS),
        (Peer::VirtioNet, OF_OWN_CARDS),
        (Peer::Failover, OF_FAILOVER),
    ] {
        let theirs = runs_of(peers, peer);
        for load in Load::ALL {
            let name = format!("service gap, {} / {}", load.name(), peer.name());
            let gap = |moved: &Moved| moved.gap_ms;
            let measured = ratio(&moves(ours, load), &moves(theirs, load), |moved| gap(moved));
            targets.push(Target::new(name, Direction::AtMost, goal, measured));
        }
    }
    for peer in [Peer::VirtioNet, Peer::Testpmd] {
        let theirs = runs_of(peers, peer);
        for (workload, what, pick) in figures() {
            let name = format!("{what}, {} / {}", workload.name(), peer.name());
            let measured = ratio(&steady(ours, workload), &steady(theirs, workload), pick);
            let mut target = Target::new(name, Direction::AtLeast, 1.0, measured);
            target.reported_only = peer == Peer::Testpmd;
            targets.push(target);
        }
    }
    targets
}

type Pick = fn(&Steady) -> f64;

/// Returns the figures compared under steady load.
fn figures() -> Vec<(Workload, &'static str, Pick)> {
    let mut figures: Vec<(Workload, &'static str, Pick)> = Vec::new();
    for workload in Workload::ALL {
        if workload.is_stream() {
            figures.push((workload, "throughput", |run| run.mbps));
            figures.push((workload, "megabytes per CPU second", |run| {
                run.megabytes_per_cpu_second
            }));
        } else {
            figures.push((workload, "64-byte packets per second", |run| {
                run.packets_per_second
            }));
            figures.push((workload, "packets per CPU second", |run| {
                run.packets_per_cpu_second
            }));
        }
    }
    figures
}

fn runs_of(peers: &[PeerRuns], peer: Peer) -> Option<&PeerRuns> {
    peers.iter().find(|runs| runs.peer == peer)
}

fn moves(runs: Option<&PeerRuns>, load: Load) -> Vec<Moved> {
    let moves = runs.map(|runs| runs.of_load(load)).unwrap_or_default();
    moves.into_iter().cloned().collect()
}

fn steady(runs: Option<&PeerRuns>, workload: Workload) -> Vec<Steady> {
    runs.map(|runs| runs.of_workload(workload))
        .unwrap_or_default()
}

/// Returns the median of the ratios of ours to theirs, round by round.
fn ratio<T>(ours: &[T], theirs: &[T], pick: impl Fn(&T) -> f64) -> Option<f64> {
    let pairs = ours.iter().zip(theirs);
    let ratios: Vec<f64> = pairs
        .map(|(ours, theirs)| pick(ours) / pick(theirs))
        .collect();
    (!ratios.is_empty() && ratios.iter().all(|ratio| ratio.is_finite())).then(|| median(&ratios))
}

impl Target {
    fn new(name: String, direction: Direction, goal: f64, measured: Option<f64>) -> Self {
        let (word, holds) = match direction {
            Direction::AtMost => ("at most", measured.is_some_and(|ratio| ratio <= goal)),
            Direction::AtLeast => ("at least", measured.is_some_and(|ratio| ratio >= goal)),
        };
        Self {
            name: format!("{name}, {word}"),
            goal,
            measured,
            holds,
            reported_only: false,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match (self.measured, self.reported_only, self.holds) {
            (None, ..) => return write!(formatter, "{} {}: not measured", self.name, self.goal),
            (_, true, _) => "reported",
            (_, _, true) => "holds",
            (_, _, false) => "does NOT hold",
        };
        let measured = self.measured.unwrap_or(f64::NAN);
        write!(
            formatter,
            "{} {}: {measured:.2}, {word}",
            self.name, self.goal
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(gap_ms: f64) -> Vec<Moved> {
        let of = |load| Moved {
            load,
            from: "a",
            to: "b",
            seconds: 1.0,
            blackout_ms: None,
            gap_ms,
            gap_before_ms: 0.0,
            longest_wait_ms: gap_ms,
            ping_gap_ms: gap_ms,
            pings_lost: 0,
            pings_twice: 0,
            connections_broken: 0,
            load_ended: false,
            retransmits: 0,
            cpu_seconds: 0.0,
            timeline: Vec::new(),
        };
        Load::ALL.map(of).to_vec()
    }

    fn measured(packets_per_second: f64, cpu_seconds: f64) -> Vec<Steady> {
        let of = |workload| Steady {
            workload,
            seconds: 1.0,
            mbps: packets_per_second,
            retransmits: None,
            packets_per_second,
            cpu_seconds,
            guest_processor_seconds: 0.0,
            packets_per_cpu_second: packets_per_second / cpu_seconds,
            megabytes_per_cpu_second: packets_per_second / cpu_seconds,
        };
        Workload::ALL.map(of).to_vec()
    }

    fn find<'a>(targets: &'a [Target], name: &str) -> &'a Target {
        let found = targets.iter().find(|target| target.name.starts_with(name));
        found.unwrap_or_else(|| panic!("no target {name}"))
    }

    #[test]
    fn ours_is_held_against_each_peer_round_by_round() {
        let peers = [
            PeerRuns {
                peer: Peer::Godwit,
                steady: vec![measured(100.0, 1.0), measured(120.0, 1.0)],
                moves: vec![moved(100.0), moved(200.0)],
            },
            PeerRuns {
                peer: Peer::VirtioNet,
                steady: vec![measured(100.0, 2.0), measured(100.0, 2.0)],
                moves: vec![moved(250.0), moved(250.0)],
            },
        ];
        let targets = judge(&peers);
        let gap = find(&targets, "service gap, quiet / virtio-net");
        assert!(
            !gap.holds && (gap.measured.unwrap() - 0.6).abs() < 1e-9,
            "{gap}"
        );
        let rate = find(
            &targets,
            "64-byte packets per second, small-in / virtio-net",
        );
        assert!(
            rate.holds && (rate.measured.unwrap() - 1.1).abs() < 1e-9,
            "{rate}"
        );
        let cost = find(&targets, "packets per CPU second, small-out / virtio-net");
        assert!((cost.measured.unwrap() - 2.2).abs() < 1e-9, "{cost}");
        // A figure that was not measured does not hold.
        let missing = find(&targets, "service gap, web / failover");
        assert!(!missing.holds && missing.measured.is_none(), "{missing}");
        assert!(find(&targets, "throughput, stream-in / testpmd").reported_only);
    }
}
