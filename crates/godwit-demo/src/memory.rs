//! Moves without a copy of memory: virtual machines of different sizes under memory and disk load move between two
//! nodes that map the same memory, while their guests check all reads.

use std::io;

use clap::Args;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryPool, Node};
use godwit_testkit::report::{Report, Runs, Target};
use godwit_testkit::vm::{DirtyPages, GuestLoad, NodeGuest, NodeMachine, PointerChase, VM};
use serde_json::{Value, json};

use crate::vm::{compared, disks_verified, figure};

/// Longest median standstill of the guest's processors on an emulated CPU, in milliseconds.
const BLACKOUT_GOAL: f64 = 50.0;
/// Largest ratio of the largest guest's times to the smallest one's.
const RATIO_GOAL: f64 = 1.3;
/// Milliseconds between two beats of the guest: the resolution of a blackout.
const BEAT_MS: u64 = 2;
const ZERO_COPY: &str = "zero-copy";
const STAY_IN_POOL: &str = "stay-in-pool";

/// Figures of a move. The time is from the request until the guest runs at the destination and the source is free,
/// including the copies of the disks. The blackout of the guest is the largest time between two of its beats by the
/// host's clock; `blackout_ms_qmp` lasts from QEMU's stop at the source to QEMU's start at the destination. The gap of
/// the disk is the largest time between two writes of the guest to the same disk. Bytes over the network are those of
/// memory and devices, without the disks; the mover moves memory to the destination afterwards.
const FIGURES: &str = "total_ms ms, blackout_ms_guest ms, blackout_ms_qmp ms, disk_gap_ms ms, bytes_over_network B, \
    bytes_moved_by_mover B";

/// Moves running virtual machines between two nodes that share memory
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// MiB of memory of each guest
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 4096])]
    guest_mib: Vec<u64>,
    /// Round trips of each guest, for each kind of move
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// MiB of each of the two disks
    #[arg(long, default_value_t = 96)]
    disk_mib: u64,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("demo-memory", &["qemu-system-x86_64"])?;
    report.table("moves", "guest_mib, mode", FIGURES, "");
    // Guests in sequence: for a moment, a guest may have twice as much memory as its size.
    for &guest_mib in &arguments.guest_mib {
        scene(arguments, guest_mib, &mut report)
            .map_err(|error| io::Error::other(format!("guest of {guest_mib} MiB: {error}")))?;
    }
    judge(&mut report);
    report.conclude()
}

/// Computes the medians over all moves, the ratios of the largest guest's to the smallest one's, and the targets.
fn judge(report: &mut Report) {
    let moves = report.runs("moves");
    let of = |mib: Option<f64>| moves.filter(|run| run["guest_mib"].as_f64() == mib);
    let (largest, smallest) = (of(moves.most("guest_mib")), of(moves.least("guest_mib")));
    let ratio = |figure: &str| Some(largest.median(figure)? / smallest.median(figure)?);
    let median = |runs: &Runs<'_>, figure: &str| runs.median(figure);
    let figures = [
        (
            "median_blackout_ms_guest",
            median(&moves, "blackout_ms_guest"),
        ),
        ("median_blackout_ms_qmp", median(&moves, "blackout_ms_qmp")),
        ("total_ms_ratio", ratio("total_ms")),
        ("blackout_ms_qmp_ratio", ratio("blackout_ms_qmp")),
    ];
    let verified = !moves.0.is_empty() && moves.all("verified");
    for (name, value) in figures {
        report.fact(name, value);
    }
    report.targets = vec![
        Target::at_most(
            "median blackout in the guest, ms",
            BLACKOUT_GOAL,
            figures[0].1,
        ),
        Target::at_most(
            "total time, largest guest by smallest",
            RATIO_GOAL,
            figures[2].1,
        ),
    ];
    report.fact("verified", verified);
    report.check(verified, "a move was not verified");
}

/// Starts the machine, moves it there and back in each mode, and lets the guest check everything.
fn scene(arguments: &Arguments, guest_mib: u64, report: &mut Report) -> io::Result<()> {
    let pool = MemoryPool::new()?;
    let cluster = pool.cluster(&["a", "b"], ClusterOptions::release()?)?;
    let guest = start(arguments, guest_mib, &cluster)?;
    for mode in [STAY_IN_POOL, ZERO_COPY] {
        for _ in 0..arguments.rounds {
            for (from, to) in [("a", "b"), ("b", "a")] {
                let mut run = move_once(&guest, cluster.node(from), cluster.node(to), mode)?;
                run["guest_mib"] = guest_mib.into();
                report.add("moves", run)?;
            }
        }
    }
    let a = cluster.node("a");
    // Fails if the guest found an error or a file system is not clean.
    let finished = guest.finish(a)?;
    compared(report, &finished);
    a.godwit(&["vm", "stop", VM, "--force"]).json()?;
    match pool.is_empty()? {
        true => Ok(()),
        false => Err(io::Error::other("the pool is not free again")),
    }
}

/// Starts a guest that uses about half of its memory, and writes to a quarter of its memory again and again.
fn start(arguments: &Arguments, guest_mib: u64, cluster: &Cluster) -> io::Result<NodeGuest> {
    let load = GuestLoad {
        pointer_chase: PointerChase {
            mib: guest_mib / 4,
            percent: 25,
        },
        dirty_pages: DirtyPages {
            mib: guest_mib / 4,
            rate_mib: 64,
        },
        beat_ms: BEAT_MS,
        ..GuestLoad::default()
    };
    let machine = NodeMachine {
        memory_mib: guest_mib,
        memory_pool: Some(MemoryPool::NAME.to_owned()),
        ..NodeMachine::default()
    };
    let disks = (2, arguments.disk_mib);
    let guest = NodeGuest::start_machine(cluster, "a", disks, &load, &machine)?;
    guest.loads_on_memory_work()?;
    Ok(guest)
}

fn move_once(guest: &NodeGuest, from: &Node, to: &Node, mode: &str) -> io::Result<Value> {
    let mut options = vec!["--memory", "zero-copy", "--verify"];
    if mode == STAY_IN_POOL {
        options.push("--stay-in-pool");
    }
    let (shown, gaps) = guest.migrate(from, to.name(), &options)?;
    let mut by_mover = 0;
    if mode == ZERO_COPY {
        let memory = guest.memory_moved(to)?;
        by_mover = local(&memory)?;
        guest.alive()?;
        // The way back is the same, with the memory visible to both nodes.
        to.godwit(&["vm", "memory", VM, "--to", "pool"]).json()?;
        guest.alive()?;
    }
    let seconds = figure(&shown, "total_seconds")?.as_f64();
    Ok(json!({
        "mode": mode, "from": from.name(), "to": to.name(), "total_ms": seconds.map(|seconds| seconds * 1000.0),
        "blackout_ms_guest": gaps.beat_ms, "blackout_ms_qmp": figure(&shown, "blackout_ms")?,
        "disk_gap_ms": gaps.host_ms, "bytes_over_network": figure(&shown, "memory_bytes")?,
        "bytes_moved_by_mover": by_mover, "verified": disks_verified(&shown)?,
    }))
}

/// Returns the bytes moved to the node; fails unless all have moved.
fn local(memory: &Value) -> io::Result<u64> {
    let moved = memory["moving"]["bytes_moved"].as_u64().unwrap_or(0);
    let all = memory["bytes"].as_u64();
    if memory["bytes_in_pool"] == 0 && Some(moved) == all {
        return Ok(moved);
    }
    Err(io::Error::other(format!(
        "not all of the memory followed: {memory}"
    )))
}
