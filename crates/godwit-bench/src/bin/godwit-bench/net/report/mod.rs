//! The output of a run: `target/bench-net/report.json` and charts beside it.

mod charts;
mod targets;

use std::io;

use godwit_bench::environment::{self, Environment};
use godwit_testkit::process::target_dir;
use godwit_testkit::report::{median, write_report};
use serde::Serialize;

use crate::net::loads::Load;
use crate::net::loads::iperf::Workload;
use crate::net::measure::{Moved, Steady};
use crate::net::options::Options;
use crate::net::peers::Peer;
use targets::Target;

/// Programs beside `godwit` whose versions the report tells.
const PROGRAMS: [&str; 2] = ["qemu-system-x86_64", "iperf3"];

/// The runs of one peer, round by round.
#[derive(Debug)]
pub(crate) struct PeerRuns {
    pub(crate) peer: Peer,
    /// Runs of each round, with workloads in the order of [`Workload::ALL`].
    pub(crate) steady: Vec<Vec<Steady>>,
    /// Moves of each round, with loads in the order of [`Load::ALL`].
    pub(crate) moves: Vec<Vec<Moved>>,
}

/// A peer that did not take part.
#[derive(Debug, Serialize)]
pub(crate) struct LeftOut {
    pub(crate) peer: &'static str,
    pub(crate) reason: String,
}

/// The whole report.
#[derive(Debug, Serialize)]
struct Report {
    quick: bool,
    environment: Environment,
    rounds: usize,
    /// Seconds of each measurement under steady load.
    seconds: u64,
    left_out: Vec<LeftOut>,
    targets: Vec<Target>,
    peers: Vec<PeerReport>,
}

#[derive(Debug, Serialize)]
struct PeerReport {
    name: &'static str,
    steady: Vec<SteadyReport>,
    moves: Vec<MovesReport>,
}

/// A figure over the rounds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figure {
    median: f64,
    least: f64,
    most: f64,
}

#[derive(Debug, Serialize)]
struct SteadyReport {
    workload: Workload,
    mbps: Figure,
    retransmits: Option<Figure>,
    packets_per_second: Figure,
    packets_per_cpu_second: Figure,
    megabytes_per_cpu_second: Figure,
    runs: Vec<Steady>,
}

#[derive(Debug, Serialize)]
struct MovesReport {
    load: Load,
    gap_ms: Figure,
    longest_wait_ms: Figure,
    ping_gap_ms: Figure,
    pings_lost: Figure,
    retransmits: Figure,
    /// Blackout of the moves for which the node knows it.
    blackout_ms: Option<Figure>,
    seconds: Figure,
    cpu_seconds: Figure,
    runs: Vec<Moved>,
}

impl PeerRuns {
    pub(crate) const fn new(peer: Peer) -> Self {
        Self {
            peer,
            steady: Vec::new(),
            moves: Vec::new(),
        }
    }

    /// Returns all runs of one workload.
    fn of_workload(&self, workload: Workload) -> Vec<Steady> {
        let runs = self.steady.iter().flatten();
        runs.filter(|run| run.workload == workload)
            .copied()
            .collect()
    }

    /// Returns all moves under one load.
    fn of_load(&self, load: Load) -> Vec<&Moved> {
        let moves = self.moves.iter().flatten();
        moves.filter(|moved| moved.load == load).collect()
    }
}

impl Figure {
    /// Returns the figure of `values`; `None` if there are none.
    fn of(values: &[f64]) -> Option<Self> {
        (!values.is_empty()).then(|| Self {
            median: median(values),
            least: values.iter().copied().fold(f64::MAX, f64::min),
            most: values.iter().copied().fold(f64::MIN, f64::max),
        })
    }
}

/// Judges a run, writes its report and charts, and prints the result.
///
/// # Errors
/// I/O errors of the files.
pub(crate) fn conclude(
    options: &Options,
    peers: &[PeerRuns],
    left_out: Vec<LeftOut>,
) -> io::Result<()> {
    let report = Report {
        quick: options.quick,
        environment: environment::read(&target_dir(), &PROGRAMS)?,
        rounds: options.rounds(),
        seconds: options.seconds(),
        left_out,
        targets: targets::judge(peers),
        peers: peers.iter().map(PeerReport::new).collect(),
    };
    for target in &report.targets {
        println!("{target}");
    }
    let path = write_report("bench-net", &report)?;
    for chart in charts::draw(peers, &target_dir().join("bench-net"))? {
        println!("{}", chart.display());
    }
    println!("{}", path.display());
    Ok(())
}

impl PeerReport {
    fn new(runs: &PeerRuns) -> Self {
        let steady = Workload::ALL.into_iter().filter_map(|workload| {
            let runs = runs.of_workload(workload);
            let of =
                |pick: fn(&Steady) -> f64| Figure::of(&runs.iter().map(pick).collect::<Vec<_>>());
            let retransmits: Vec<f64> = runs
                .iter()
                .filter_map(|run| run.retransmits.map(|count| count as f64))
                .collect();
            Some(SteadyReport {
                workload,
                mbps: of(|run| run.mbps)?,
                retransmits: Figure::of(&retransmits),
                packets_per_second: of(|run| run.packets_per_second)?,
                packets_per_cpu_second: of(|run| run.packets_per_cpu_second)?,
                megabytes_per_cpu_second: of(|run| run.megabytes_per_cpu_second)?,
                runs,
            })
        });
        let moves = Load::ALL.into_iter().filter_map(|load| {
            let runs = runs.of_load(load);
            let of = |pick: fn(&Moved) -> f64| {
                Figure::of(&runs.iter().map(|run| pick(run)).collect::<Vec<_>>())
            };
            let blackouts: Vec<f64> = runs.iter().filter_map(|run| run.blackout_ms).collect();
            Some(MovesReport {
                load,
                gap_ms: of(|run| run.gap_ms)?,
                longest_wait_ms: of(|run| run.longest_wait_ms)?,
                ping_gap_ms: of(|run| run.ping_gap_ms)?,
                pings_lost: of(|run| run.pings_lost as f64)?,
                retransmits: of(|run| run.retransmits as f64)?,
                blackout_ms: Figure::of(&blackouts),
                seconds: of(|run| run.seconds)?,
                cpu_seconds: of(|run| run.cpu_seconds)?,
                runs: runs.into_iter().cloned().collect(),
            })
        });
        Self {
            name: runs.peer.name(),
            steady: steady.collect(),
            moves: moves.collect(),
        }
    }
}
