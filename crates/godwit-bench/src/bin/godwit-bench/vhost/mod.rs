//! A disk over vhost-user-blk without a virtual machine: one client, `godwit` and `qemu-storage-daemon` in turns, the
//! same image, in one run. Compares requests per second of the server's CPU, and latency.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use clap::Args;
use godwit_bench::steady::{Access, FrontEnd, Kind, Measured, Server, Stamps, Workload};
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::{median, write_report};
use serde::Serialize;

/// A disk over vhost-user-blk, served by godwit and by qemu-storage-daemon in turn
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of turns of each server
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Size of the image in MiB
    #[arg(long, default_value_t = 1024)]
    image_mib: u64,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

/// `target/bench-vhost/report.json`.
#[derive(Debug, Serialize)]
struct Report {
    image_bytes: u64,
    seconds: f64,
    rounds: usize,
    workloads: Vec<Compared>,
    targets: Vec<Target>,
}

/// One workload: medians of each server's rounds, and of the rounds' ratios.
#[derive(Debug, Serialize)]
struct Compared {
    name: &'static str,
    depth: usize,
    godwit: Summary,
    qemu_storage_daemon: Summary,
    /// Requests per CPU second, godwit over the peer.
    iops_per_cpu_second_ratio: f64,
    /// Requests per second, godwit over the peer.
    iops_ratio: f64,
    /// Median latency, godwit over the peer.
    p50_ratio: f64,
    pairs: Vec<Pair>,
}

#[derive(Debug, Serialize)]
struct Summary {
    iops: f64,
    iops_per_cpu_second: f64,
    p50_us: f64,
    p99_us: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Pair {
    godwit: Measured,
    qemu_storage_daemon: Measured,
}

#[derive(Debug, Serialize)]
struct Target {
    name: String,
    goal: f64,
    value: f64,
    met: bool,
}

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let dir = scratch_dir()?;
    let image = dir.path().join("disk.img");
    let bytes = arguments.image_mib << 20;
    let mut stamps = Stamps::create(&image, bytes)?;
    let workloads = Workload::all(&[1, 32]);
    let seconds = Duration::from_secs_f64(arguments.seconds);
    let mut runs: BTreeMap<(usize, Kind), Vec<Measured>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        let mut turns = [Kind::Godwit, Kind::StorageDaemon];
        if round % 2 == 1 {
            turns.reverse();
        }
        for kind in turns {
            let server = Server::start(kind, FrontEnd::VhostUserBlk, &image, dir.path())?;
            for (index, workload) in workloads.iter().enumerate() {
                let measured = workload.run(&server, &mut stamps, seconds, round as u64)?;
                runs.entry((index, kind)).or_default().push(measured);
            }
            server.stop()?;
            stamps.check_image()?;
            println!(
                "round {} of {}: {}",
                round + 1,
                arguments.rounds,
                kind.name()
            );
        }
    }
    let workloads: Vec<Compared> = workloads
        .iter()
        .enumerate()
        .map(|(index, workload)| {
            compare(
                workload,
                &runs[&(index, Kind::Godwit)],
                &runs[&(index, Kind::StorageDaemon)],
            )
        })
        .collect();
    print(&workloads);
    let targets = targets(&workloads);
    for target in &targets {
        let word = if target.met { "met" } else { "NOT met" };
        println!(
            "{}: {:.2}, goal {:.2}: {word}",
            target.name, target.value, target.goal
        );
    }
    let report = Report {
        image_bytes: bytes,
        seconds: arguments.seconds,
        rounds: arguments.rounds,
        workloads,
        targets,
    };
    println!("{}", write_report("bench-vhost", &report)?.display());
    Ok(())
}

fn compare(workload: &Workload, godwit: &[Measured], peer: &[Measured]) -> Compared {
    let pairs: Vec<Pair> = godwit
        .iter()
        .zip(peer)
        .map(|(&godwit, &qemu_storage_daemon)| Pair {
            godwit,
            qemu_storage_daemon,
        })
        .collect();
    let ratio = |pick: fn(&Measured) -> f64| {
        let ratios = pairs
            .iter()
            .map(|pair| pick(&pair.godwit) / pick(&pair.qemu_storage_daemon));
        median(&ratios.collect::<Vec<_>>())
    };
    Compared {
        name: in_words(workload.access),
        depth: workload.depth,
        godwit: Summary::new(godwit),
        qemu_storage_daemon: Summary::new(peer),
        iops_per_cpu_second_ratio: ratio(Measured::iops_per_cpu_second),
        iops_ratio: ratio(|run| run.iops),
        p50_ratio: ratio(|run| run.p50_us),
        pairs,
    }
}

const fn in_words(access: Access) -> &'static str {
    match access {
        Access::RandomRead => "random read",
        Access::RandomWrite => "random write",
        Access::Read => "sequential read",
        Access::Write => "sequential write",
    }
}

impl Summary {
    fn new(runs: &[Measured]) -> Self {
        let of = |pick: fn(&Measured) -> f64| median(&runs.iter().map(pick).collect::<Vec<_>>());
        Self {
            iops: of(|run| run.iops),
            iops_per_cpu_second: of(Measured::iops_per_cpu_second),
            p50_us: of(|run| run.p50_us),
            p99_us: of(|run| run.p99_us),
        }
    }
}

fn print(workloads: &[Compared]) {
    println!(
        "{:<16} {:>5} {:>10} {:>10} {:>7} {:>12} {:>12} {:>7} {:>9} {:>9} {:>7}",
        "workload",
        "depth",
        "IOPS",
        "peer",
        "ratio",
        "IOPS/CPU s",
        "peer",
        "ratio",
        "p50 µs",
        "peer",
        "ratio"
    );
    for row in workloads {
        let (ours, peer) = (&row.godwit, &row.qemu_storage_daemon);
        println!(
            "{:<16} {:>5} {:>10.0} {:>10.0} {:>7.2} {:>12.0} {:>12.0} {:>7.2} {:>9.1} {:>9.1} {:>7.2}",
            row.name,
            row.depth,
            ours.iops,
            peer.iops,
            row.iops_ratio,
            ours.iops_per_cpu_second,
            peer.iops_per_cpu_second,
            row.iops_per_cpu_second_ratio,
            ours.p50_us,
            peer.p50_us,
            row.p50_ratio
        );
    }
}

fn targets(workloads: &[Compared]) -> Vec<Target> {
    let mut targets = Vec::new();
    for row in workloads {
        let value = row.iops_per_cpu_second_ratio;
        targets.push(Target {
            name: format!(
                "{} at depth {}: requests per CPU second, at least",
                row.name, row.depth
            ),
            goal: 1.0,
            value,
            met: value >= 1.0,
        });
        if row.depth == 1 {
            targets.push(Target {
                name: format!("{} at depth 1: median latency, at most", row.name),
                goal: 1.1,
                value: row.p50_ratio,
                met: row.p50_ratio <= 1.1,
            });
        }
    }
    targets
}
