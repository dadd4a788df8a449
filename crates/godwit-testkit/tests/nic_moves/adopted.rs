//! NICs with names, for machines started by a third party.

use godwit_testkit::scenario::until;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use godwit_testkit::cluster::Node;
use godwit_testkit::network::{Pinger, Talk};
use godwit_testkit::process::wait_for;
use godwit_testkit::vm::{AdoptedMachine, NodeGuest, idle_qemu};
use serde_json::Value;

use super::{
    ECHO, GUEST, PING_EVERY, ip, load, lost_nothing, one_node, run, shown, there_and_back,
    two_nodes,
};

pub(super) const NIC: &str = "web";
const PATIENCE: Duration = Duration::from_secs(60);

/// Creates a NIC at a node; returns the node's output.
pub(super) fn create(node: &Node, name: &str, nic: &str) -> io::Result<String> {
    Ok(node.godwit(&["nic", "create", name, nic]).text()?)
}

/// Returns the arguments for QEMU in this output.
pub(super) fn words_for_qemu(told: &str) -> Vec<String> {
    let lines = told.lines().filter(|line| line.starts_with('-'));
    lines
        .flat_map(|line| line.trim_end_matches('\\').split_whitespace())
        .map(str::to_owned)
        .collect()
}

fn named(node: &Node) -> io::Result<Value> {
    Ok(node.godwit(&["nic", "show", NIC]).json()?)
}

