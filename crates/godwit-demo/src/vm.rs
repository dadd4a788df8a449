//! A move of a whole machine: QEMU, as the distribution builds it, runs a Linux guest on disks of a node, and the
//! machine moves from node to node while the guest works and checks.

use std::io;

use clap::Args;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::report::{Report, Target};
use godwit_testkit::vm::{Finished, GuestLoad, NodeGuest};
use serde_json::{Value, json};

/// Longest median blackout of the guest on an emulated CPU, in milliseconds.
const BLACKOUT_GOAL: f64 = 300.0;
/// Longest median part of the blackout in which disks change hands.
const SWITCHOVER_GOAL: f64 = 10.0;
/// Modes of memory moves.
const MEMORY_MODES: [&str; 3] = ["pre-copy", "post-copy", "hybrid"];

/// Figures of a move. The blackout of the guest is the largest gap between two of its writes by the host's clock; the
/// gap by the guest's clock, which stands still with the machine, is that of the disk alone. `blackout_ms_qmp` lasts
/// from QEMU's stop at the source to QEMU's start at the destination, and the disks change hands in `switchover_ms` of
/// it.
const FIGURES: &str = "total_seconds s, blackout_ms_guest ms, gap_ms_guest_clock ms, blackout_ms_qmp ms, switchover_ms \
    ms, disk_bytes B, memory_bytes B";

/// Moves a running virtual machine between two nodes
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of moves
    #[arg(long, default_value_t = 3)]
    moves: usize,
    /// Only with this many disks, instead of one and two
    #[arg(long)]
    disks: Option<usize>,
    /// Only this way of moving memory: pre-copy, post-copy or hybrid
    #[arg(long)]
    memory: Option<String>,
    /// MiB of each disk
    #[arg(long, default_value_t = 256)]
    disk_mib: u64,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("demo-vm", &["qemu-system-x86_64"])?;
    report.table("moves", "disks, memory", FIGURES, "");
    for (disks, memory) in scenes(arguments) {
        scene(arguments, disks, &memory, &mut report).map_err(|error| {
            io::Error::other(format!("{disks} disks, {memory} memory: {error}"))
        })?;
    }
    let moves = report.runs("moves");
    let verified = !moves.0.is_empty() && moves.all("verified");
    report.targets = vec![
        Target::at_most(
            "median blackout in the guest, ms",
            BLACKOUT_GOAL,
            moves.median("blackout_ms_guest"),
        ),
        Target::at_most(
            "median time in which disks change hands, ms",
            SWITCHOVER_GOAL,
            moves.median("switchover_ms"),
        ),
    ];
    report.fact("verified", verified);
    report.check(verified, "a move was not verified");
    report.conclude()
}

/// Returns numbers of disks and memory modes: one disk with the default mode, then two disks with each mode.
fn scenes(arguments: &Arguments) -> Vec<(usize, String)> {
    let modes: Vec<String> = match &arguments.memory {
        Some(mode) => vec![mode.clone()],
        None => MEMORY_MODES.map(str::to_owned).to_vec(),
    };
    let disks = arguments.disks.unwrap_or(2);
    let first = arguments.disks.is_none().then(|| (1, modes[0].clone()));
    let all = modes.into_iter().map(|mode| (disks, mode));
    first.into_iter().chain(all).collect()
}

/// Starts the machine, moves it there and back, and lets the guest check everything.
fn scene(arguments: &Arguments, disks: usize, memory: &str, report: &mut Report) -> io::Result<()> {
    let cluster = Cluster::start_with(&["a", "b"], ClusterOptions::release()?)?;
    let load = GuestLoad::default();
    let guest = NodeGuest::start(&cluster, "a", disks, arguments.disk_mib, &load)?;
    let (mut from, mut to) = ("a", "b");
    for _ in 0..arguments.moves {
        let options = ["--memory", memory, "--verify"];
        let (shown, gaps) = guest.migrate(cluster.node(from), to, &options)?;
        let mut run = json!({
            "disks": disks, "memory": memory, "from": from, "to": to, "blackout_ms_guest": gaps.host_ms,
            "gap_ms_guest_clock": gaps.guest_ms, "verified": disks_verified(&shown)?,
            "blackout_ms_qmp": figure(&shown, "blackout_ms")?,
        });
        for name in [
            "total_seconds",
            "switchover_ms",
            "disk_bytes",
            "memory_bytes",
        ] {
            run[name] = figure(&shown, name)?;
        }
        report.add("moves", run)?;
        (from, to) = (to, from);
    }
    // Fails if the guest found an error or a file system is not clean.
    let finished = guest.finish(cluster.node(from))?;
    compared(report, &finished);
    Ok(())
}

/// Reports the errors that a guest has found in the end, when it compared everything.
pub(crate) fn compared(report: &mut Report, finished: &Finished) {
    let before = report.known("guest_errors").as_u64().unwrap_or_default();
    report.fact(
        "guest_errors",
        before + finished.errors + finished.mismatches,
    );
    println!(
        "the guest made {} writes and compared everything",
        finished.writes
    );
}

/// Returns a figure of a migration as the source shows it.
pub(crate) fn figure(shown: &Value, name: &str) -> io::Result<Value> {
    match &shown[name] {
        Value::Number(number) => Ok(Value::Number(number.clone())),
        _ => Err(io::Error::other(format!("no {name} in {shown}"))),
    }
}

/// Returns true if the nodes compared every disk of the migration.
pub(crate) fn disks_verified(shown: &Value) -> io::Result<bool> {
    let disks = shown["disks"].as_array();
    let disks = disks.ok_or_else(|| io::Error::other(format!("no disks in {shown}")))?;
    Ok(!disks.is_empty() && disks.iter().all(|disk| disk["verified"] == true))
}
