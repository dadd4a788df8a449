//! A virtual machine whose memory is in a memory pool that both nodes map: it moves without its memory, with a guest
//! that checks its disks and its memory.

use std::path::Path;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::scenario::Scenario;
use godwit_testkit::vm::{GuestLoad, NodeGuest, NodeMachine, VM};

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
