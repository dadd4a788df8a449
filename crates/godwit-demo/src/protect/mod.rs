//! A machine that survives its hosts: a second node protects the machine, a third one is the witness, and the host of the
//! machine dies again and again. The guest writes checked records to its disks, and looks for them after each boot.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::process::{end_machines_of, wait_for};
use godwit_testkit::report::{Report, Target, step};
use godwit_testkit::scenario::PATIENCE;
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM};
use godwit_testkit::{Cluster, Node};
use serde_json::json;

/// Longest median time from the death of the host to the start of the machine at the other node, in milliseconds.
const OUTAGE_GOAL: f64 = 10_000.0;
/// Longest boot on an emulated processor.
const BOOTS: Duration = Duration::from_secs(180);
/// Records that the guest writes before each death and after each boot.
const RECORDS: u64 = 100;
/// Time between two looks at a machine.
const LOOK: Duration = Duration::from_millis(20);

/// Figures of a failover: from the death of node and QEMU to the start of QEMU at the other node, and from there to the
/// guest's own report that it has booted. A lost record was acknowledged before the death, and is not there after it.
const FIGURES: &str = "outage_ms ms, boot_ms ms, lost records";

/// Kills the host of a protected machine, again and again
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of deaths
    #[arg(long, default_value_t = 4)]
    failovers: usize,
    /// MiB of each of the machine's two disks
    #[arg(long, default_value_t = 64)]
    disk_mib: u64,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("demo-protect", &["qemu-system-x86_64"])?;
    report.table("failovers", "from, to", FIGURES, "");
    step("starting two nodes and their witness, and a machine at node a");
    let mut cluster = Cluster::start_with(&["a", "b", "c"], ClusterOptions::release()?)?;
    let load = GuestLoad {
        file_mb: 4,
        memory_mb: 0,
        reboots: true,
        ..GuestLoad::default()
    };
    let guest = NodeGuest::start(&cluster, "a", 2, arguments.disk_mib, &load)?;
    let (mut from, mut to) = ("a", "b");
    let witnessed = ["--restart", "--witness", "node:c"];
    let command = [&["vm", "protect", VM, "--to", to], &witnessed[..]].concat();
    let protected = cluster.node(from).godwit(&command).json();
    protected.map_err(io::Error::other)?;
    for death in 1..=arguments.failovers {
        comes_to(cluster.node(from), "protected")?;
        comes_to(cluster.node(to), "protected")?;
        guest.console.progress(RECORDS, PATIENCE)?;
        step(&format!("killing node {from} and its QEMU"));
        let died = Instant::now();
        cluster.node_mut(from).kill();
        end_machines_of(&cluster.node(from).spec().dir);
        let node = cluster.node(to);
        let runs = wait_for(PATIENCE, || {
            std::thread::sleep(LOOK);
            (node.vm_state(VM) == "running").then(Instant::now)
        });
        let runs = runs.ok_or_else(|| failed(node, "does not run the machine"))?;
        guest.console.booted_again(death, BOOTS)?;
        let booted = Instant::now();
        guest.console.progress(RECORDS, PATIENCE)?;
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let run = json!({
            "from": from, "to": to, "lost": guest.console.lost_writes(),
            "outage_ms": milliseconds(runs - died), "boot_ms": milliseconds(booted - runs),
        });
        report.add("failovers", run)?;
        cluster.node_mut(from).start(&[])?;
        (from, to) = (to, from);
    }
    comes_to(cluster.node(from), "protected")?;
    let unprotected = cluster.node(from).godwit(&["vm", "unprotect", VM]).text();
    unprotected.map_err(io::Error::other)?;
    let lost = guest.console.lost_writes();
    // Fails if the guest found an error or a file system is not clean.
    let finished = guest.finish(cluster.node(from))?;
    crate::vm::compared(&mut report, &finished);
    report.fact("lost", lost);
    report.check(lost == 0, "an acknowledged record is lost");
    let failovers = report.runs("failovers");
    report.targets = vec![Target::at_most(
        "median time until the machine runs at the other node, ms",
        OUTAGE_GOAL,
        failovers.median("outage_ms"),
    )];
    report.conclude()
}

/// Waits until the node shows the machine's protection in this state.
fn comes_to(node: &Node, state: &str) -> io::Result<()> {
    let reached = || (node.vm(VM)["protection"]["state"] == state).then_some(());
    wait_for(PATIENCE, reached).ok_or_else(|| failed(node, &format!("does not come to {state}")))
}

fn failed(node: &Node, what: &str) -> io::Error {
    let (name, shown) = (node.name(), node.vm(VM));
    io::Error::other(format!(
        "node {name} {what}: {shown}\n{}",
        node.log_tail(30)
    ))
}
