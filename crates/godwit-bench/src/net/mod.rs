//! A machine's network card under load and during the machine's move. Compares QEMU's e1000 and virtio-net on a tap,
//! virtio-net with a second card that is unplugged for the move, DPDK's testpmd behind vhost-user, and the NIC of a
//! Godwit node, in turns in one run. The load comes from real programs: iperf3, nginx and wrk. docs/lab/network.md
//! describes the method.

mod iperf;
mod loads;
mod machine;
mod moving;
mod peers;
mod site;
mod steady;
mod testpmd;
mod timeline;

use std::io;
use std::time::Duration;

use clap::{Args, ValueEnum};
use godwit_testkit::report::{Report, Table, Target, ratio};
use serde_json::json;

use self::iperf::Workload;
use self::loads::Load;
pub(crate) use self::machine::{Machine, VM};
pub(crate) use self::peers::Peer;
pub(crate) use self::site::{GUEST, HOSTS, Site, check};
use crate::common::chart::{Chart, Line};
use crate::common::{in_turns, interrupt, named};

/// Largest share of the service gap of QEMU's cards, as in the paper (section 5.3: 0.7 s beside 1.4 s).
const OF_OWN_CARDS: f64 = 0.5;
/// Largest share of the service gap of a card that is unplugged for the move (section 5.3: 1.0 s beside 3.5 s).
const OF_FAILOVER: f64 = 0.29;

/// A machine's network card, under load and while the machine moves, beside QEMU's own and others
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// One short round: shows that everything runs, and little more
    #[arg(long)]
    quick: bool,
    /// Number of rounds, each with a turn of every peer [default: 5, and 1 with --quick]
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of each measurement under steady load [default: 3, and 1 with --quick]
    #[arg(long)]
    seconds: Option<u64>,
    /// Only these peers, separated by commas
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Peer>,
}

impl Options {
    /// Returns the seconds of each steady load, at least one: the minimum of iperf3.
    fn seconds(&self) -> u64 {
        self.seconds
            .unwrap_or(if self.quick { 1 } else { 3 })
            .max(1)
    }

    /// Returns the duration of a load before and after a move.
    fn around(&self) -> Duration {
        Duration::from_millis(if self.quick { 1500 } else { 3000 })
    }
}

pub(crate) fn bench(options: &Options) -> io::Result<()> {
    check()?;
    let mut report = Report::new("bench-net", &["qemu-system-x86_64", "iperf3"])?;
    report.fact("quick", options.quick);
    report.fact("seconds", options.seconds());
    report.tables = tables();
    let mut peers = Vec::new();
    let chosen = |peer: &&Peer| options.only.is_empty() || options.only.contains(peer);
    for peer in Peer::value_variants().iter().filter(chosen) {
        match peer.missing() {
            Some(reason) => report
                .notes
                .push(format!("{} is left out: {reason}", peer.name())),
            None => peers.push(*peer),
        }
    }
    let site = Site::new()?;
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 5 });
    in_turns(rounds, peers.len(), |_, turn| {
        let peer = peers[turn];
        take_turn(&site, options, peer, &mut report).map_err(named(peer.name()))
    })?;
    report.targets = targets(&report);
    draw(&mut report)?;
    report.conclude()
}

const STEADY: &str = "mbps Mbit/s, retransmits, packets_per_second, packets_per_cpu_second, megabytes_per_cpu_second MB";
const MOVES: &str = "gap_ms ms, gap_before_ms ms, longest_wait_ms ms, ping_gap_ms ms, pings_lost, retransmits, \
    blackout_ms ms, seconds s, cpu_seconds s";

fn tables() -> Vec<Table> {
    vec![
        Table::new("steady", "peer, workload", STEADY, ""),
        Table::new("moves", "peer, load", MOVES, ""),
    ]
}

/// Measures one machine with the peer's card: under steady load first, then one move under each load.
fn take_turn(site: &Site, options: &Options, peer: Peer, report: &mut Report) -> io::Result<()> {
    let mut machine = Machine::start(site, peer, None)?;
    if peer.is_measured_steadily() {
        for workload in Workload::ALL {
            let mut run = steady::measure(site, workload, options.seconds())?;
            run["peer"] = peer.name().into();
            report.add("steady", run)?;
        }
    }
    if peer.moves() {
        for load in Load::ALL {
            interrupt::check()?;
            let mut run = moving::measure(site, &mut machine, load, options.around())?;
            run["peer"] = peer.name().into();
            report.add("moves", run)?;
        }
    }
    machine.stop(site)
}

