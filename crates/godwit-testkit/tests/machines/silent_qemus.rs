//! A QEMU that does not answer when its node starts again is still a QEMU. Its rights to its disks decide its fate.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::process::{machines_in, wait_for};
use godwit_testkit::scenario::{PATIENCE, Scenario, run_small_machine};
use rustix::process::{Pid, Signal, kill_process};

const MACHINE: &str = "silent";
/// Time in which a node would take QEMU for ended, wrongly.
const MOMENT: Duration = Duration::from_secs(2);
/// Holds a source until the destination's QEMU is there and struck.
const HOLD: (&str, &str) = ("vm::copying-disks", "sleep(15000)");

/// Starts a machine without an operating system at the first of two nodes.
fn machine() -> Cluster {
    let cluster = Cluster::start_with(&["a", "b"], ClusterOptions::secure().unwrap()).unwrap();
    run_small_machine(cluster.node("a"), MACHINE, "disk0", &[]).unwrap();
    cluster
}

/// Returns the only QEMU of a node.
fn qemu(node: &Node) -> Pid {
    let only = || <[Pid; 1]>::try_from(machines_in(&node.spec().dir)).ok();
    let [pid] =
        wait_for(PATIENCE, only).unwrap_or_else(|| panic!("not one QEMU at {}", node.name()));
    pid
}

fn comes_to(node: &Node, state: &str) {
    let shown = || node.godwit(&["vm", "show", MACHINE]).json().ok();
    let there = || (shown()?["state"] == state).then_some(());
    wait_for(PATIENCE, there).unwrap_or_else(|| panic!("not {state}: {:?}", shown()));
}

#[test]
fn one_that_runs_a_guest_is_waited_for_and_no_second_is_started() {
    let _turn = Scenario::begin(
        "machines",
        "one_that_runs_a_guest_is_waited_for_and_no_second_is_started",
    );
    let mut cluster = machine();
    let pid = qemu(cluster.node("a"));
    kill_process(pid, Signal::STOP).unwrap();
    cluster.node_mut("a").kill();
    cluster.node_mut("a").start(&[]).unwrap();
    let a = cluster.node("a");
    comes_to(a, "paused");
    std::thread::sleep(MOMENT);
    let run = ["vm", "run", "second", "--accel", "tcg", "--memory", "64M"];
    let rest = ["--disk", "disk0", "--", "-nic", "none"];
    let second = a.godwit(&[&run[..], &rest[..]].concat()).json();
    let refusal = second.expect_err("a second QEMU for one disk");
    assert!(refusal.text.contains(MACHINE), "{refusal}");
    let polite = a.godwit(&["vm", "stop", MACHINE]).json();
    let refusal = polite.expect_err("it cannot hear");
    assert!(refusal.text.contains("does not answer"), "{refusal}");
    kill_process(pid, Signal::CONT).unwrap();
    comes_to(a, "running");
    assert_eq!(qemu(a), pid);
    a.godwit(&["vm", "stop", "--force", MACHINE])
        .text()
        .unwrap();
}

#[test]
fn one_whose_disks_do_not_come_is_ended() {
    let _turn = Scenario::begin("machines", "one_whose_disks_do_not_come_is_ended");
    let mut cluster = machine();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    cluster.node_mut("a").start(&[HOLD]).unwrap();
    comes_to(cluster.node("a"), "running");
    let machine = format!("vm/{MACHINE}");
    let detached = ["migrate", &machine, "--to", "b", "--detach"];
    cluster.node("a").godwit(&detached).json().unwrap();
    // Like a QEMU that waits for a disk of a dead node.
    kill_process(qemu(cluster.node("b")), Signal::STOP).unwrap();
    cluster.node_mut("b").kill();
    cluster.node_mut("b").start(&[]).unwrap();
    let b = &cluster.node("b").spec().dir;
    let ended = wait_for(PATIENCE, || machines_in(b).is_empty().then_some(()));
    ended.expect("it waits for ever for disks that do not come");
    let shown = cluster.node("b").godwit(&["vm", "show", MACHINE]).json();
    shown.expect_err("nothing of it stays");
    comes_to(cluster.node("a"), "running");
}

#[test]
fn one_whose_disks_are_taken_back_while_it_is_silent_is_ended() {
    let _turn = Scenario::begin(
        "machines",
        "one_whose_disks_are_taken_back_while_it_is_silent_is_ended",
    );
    let mut cluster = machine();
    let accepted = "persist::after::accepted";
    cluster.node_mut("b").terminate(PATIENCE).unwrap();
    cluster.node_mut("b").start(&[(accepted, HOLD.1)]).unwrap();
    let machine = format!("vm/{MACHINE}");
    let detached = ["migrate", &machine, "--to", "b", "--detach"];
    cluster.node("a").godwit(&detached).json().unwrap();
    let reached = || {
        let log = std::fs::read_to_string(cluster.node("b").log_path()).unwrap();
        log.contains(accepted).then_some(())
    };
    wait_for(PATIENCE, reached).expect("the disk is accepted");
    kill_process(qemu(cluster.node("b")), Signal::STOP).unwrap();
    // The source does not hear of the acceptance, and keeps the disk. The source says so once both nodes are there
    // again.
    cluster.node_mut("b").kill();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    cluster.node_mut("b").start(&[]).unwrap();
    assert_eq!(
        machines_in(&cluster.node("b").spec().dir).len(),
        1,
        "undecided"
    );
    cluster.node_mut("a").start(&[]).unwrap();
    let b = &cluster.node("b").spec().dir;
    let ended = wait_for(PATIENCE, || machines_in(b).is_empty().then_some(()));
    ended.expect("it waits for ever for disks that were taken back");
    comes_to(cluster.node("a"), "running");
}
