//! A QEMU that does not answer when its node starts again is still a QEMU. Its rights to its disks decide its fate.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::scenario::{PATIENCE, Scenario, until};
use rustix::process::{Signal, kill_process};

const MACHINE: &str = "silent";
/// Time in which a node would take QEMU for ended, wrongly.
const MOMENT: Duration = Duration::from_secs(2);
/// Holds a source until the destination's QEMU is there and struck.
const HOLD: (&str, &str) = ("vm::copying-disks", "sleep(15000)");

/// Starts a machine without an operating system at the first of two nodes.
fn machine() -> Cluster {
    let cluster = Cluster::secure(&["a", "b"]).started();
    cluster.node("a").run_vm_on(MACHINE, "disk0", &[]);
    cluster
}

#[test]
fn one_that_runs_a_guest_is_waited_for_and_no_second_is_started() {
    let _turn = Scenario::shared();
    let mut cluster = machine();
    let pid = cluster.node("a").qemu();
    kill_process(pid, Signal::STOP).unwrap();
    cluster.die_and_start("a");
    let a = cluster.node("a");
    a.vm_comes_to(MACHINE, "paused");
    std::thread::sleep(MOMENT);
    let run = ["vm", "run", "second", "--accel", "tcg", "--memory", "64M"];
    let rest = ["--disk", "disk0", "--", "-nic", "none"];
    a.refuses(&[&run[..], &rest[..]].concat(), &[MACHINE]);
    a.refuses(&["vm", "stop", MACHINE], &["does not answer"]);
    kill_process(pid, Signal::CONT).unwrap();
    a.vm_comes_to(MACHINE, "running");
    assert_eq!(a.qemu(), pid);
    a.stop_vm(MACHINE);
}

#[test]
fn one_whose_disks_do_not_come_is_ended() {
    let _turn = Scenario::shared();
    let mut cluster = machine();
    cluster.restart("a", &[HOLD]);
    cluster.node("a").vm_comes_to(MACHINE, "running");
    cluster.node("a").start_vm_move(MACHINE, "b");
    // Like a QEMU that waits for a disk of a dead node.
    kill_process(cluster.node("b").qemu(), Signal::STOP).unwrap();
    cluster.die_and_start("b");
    let b = cluster.node("b");
    until("it does not wait for disks that do not come", || {
        b.qemus().is_empty()
    });
    b.refusal(&["vm", "show", MACHINE]);
    cluster.node("a").vm_comes_to(MACHINE, "running");
}

#[test]
fn one_whose_disks_are_taken_back_while_it_is_silent_is_ended() {
    let _turn = Scenario::shared();
    let mut cluster = machine();
    let accepted = "persist::after::accepted";
    cluster.restart("b", &[(accepted, HOLD.1)]);
    cluster.node("a").start_vm_move(MACHINE, "b");
    cluster.node("b").reaches(accepted);
    kill_process(cluster.node("b").qemu(), Signal::STOP).unwrap();
    // The source does not hear of the acceptance, and keeps the disk. The source says so once both nodes are there
    // again.
    cluster.node_mut("b").kill();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    cluster.node_mut("b").start(&[]).unwrap();
    assert_eq!(cluster.node("b").qemus().len(), 1, "undecided");
    cluster.node_mut("a").start(&[]).unwrap();
    let b = cluster.node("b");
    until("it does not wait for disks that were taken back", || {
        b.qemus().is_empty()
    });
    cluster.node("a").vm_comes_to(MACHINE, "running");
}