#[test]
fn a_machine_that_somebody_else_started_moves_there_and_back_with_its_nic() -> io::Result<()> {
    let Some((lan, mut cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let told = create(cluster.node("a"), NIC, "tap=tap0")?;
    let a = cluster.node("a");
    // The process ends when the machine has moved.
    let machine = AdoptedMachine {
        nic: &words_for_qemu(&told),
        ..AdoptedMachine::default()
    };
    let (guest, _qemu) = NodeGuest::adopt(&cluster, a, (1, 64), &load(""), machine)?;
    let nic = shown(a)?;
    assert!(nic["attached"] == true && nic["tap"] == "tap0", "{nic}");
    a.refuses(&["nic", "show", NIC], &["serves no NIC \"web\""]);
    a.refuses(
        &["nic", "create", NIC, "bridge=br0"],
        &["NIC web is VM guest's"],
    );
    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
    let talks = |talk: &Talk| {
        let before = talk.bytes();
        until("goes on", || talk.bytes() > before);
    };
    talks(&talk);
    // The NIC is served again where QEMU expects it.
    cluster.die_and_start("a");
    let attached = || (shown(cluster.node("a")).ok()?["attached"] == true).then_some(());
    wait_for(PATIENCE, attached).expect("the NIC goes on");
    talks(&talk);
    let pinger = Pinger::start(lan.switch(), GUEST, PING_EVERY)?;
    for moved in there_and_back(&cluster, &guest, &talk)? {
        assert_eq!(
            moved["warnings"].as_array().map(Vec::len),
            Some(0),
            "{moved}"
        );
    }
    lost_nothing(talk, pinger)?;
    // The NIC's name is free again, and so is the socket.
    let socket = cluster.node("a").spec().dir.join("nics").join("web.vhost");
    assert!(!socket.exists());
    create(cluster.node("a"), NIC, "bridge=br0")?;
    guest.finish(cluster.node("a"))?;
    Ok(())
}

#[test]
fn a_nic_with_a_name_is_served_until_it_is_removed_also_when_its_node_restarts() -> io::Result<()> {
    let Some((lan, mut cluster)) = one_node()? else {
        return Ok(());
    };
    create(cluster.node("a"), NIC, "tap=tap0,queues=1")?;
    let before = named(cluster.node("a"))?;
    assert!(
        before["vm"].is_null() && before["problem"].is_null(),
        "{before}"
    );
    let socket = before["socket"].as_str().map(Path::new).expect("a path");
    assert!(socket.exists());
    cluster.node_mut("a").kill();
    ip(&lan.hosts()[0], "link set tap0 down")?;
    ip(&lan.hosts()[0], "link del tap0")?;
    cluster.node_mut("a").start(&[])?;
    let waits = named(cluster.node("a"))?;
    let why = waits["problem"].as_str().unwrap_or_default();
    assert!(why.contains("there is no interface tap0"), "{waits}");
    // The tap is made later than the node starts.
    lan.add_taps("tap0")?;
    let served = || {
        named(cluster.node("a")).ok()?["problem"]
            .is_null()
            .then_some(())
    };
    wait_for(PATIENCE, served).expect("is served");
    let after = named(cluster.node("a"))?;
    assert_eq!(
        (&before["mac"], &before["socket"]),
        (&after["mac"], &after["socket"])
    );
    let a = cluster.node("a");
    a.godwit(&["nic", "rm", NIC]).text()?;
    assert!(!socket.exists());
    a.refuses(&["nic", "rm", NIC], &["serves no NIC \"web\""]);
    // The NIC's tap is free at once.
    create(a, NIC, "tap=tap0")?;
    Ok(())
}

/// The machine has ended, and another NIC gets the name before the machine is taken off the node's list.
#[test]
fn a_nic_that_took_the_name_of_an_adopted_one_keeps_its_socket() -> io::Result<()> {
    let Some((_lan, cluster)) = one_node()? else {
        return Ok(());
    };
    let a = cluster.node("a");
    let told = create(a, NIC, "tap=tap0")?;
    let monitor = cluster.dir().join("monitor.sock");
    let mut qemu = idle_qemu(&monitor, "memory-backend-memfd", &words_for_qemu(&told))?;
    let monitor = monitor.to_string_lossy();
    a.godwit(&["vm", "adopt", "guest", "--qmp", &monitor])
        .json()?;
    qemu.kill();
    let stopped = || {
        let vm = a.godwit(&["vm", "show", "guest"]).json().ok()?;
        (vm["state"] == "stopped").then_some(())
    };
    wait_for(PATIENCE, stopped).expect("the node sees its end");
    create(a, NIC, "bridge=br0")?;
    a.godwit(&["vm", "stop", "guest"]).text()?;
    let nic = named(a)?;
    let socket = nic["socket"].as_str().map(Path::new).expect("a path");
    assert!(socket.exists(), "{nic}");
    Ok(())
}

#[test]
fn a_nic_with_a_name_that_cannot_be_had_is_refused_in_a_sentence() -> io::Result<()> {
    let Some((_lan, mut cluster)) = one_node()? else {
        return Ok(());
    };
    let a = cluster.node("a");
    let mac = "mac=52:54:00:00:00:01";
    create(a, NIC, &format!("tap=tap0,{mac}"))?;
    for (name, nic, said) in [
        ("a/b", "bridge=br0", "is not a NIC name"),
        (NIC, "bridge=br0", "has a NIC web already"),
        ("two", "tap=tap0", "tap tap0 is in use"),
        ("two", "tap=missing", "there is no interface missing"),
        ("two", "bridge=tap0", "is no bridge"),
        (
            "two",
            "bridge=br0,queues=9",
            "9 pairs of queues are too many",
        ),
        (
            "two",
            &format!("bridge=br0,{mac}"),
            "NIC web of node 'a' has the MAC address 52:54:00:00:00:01 already",
        ),
    ] {
        let refused = a.refusal(&["nic", "create", name, nic]);
        assert!(refused.contains(said), "{nic}: {refused}");
    }
    let refused = run(a, "one", &format!("bridge=br0,{mac}")).expect_err("has its address");
    assert!(
        refused.to_string().contains("NIC web of node 'a'"),
        "{refused}"
    );
    run(a, "one", "bridge=br0,mac=52:54:00:00:00:02")?;
    a.refuses(
        &["nic", "create", "two", "bridge=br0,mac=52:54:00:00:00:02"],
        &["VM one of node 'a' has"],
    );
    a.stop_vm("one");
    let list = a.godwit(&["nic", "list"]).json()?;
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    // A folder that cannot hold sockets: permissions would not stop root.
    let folder = a.spec().dir.join("nics");
    a.godwit(&["nic", "rm", NIC]).text()?;
    std::fs::remove_dir(&folder)?;
    std::fs::write(&folder, "")?;
    a.refuses(
        &["nic", "create", NIC, "tap=tap0"],
        &["nics/web.vhost: Not a directory"],
    );
    std::fs::remove_file(&folder)?;
    cluster.die_and_start("a");
    // The failures leave nothing behind.
    create(cluster.node("a"), NIC, "tap=tap0")?;
    Ok(())
}
