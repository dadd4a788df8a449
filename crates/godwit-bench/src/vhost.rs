//! A disk over vhost-user-blk without a virtual machine: one client, `godwit` and `qemu-storage-daemon` in turns, the
//! same image, in one run. Compares requests per second of the server's CPU, and latency.

use std::io;
use std::time::Duration;

use clap::Args;
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::{Report, Target, ratio};

use crate::common::in_turns;
use crate::serve::{FrontEnd, Kind, Stamps, Workload};
use crate::suite::steady::{FIGURES, KEYS, Turn};

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

const SERVERS: [Kind; 2] = [Kind::Godwit, Kind::StorageDaemon];

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("bench-vhost", &["qemu-storage-daemon"])?;
    report.fact("image_mib", arguments.image_mib);
    report.table("steady", KEYS, FIGURES, "");
    let dir = scratch_dir()?;
    let image = dir.path().join("disk.img");
    let mut stamps = Stamps::create(&image, arguments.image_mib << 20)?;
    let workloads = Workload::all(&[1, 32]);
    in_turns(arguments.rounds, SERVERS.len(), |round, turn| {
        let turn = Turn {
            kind: SERVERS[turn],
            front_end: FrontEnd::VhostUserBlk,
            image: &image,
            dir: dir.path(),
            lasts: Duration::from_secs_f64(arguments.seconds),
            seed: round as u64,
        };
        turn.take(&workloads, &mut stamps, &mut report)
    })?;
    let figures = "iops_per_cpu_second_ratio, iops_ratio, p50_us_ratio";
    report.table("ratios", "rw, depth", figures, "");
    for workload in &workloads {
        let (rw, depth) = (workload.access.name(), workload.depth);
        let runs = report.runs("steady").only("rw", rw).only("depth", depth);
        let [ours, peer] = SERVERS.map(|kind| runs.only("server", kind.name()));
        let of = |figure: &str| ratio(&ours, &peer, figure);
        let [cpu, iops, p50] = ["iops_per_cpu_second", "iops", "p50_us"].map(of);
        report.add("ratios", serde_json::json!({
            "rw": rw, "depth": depth, "iops_per_cpu_second_ratio": cpu, "iops_ratio": iops, "p50_us_ratio": p50,
        }))?;
        let name = format!("{rw} at depth {depth}");
        let per_cpu = format!("{name}: requests per CPU second");
        report.targets.push(Target::at_least(per_cpu, 1.0, cpu));
        if depth == 1 {
            let latency = format!("{name}: median latency");
            report.targets.push(Target::at_most(latency, 1.1, p50));
        }
    }
    report.conclude()
}
