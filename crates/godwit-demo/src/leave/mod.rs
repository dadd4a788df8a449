//! A host that must be left at once: a busy disk of 4 GiB is handed over, and the new owner pulls the data while both
//! nodes are killed and started again.
//!
//! The load checks every block on reading. At the end the whole disk is read and compared with all acknowledged writes.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use godwit_testkit::cluster::{ClusterOptions, release_binary};
use godwit_testkit::process::wait_for;
use godwit_testkit::report::write_report;
use godwit_testkit::scenario::{PATIENCE, finish, import_pattern, load, migrate, verify};
use godwit_testkit::{Cluster, Node, VerifyingClient};
use serde::Serialize;

use crate::tell;

const DISK: &str = "demo";
const SIZE: u64 = 4 << 30;
const SEED: u64 = 7;
/// Longest time for the handover.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Time of pulling before both nodes are killed.
const BEFORE_THE_KILLS: Duration = Duration::from_millis(500);
/// Answered requests by which the load shows that it goes on.
const GOES_ON: u64 = 500;

#[derive(Debug, Serialize)]
struct Report {
    /// Time from the command until the disk is served at the other node.
    handed_over_seconds: f64,
    /// Bytes still at the source at the handover.
    missing_bytes_at_handover: u64,
    /// Bytes still at the source when both nodes were killed.
    missing_bytes_at_kills: u64,
    /// Time for which the source was needed after the switchover, including the downtime of both nodes.
    source_needed_seconds: f64,
    /// Requests answered at the new owner before the whole disk was there.
    requests_before_whole: u64,
    /// True if the whole disk was read at the end, with every acknowledged write.
    verified: bool,
    /// Bytes verified.
    verified_bytes: u64,
    problems: Vec<String>,
}

pub(crate) fn play() -> ExitCode {
    tell(demo())
}

fn step(what: &str) {
    println!("• {what}");
}

fn missing(node: &Node) -> u64 {
    let shown = node.disk(DISK).ok();
    shown.map_or(0, |disk| disk["missing_bytes"].as_u64().unwrap_or(0))
}

fn going_on(client: &VerifyingClient) -> io::Result<()> {
    match client.progress(GOES_ON, PATIENCE) {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "the load stands still: {:?}",
            client.stats()
        ))),
    }
}

fn demo() -> io::Result<Vec<String>> {
    let options = ClusterOptions {
        godwit: release_binary()?,
        tls: true,
    };
    step("starting two nodes with certificates of their own");
    let mut cluster = Cluster::start_with(&["a", "b"], options)?;
    step("making a disk of 4 GiB at node a, full of data, and a load that checks what it reads");
    let model = import_pattern(cluster.node("a"), DISK, SIZE, SEED)?;
    let client = load(cluster.node("a"), DISK, SEED, model)?;
    going_on(&client)?;

    step("godwit migrate demo --to b --policy post-copy");
    let left = Instant::now();
    let moved = migrate(cluster.node("a"), DISK, "b", &["--policy", "post-copy"])?;
    let handed_over = left.elapsed();
    if moved["phase"] != "completed" {
        return Err(io::Error::other(format!("the disk did not move: {moved}")));
    }
    let (missing_at_handover, serves) = {
        let shown = cluster.node("b").disk(DISK)?;
        let status = shown["status"].as_str().unwrap_or_default();
        step(&format!(
            "after {:.2} s: node b: {status}",
            handed_over.as_secs_f64()
        ));
        (missing(cluster.node("b")), shown["serves"] == true)
    };
    let mut problems = Vec::new();
    if !serves {
        problems.push(String::from("node b does not serve the disk"));
    }
    if handed_over > AT_ONCE {
        problems.push(format!(
            "handing the disk over took {:.2} s",
            handed_over.as_secs_f64()
        ));
    }
    std::thread::sleep(BEFORE_THE_KILLS);
    let missing_at_kills = missing(cluster.node("b"));
    if missing_at_kills == 0 {
        problems.push(String::from(
            "all of it had come before the nodes were killed",
        ));
    }
    step(&format!(
        "killing both nodes with {missing_at_kills} bytes left, and starting them again"
    ));
    cluster.node_mut("b").kill();
    cluster.node_mut("a").kill();
    if !client.wait_disconnected(PATIENCE) {
        problems.push(String::from(
            "the load did not notice that its node was killed",
        ));
    }
    let model = client.stop(PATIENCE).clean().map_err(io::Error::other)?;
    cluster.node_mut("b").start(&[])?;
    cluster.node_mut("a").start(&[])?;

    step("going on with the load at node b while it pulls the rest");
    let client = load(cluster.node("b"), DISK, SEED + 1, model)?;
    let mut last = u64::MAX;
    let whole = wait_for(PATIENCE * 5, || {
        let now = missing(cluster.node("b"));
        if now / (512 << 20) != last / (512 << 20) {
            println!("  {:>5} MiB still at node a", now >> 20);
            last = now;
        }
        let paid = cluster.node("a").disk(DISK).ok()?["owes"] == false;
        (now == 0 && paid).then(Instant::now)
    });
    let Some(whole) = whole else {
        return Err(io::Error::other("node b never has all of the disk"));
    };
    let needed = whole.duration_since(left + handed_over);
    let requests_before_whole = client.stats().completed;
    going_on(&client)?;
    let mut model = finish(client).map_err(io::Error::other)?;

    step("stopping node a for good, and reading all of the disk at node b");
    cluster.node_mut("a").terminate(Duration::from_secs(20))?;
    let verified = verify(cluster.node("b"), DISK, &mut model);
    let verified_bytes = verified.as_ref().map_or(0, |found| found.sectors * 512);
    problems.extend(verified.err());
    let report = Report {
        handed_over_seconds: handed_over.as_secs_f64(),
        missing_bytes_at_handover: missing_at_handover,
        missing_bytes_at_kills: missing_at_kills,
        source_needed_seconds: needed.as_secs_f64(),
        requests_before_whole,
        verified: verified_bytes == SIZE,
        verified_bytes,
        problems,
    };
    println!(
        "\n  handed over after {:.2} s; the source was needed for {:.1} s more, of which both nodes were \
         down for a part; {} bytes verified",
        report.handed_over_seconds, report.source_needed_seconds, report.verified_bytes
    );
    println!("\n  {}", write_report("demo-leave", &report)?.display());
    Ok(report.problems)
}