/// Judges the Godwit peer against the others. Ratios are of runs of the same round.
fn targets(report: &Report) -> Vec<Target> {
    let of = |table: &str, field: &str, value: &str, peer: Peer| {
        report
            .runs(table)
            .only(field, value)
            .only("peer", peer.name())
    };
    let mut targets = Vec::new();
    let gaps = [
        (Peer::E1000, OF_OWN_CARDS),
        (Peer::VirtioNet, OF_OWN_CARDS),
        (Peer::Failover, OF_FAILOVER),
    ];
    for (peer, goal) in gaps {
        for load in Load::ALL.map(Load::name) {
            let (ours, theirs) = (
                of("moves", "load", load, Peer::Godwit),
                of("moves", "load", load, peer),
            );
            let name = format!("service gap, {load} / {}", peer.name());
            targets.push(Target::at_most(name, goal, ratio(&ours, &theirs, "gap_ms")));
        }
    }
    for peer in [Peer::VirtioNet, Peer::Testpmd] {
        for workload in Workload::ALL {
            let name = workload.name();
            let (ours, theirs) = (
                of("steady", "workload", name, Peer::Godwit),
                of("steady", "workload", name, peer),
            );
            let figures = match workload.is_stream() {
                true => [
                    ("throughput", "mbps"),
                    ("megabytes per CPU second", "megabytes_per_cpu_second"),
                ],
                false => [
                    ("64-byte packets per second", "packets_per_second"),
                    ("packets per CPU second", "packets_per_cpu_second"),
                ],
            };
            for (what, figure) in figures {
                let name = format!("{what}, {name} / {}", peer.name());
                let mut target = Target::at_least(name, 1.0, ratio(&ours, &theirs, figure));
                target.reported_only = peer == Peer::Testpmd;
                targets.push(target);
            }
        }
    }
    targets
}

/// Draws charts like the paper's Fig. 10 to 17: throughput of the clients and CPU use of the hosts, from each peer's
/// move with the median gap.
fn draw(report: &mut Report) -> io::Result<()> {
    let kinds = [
        ("throughput", "What clients sent and got", "Mbit/s", "mbps"),
        (
            "cpu",
            "QEMU, nodes and back ends at both hosts",
            "% of one processor",
            "cpu_percent",
        ),
    ];
    for load in Load::ALL.map(Load::name) {
        for (file, title, unit, figure) in kinds {
            let peers = report.runs("moves").only("load", load).groups(&["peer"]);
            let lines = peers.iter().filter_map(|runs| {
                let samples = runs.middle("gap_ms")?["timeline"].as_array()?;
                let points = samples
                    .iter()
                    .map(|one| json!([one["seconds"], one[figure]]));
                Some(Line::of_pairs(
                    runs.first("peer").as_str()?,
                    &points.collect(),
                ))
            });
            let title = format!("{title}, {load}");
            let chart = Chart::new(
                &title,
                "seconds since the move began",
                unit,
                lines.collect(),
            );
            chart.add(report, &format!("{load}-{file}.svg"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use godwit_testkit::report::Header;

    use super::*;

    #[test]
    fn ours_is_held_against_each_peer_round_by_round() {
        let mut report = Report::of(Header::default(), Path::new("report.json"));
        report.tables = tables();
        let mut add = |peer: &str, gap: f64, packets: f64, cpu_seconds: f64| {
            for workload in Workload::ALL.map(Workload::name) {
                report.tables[0].runs.push(json!({
                    "peer": peer, "workload": workload, "packets_per_second": packets,
                    "packets_per_cpu_second": packets / cpu_seconds,
                }));
            }
            for load in Load::ALL.map(Load::name) {
                report.tables[1]
                    .runs
                    .push(json!({"peer": peer, "load": load, "gap_ms": gap}));
            }
        };
        add("godwit", 100.0, 100.0, 1.0);
        add("godwit", 200.0, 120.0, 1.0);
        add("virtio-net", 250.0, 100.0, 2.0);
        add("virtio-net", 250.0, 100.0, 2.0);
        let targets = targets(&report);
        let find = |name: &str| {
            let found = targets.iter().find(|target| target.name.starts_with(name));
            found.unwrap_or_else(|| panic!("no target {name}"))
        };
        let near = |target: &Target, value: f64| (target.measured.unwrap() - value).abs() < 1e-9;
        let gap = find("service gap, quiet / virtio-net");
        assert!(!gap.holds && near(gap, 0.6), "{gap}");
        let rate = find("64-byte packets per second, small-in / virtio-net");
        assert!(rate.holds && near(rate, 1.1), "{rate}");
        let cost = find("packets per CPU second, small-out / virtio-net");
        assert!(near(cost, 2.2), "{cost}");
        // A figure that was not measured does not hold.
        let missing = find("service gap, web / failover");
        assert!(!missing.holds && missing.measured.is_none(), "{missing}");
        assert!(find("throughput, stream-in / testpmd").reported_only);
    }
}
