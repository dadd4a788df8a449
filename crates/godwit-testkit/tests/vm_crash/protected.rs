//! Protected machines: the backup starts the machine when the primary dies, and no acknowledged write is missing.

use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::client::RawImage;
use godwit_testkit::cluster::StandsStill;
use godwit_testkit::image::first_difference;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, until};
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM};
use rustix::process::Signal;
use serde_json::Value;

use super::site::send;

const DISK_MIB: u64 = 128;
/// An emulated processor of a busy host boots in a third of this.
const BOOTS: Duration = Duration::from_secs(120);
/// Longest time from the death of the primary to the start of the machine at the backup.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);
/// Time for which a machine is watched.
const WATCHED: u64 = 20;

fn guest(cluster: &Cluster, seed: u64) -> NodeGuest {
    let load = GuestLoad {
        file_mb: 4,
        memory_mb: 0,
        reboots: true,
        ..GuestLoad::seeded(seed)
    };
    NodeGuest::start(cluster, "a", 2, DISK_MIB, &load).expect("a guest")
}

fn state(cluster: &Cluster, node: &str) -> String {
    let shown = cluster.node(node).vm(VM);
    shown["protection"]["state"]
        .as_str()
        .unwrap_or("none")
        .to_owned()
}

#[track_caller]
fn comes_to(cluster: &Cluster, node: &str, wanted: &str) {
    let reached = wait_for(PATIENCE, || (state(cluster, node) == wanted).then_some(()));
    reached.unwrap_or_else(|| {
        panic!(
            "at {node} it is not {wanted}: {}\n{}",
            cluster.node(node).vm(VM),
            cluster.node(node).log_tail(30)
        )
    });
}

/// Protects the machine, and checks the refusals.
fn protect(cluster: &Cluster, how: &[&str]) {
    let a = cluster.node("a");
    let command = [&["vm", "protect", VM, "--to", "b", "--restart"], how].concat();
    let shown = a.json(&command);
    assert_eq!(shown["protection"]["state"], "protected", "{shown}");
    comes_to(cluster, "b", "protected");
    assert_eq!(cluster.node("b").vm_state(VM), "backup");
}

#[test]
fn the_backup_starts_a_machine_whose_host_dies_and_no_write_is_missing() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b"]);
    let guest = guest(&cluster, turn.seed);
    let a = cluster.node("a");
    a.refuses(
        &["vm", "protect", VM, "--to", "b", "--restart"],
        &["--when-alone stop", "runs twice"],
    );
    a.refuses(
        &[
            "vm",
            "protect",
            VM,
            "--to",
            "x",
            "--restart",
            "--when-alone",
            "stop",
        ],
        &["no peer named"],
    );
    protect(&cluster, &["--when-alone", "continue"]);
    let a = cluster.node("a");
    let ended = ["end the protection first: godwit vm unprotect"];
    a.refuses(&["migrate", &format!("vm/{VM}"), "--to", "b"], &ended);
    a.refuses(&["disk", "resize", "disk0", "64MiB"], &ended);
    a.refuses(
        &[
            "vm",
            "protect",
            VM,
            "--to",
            "b",
            "--restart",
            "--when-alone",
            "stop",
        ],
        &ended,
    );
    guest.console.progress(WATCHED, PATIENCE).unwrap();

    let died = Instant::now();
    let qemus = cluster.node("a").qemus();
    cluster.node_mut("a").kill();
    qemus.into_iter().for_each(|qemu| send(qemu, Signal::KILL));
    cluster.node("b").vm_comes_to(VM, "running");
    let took = died.elapsed();
    println!("it runs at the backup after {took:?}");
    assert!(took < TAKEN_WITHIN, "after {took:?}");
    guest.console.booted_again(1, BOOTS).unwrap();
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    assert_eq!(guest.console.lost_writes(), 0);

    // The old primary comes back as the backup.
    cluster.node_mut("a").start(&[]).unwrap();
    comes_to(&cluster, "b", "protected");
    assert_eq!(cluster.node("a").vm_state(VM), "backup");
    let disks = guest.disks().to_vec();
    disks
        .iter()
        .for_each(|it| returned_by_its_log(&cluster, it));
    guest.finish(cluster.node("b")).unwrap();
    let same = || disks.iter().all(|it| is_same(&cluster, it));
    until("the disks are the same at both nodes", same);
    cluster.node("b").text(&["vm", "unprotect", VM]);
    until("the backup forgets the machine", || {
        state(&cluster, "a") == "none"
    });
}

/// Checks that only a small part of a disk was sent to the old primary, and nothing was compared.
fn returned_by_its_log(cluster: &Cluster, disk: &str) {
    let moves = cluster.node("b").json(&["migration", "list"]);
    let of_disk = |it: &&Value| it["disk"] == disk && it["from"] == "b";
    let back = moves.as_array().and_then(|all| all.iter().find(of_disk));
    let progress = &back.expect("a synchronization")["progress"];
    println!("{disk}: {progress}");
    assert_eq!(progress["delta"]["by"], "written", "{moves}");
    let skipped = progress["delta"]["bytes_skipped"].as_u64();
    assert!(skipped > Some((DISK_MIB << 20) / 2), "{moves}");
}

