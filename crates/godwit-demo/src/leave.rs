//! A host that must be left at once: a busy disk of 4 GiB is handed over, and the new owner pulls the data while both
//! nodes are killed and started again.
//!
//! The load checks every block on reading. At the end the whole disk is read and compared with all acknowledged writes.

use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::process::wait_for;
use godwit_testkit::report::{Report, step};
use godwit_testkit::scenario::{PATIENCE, finish, import_pattern, load, migrate, verify};
use godwit_testkit::{Cluster, Model, Node, VerifyingClient};

const DISK: &str = "demo";
const SIZE: u64 = 4 << 30;
const SEED: u64 = 7;
/// Longest time for the handover.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Time of pulling before both nodes are killed.
const BEFORE_THE_KILLS: Duration = Duration::from_millis(500);
/// Answered requests by which the load shows that it goes on.
const GOES_ON: u64 = 500;

pub(crate) fn play() -> io::Result<()> {
    let mut report = Report::new("demo-leave", &[])?;
    step("starting two nodes with certificates of their own");
    let mut cluster = Cluster::start_with(&["a", "b"], ClusterOptions::release()?)?;
    step("making a disk of 4 GiB at node a, full of data, and a load that checks what it reads");
    let model = import_pattern(cluster.node("a"), DISK, SIZE, SEED)?;
    let client = load(cluster.node("a"), DISK, SEED, model)?;
    going_on(&client)?;
    let owned = hand_over(&cluster, &mut report)?;
    std::thread::sleep(BEFORE_THE_KILLS);
    let model = kill_both(&mut cluster, client, &mut report)?;

    step("going on with the load at node b while it pulls the rest");
    let client = load(cluster.node("b"), DISK, SEED + 1, model)?;
    let whole = pulled(&cluster)?;
    // The downtime of both nodes is part of it.
    report.fact(
        "source_needed_seconds",
        whole.duration_since(owned).as_secs_f64(),
    );
    report.fact("requests_before_whole", client.stats().completed);
    going_on(&client)?;
    let mut model = finish(client).map_err(io::Error::other)?;

    step("stopping node a for good, and reading all of the disk at node b");
    cluster.node_mut("a").terminate(Duration::from_secs(20))?;
    let verified = verify(cluster.node("b"), DISK, &mut model);
    let bytes = verified.as_ref().map_or(0, |found| found.sectors * 512);
    report.fact("verified_bytes", bytes);
    report.fact("verified", bytes == SIZE);
    report.problems.extend(verified.err());
    report.conclude()
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

/// Hands the disk over to node b. Returns the time at which node b owned the disk.
fn hand_over(cluster: &Cluster, report: &mut Report) -> io::Result<Instant> {
    step("godwit migrate demo --to b --policy post-copy");
    let left = Instant::now();
    let moved = migrate(cluster.node("a"), DISK, "b", &["--policy", "post-copy"])?;
    let handed_over = left.elapsed();
    if moved["phase"] != "completed" {
        return Err(io::Error::other(format!("the disk did not move: {moved}")));
    }
    let seconds = handed_over.as_secs_f64();
    let shown = cluster.node("b").disk(DISK)?;
    let status = shown["status"].as_str().unwrap_or_default();
    step(&format!("after {seconds:.2} s: node b: {status}"));
    report.fact("handed_over_seconds", seconds);
    report.fact("missing_bytes_at_handover", missing(cluster.node("b")));
    report.check(shown["serves"] == true, "node b does not serve the disk");
    report.check(
        handed_over <= AT_ONCE,
        format!("handing the disk over took {seconds:.2} s"),
    );
    Ok(left + handed_over)
}

/// Kills both nodes under the load, and starts them again.
fn kill_both(
    cluster: &mut Cluster,
    client: VerifyingClient,
    report: &mut Report,
) -> io::Result<Model> {
    let missing = missing(cluster.node("b"));
    report.fact("missing_bytes_at_kills", missing);
    report.check(
        missing > 0,
        "all of it had come before the nodes were killed",
    );
    step(&format!(
        "killing both nodes with {missing} bytes left, and starting them again"
    ));
    cluster.node_mut("b").kill();
    cluster.node_mut("a").kill();
    let noticed = client.wait_disconnected(PATIENCE);
    report.check(noticed, "the load did not notice that its node was killed");
    let model = client.stop(PATIENCE).clean().map_err(io::Error::other)?;
    cluster.node_mut("b").start(&[])?;
    cluster.node_mut("a").start(&[])?;
    Ok(model)
}

/// Waits until node b has all of the disk and node a knows so. Returns the time.
fn pulled(cluster: &Cluster) -> io::Result<Instant> {
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
    whole.ok_or_else(|| io::Error::other("node b never has all of the disk"))
}
