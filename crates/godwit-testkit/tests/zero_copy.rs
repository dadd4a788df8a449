//! A virtual machine whose memory is in a memory pool that both nodes map: it moves without its memory, with a guest
//! that checks its disks and its memory.

use std::path::Path;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario};
use godwit_testkit::vm::{GuestLoad, NodeGuest, NodeMachine, VM};
use serde_json::Value;

const DISK_MIB: u64 = 96;
/// More than the state of the devices, and far less than the memory.
const MOST_BYTES: u64 = 1 << 20;

/// Two nodes that map the memory pool `cxl`.
fn cluster(pool: &Path) -> Cluster {
    let mut cluster = Cluster::prepare(&["a", "b"], ClusterOptions::secure().unwrap()).unwrap();
    for name in ["a", "b"] {
        let option = format!("--memory-pool=cxl={}", pool.display());
        cluster.node_mut(name).spec_mut().options.push(option);
    }
    cluster.start_all().unwrap();
    cluster
}

fn pool() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("godwit-pool")
        .tempdir_in("/dev/shm")
        .unwrap()
}

fn pooled() -> NodeMachine {
    NodeMachine {
        memory_pool: Some(String::from("cxl")),
        ..NodeMachine::default()
    }
}

#[test]
fn a_guest_moves_and_its_memory_stays() {
    let turn = Scenario::begin("zero_copy", "a_guest_moves_and_its_memory_stays");
    let pool = pool();
    let cluster = cluster(pool.path());
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let load = GuestLoad {
        seed: turn.seed,
        ..GuestLoad::default()
    };
    let guest = NodeGuest::start_machine(&cluster, "a", (2, DISK_MIB), &load, &pooled()).unwrap();
    for (from, to) in [(a, "b"), (b, "a"), (a, "b")] {
        let options = ["--memory", "zero-copy", "--stay-in-pool"];
        let (moved, gaps) = guest.migrate(from, to, &options).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        let sent = moved["memory_bytes"].as_u64().unwrap();
        assert!(sent < MOST_BYTES, "{sent} bytes of memory were sent");
        println!(
            "blackout {} ms, {sent} bytes, {gaps:?}",
            moved["blackout_ms"]
        );
        let shown = cluster.node(to).godwit(&["vm", "show", VM]).json().unwrap();
        assert_eq!(shown["memory"]["pool"], "cxl", "{shown}");
    }
    println!("{:?}", guest.finish(b).unwrap());
    b.godwit(&["vm", "stop", VM, "--force"]).json().unwrap();
    assert_eq!(
        std::fs::read_dir(pool.path()).unwrap().count(),
        0,
        "the pool is free again"
    );
}

/// Waits until a move of the guest's memory at a node has ended, and gives what the node shows of the memory.
fn memory_moved(node: &Node) -> Value {
    wait_for(PATIENCE * 3, || {
        let shown = node.godwit(&["vm", "show", VM]).json().ok()?;
        let memory = shown["memory"].clone();
        (memory["moving"]["ended"] == true).then_some(memory)
    })
    .unwrap()
}

/// Two processors, and disks that are written as fast as they take it: their requests read and write the memory that
/// moves.
#[test]
#[ignore = "takes minutes on a busy machine: make test-memory"]
fn the_memory_of_a_guest_under_load_follows_and_goes_back() {
    let turn = Scenario::begin("zero_copy", "the_memory_of_a_guest_under_load_follows");
    let pool = pool();
    let cluster = cluster(pool.path());
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let load = GuestLoad {
        seed: turn.seed,
        rate: 0,
        memory_rate_mb: 64,
        ..GuestLoad::default()
    };
    let machine = NodeMachine {
        cpus: 2,
        ..pooled()
    };
    let guest = NodeGuest::start_machine(&cluster, "a", (2, DISK_MIB), &load, &machine).unwrap();
    for (from, to) in [(a, "b"), (b, "a")] {
        let (moved, _) = guest.migrate(from, to, &["--memory", "zero-copy"]).unwrap();
        assert!(
            moved["memory_bytes"].as_u64().unwrap() < MOST_BYTES,
            "{moved}"
        );
        let to = cluster.node(to);
        let memory = memory_moved(to);
        println!("{memory}");
        assert_eq!(memory["moving"]["problem"], Value::Null, "{memory}");
        assert_eq!(memory["bytes_in_pool"], 0, "{memory}");
        guest.alive().unwrap();
        // What is local cannot be given to the other node as it is, and that is said before anything moves.
        let other = if to.name() == "b" { "a" } else { "b" };
        let refused = guest.try_migrate(to, other, &["--memory", "zero-copy"]);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("vm memory guest --to pool"), "{refused}");
        let back = to
            .godwit(&["vm", "memory", VM, "--to", "pool"])
            .json()
            .unwrap();
        println!("{}", back["memory"]);
        assert_eq!(
            back["memory"]["bytes_in_pool"], back["memory"]["bytes"],
            "{back}"
        );
        guest.alive().unwrap();
    }
    println!("{:?}", guest.finish(a).unwrap());
}