/// Returns true if the images of a disk have the same content.
fn is_same(cluster: &Cluster, disk: &str) -> bool {
    let image = |node: &str| RawImage::open(&cluster.node(node).image(disk).unwrap()).unwrap();
    let (mut ours, mut theirs) = (image("a"), image("b"));
    let differs = first_difference(&mut ours, &mut theirs, 0..DISK_MIB << 20);
    differs.unwrap().is_none()
}

#[test]
fn a_protected_machine_goes_on_without_its_backup_and_without_its_node() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b", "c"]);
    let guest = guest(&cluster, turn.seed);
    protect(&cluster, &["--witness", "node:c"]);
    let qemu = cluster.node("a").qemu();

    cluster.node_mut("b").kill();
    guest.console.mark(PATIENCE).unwrap();
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    comes_to(&cluster, "a", "alone");
    cluster.node_mut("b").start(&[]).unwrap();
    comes_to(&cluster, "a", "protected");

    cluster.die_and_start("a");
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    comes_to(&cluster, "a", "protected");
    assert_eq!(cluster.node("a").qemu(), qemu, "the same machine goes on");
    println!("the guest waited {:?} at most", guest.console.host_gap());
    cluster.node("a").text(&["vm", "unprotect", VM]);
    guest.finish(cluster.node("a")).unwrap();
}

/// Kills a protected machine's host, and the backup at a point of its takeover; the backup's node then starts again.
fn both_die(point: &str) -> (Scenario, Cluster, NodeGuest) {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b", "c"]);
    cluster.node_mut("b").restart(&[(point, "pause")]);
    let guest = guest(&cluster, turn.seed);
    protect(&cluster, &["--witness", "node:c"]);
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    let qemus = cluster.node("a").qemus();
    cluster.node_mut("a").kill();
    qemus.into_iter().for_each(|qemu| send(qemu, Signal::KILL));
    cluster.node("b").reaches(point);
    cluster.die_and_start("b");
    (turn, cluster, guest)
}

/// Checks that the machine starts at a node without a lost write, and is protected again.
fn goes_on(cluster: &Cluster, guest: NodeGuest, at: &str) {
    cluster.node(at).vm_comes_to(VM, "running");
    guest.console.booted_again(1, BOOTS).unwrap();
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    assert_eq!(guest.console.lost_writes(), 0);
    comes_to(cluster, at, "protected");
    cluster.node(at).text(&["vm", "unprotect", VM]);
    guest.finish(cluster.node(at)).unwrap();
}

#[test]
fn a_backup_that_has_taken_the_machine_starts_it_after_its_own_death() {
    let (_turn, mut cluster, guest) = both_die("persist::after::group");
    cluster.node("b").vm_comes_to(VM, "running");
    cluster.node_mut("a").start(&[]).unwrap();
    goes_on(&cluster, guest, "b");
}

#[test]
fn a_backup_that_dies_before_it_has_taken_the_machine_gives_it_back() {
    let (_turn, mut cluster, guest) = both_die("persist::before::group");
    cluster.node_mut("a").start(&[]).unwrap();
    goes_on(&cluster, guest, "a");
}

#[test]
#[ignore = "slow: a guest boots twice"]
fn the_backup_starts_a_machine_only_once_its_dead_witness_is_back() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b", "c"]);
    let guest = guest(&cluster, turn.seed);
    protect(&cluster, &["--witness", "node:c"]);
    cluster.node_mut("c").kill();
    until("the machine's node tells of the witness", || {
        let shown = cluster.node("a").vm(VM);
        shown["protection"]["problem"]
            .to_string()
            .contains("the witness cannot be asked")
    });
    guest.console.mark(PATIENCE).unwrap();
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    let qemus = cluster.node("a").qemus();
    cluster.node_mut("a").kill();
    qemus.into_iter().for_each(|qemu| send(qemu, Signal::KILL));
    comes_to(&cluster, "b", "severed");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(cluster.node("b").vm_state(VM), "backup");
    cluster.node_mut("c").start(&[]).unwrap();
    cluster.node("b").vm_comes_to(VM, "running");
    cluster.node_mut("a").start(&[]).unwrap();
    goes_on(&cluster, guest, "b");
}

#[test]
#[ignore = "slow: a backup is away for long"]
fn a_machine_that_waited_long_for_its_backup_goes_on() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let guest = guest(&cluster, turn.seed);
    protect(&cluster, &["--when-alone", "stop"]);
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    let stopped = StandsStill::new(cluster.node("b"));
    comes_to(&cluster, "a", "severed");
    // Longer than a node waits for an answer of QEMU.
    std::thread::sleep(Duration::from_secs(15));
    drop(stopped);
    comes_to(&cluster, "a", "protected");
    guest.console.mark(PATIENCE).unwrap();
    guest.console.progress(WATCHED, PATIENCE).unwrap();
    cluster.node("a").text(&["vm", "unprotect", VM]);
    guest.finish(cluster.node("a")).unwrap();
}
