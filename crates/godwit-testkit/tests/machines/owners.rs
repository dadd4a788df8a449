//! Disks and machines that were given away and are owned again by a restored record are held: the nodes find out when
//! they meet.

use std::path::PathBuf;

use godwit_memory::pool::Pool;
use godwit_memory::pool::segment::Segment;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{MemoryPool, Node};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, ends, migrate, says, start_migration, until};

const DISK: &str = "d";
const MACHINE: &str = "bare";

fn store(node: &Node) -> PathBuf {
    node.spec().dir.join("godwit.redb")
}

/// Copies the store of a stopped node; returns the copy.
fn back_up(node: &Node) -> PathBuf {
    let copy = store(node).with_extension("before");
    std::fs::copy(store(node), &copy).unwrap();
    copy
}

#[test]
fn a_store_put_back_serves_nothing_that_was_given_away() {
    let _turn = Scenario::shared();
    let mut cluster = Cluster::plain(&["a", "b"]).started();
    cluster.node("a").create_disk(DISK, "8M");
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    let copy = back_up(cluster.node("a"));
    cluster.node_mut("a").start(&[]).unwrap();
    migrate(cluster.node("a"), DISK, "b", &[]).unwrap();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    std::fs::copy(&copy, store(cluster.node("a"))).unwrap();
    cluster.node_mut("a").start(&[]).unwrap();
    cluster.node("a").disk_comes_to(DISK, "outdated");
    let held = || {
        let shown = cluster.node("a").disk(DISK).ok()?;
        (shown["serves"] == false).then_some(shown)
    };
    let shown = wait_for(PATIENCE, held).expect("its engine serves no more");
    says(
        shown["problem"].as_str().unwrap(),
        &["node 'b' has had the disk since"],
    );
    assert_eq!(cluster.node("b").disk_state(DISK), "serving");
    let metrics = cluster.node("a").metrics().unwrap();
    says(&metrics, &["godwit_disk_outdated{disk=\"d\"} 1"]);
    NbdConnection::connect(&cluster.node("a").nbd(DISK)).expect_err("it is held");
    // The disk is held even if the other node cannot tell.
    cluster.node_mut("b").terminate(PATIENCE).unwrap();
    cluster.restart("a", &[]);
    let a = cluster.node("a");
    assert_eq!(a.disk_state(DISK), "outdated");
    a.refuses(&["disk", "claim", DISK], &["--force", "node 'b'"]);
    a.json(&["disk", "claim", DISK, "--force"]);
    assert_eq!(a.disk_state(DISK), "serving");
    assert_eq!(a.disk(DISK).unwrap()["epoch"], 3);
    cluster.node_mut("b").start(&[]).unwrap();
    cluster.node("b").disk_comes_to(DISK, "outdated");
    assert_eq!(cluster.node("a").disk_state(DISK), "serving");
}

#[test]
fn a_disk_in_doubt_can_be_claimed() {
    let _turn = Scenario::shared();
    let point = ("persist::after::relinquished", "sleep(60000)");
    let mut cluster = Cluster::plain(&["a", "b"]).start_held("a", point);
    cluster.node("a").create_disk(DISK, "8M");
    let id = start_migration(cluster.node("a"), DISK, "b", &[]).unwrap();
    cluster.node("b").disk_comes_to(DISK, "accepted");
    cluster.node_mut("a").kill();
    let b = cluster.node("b");
    b.refuses(&["disk", "claim", DISK], &["is in doubt"]);
    b.json(&["disk", "claim", DISK, "--force"]);
    assert_eq!(b.disk_state(DISK), "serving");
    b.connect(DISK);
    let moved = ends(b, &id, "aborted");
    says(&moved["error"].to_string(), &["was not decided"]);
}

#[test]
fn a_machine_that_went_on_elsewhere_stands_still() {
    let _turn = Scenario::shared();
    let mut cluster = Cluster::plain(&["a", "b"]).started();
    cluster.node("a").run_vm(MACHINE, &[], &[]);
    cluster.node_mut("a").kill();
    let copy = back_up(cluster.node("a"));
    // The machine's QEMU stays, as if the host had been put back, too.
    let point = ("vm::before::quit", "sleep(60000)");
    cluster.node_mut("a").start(&[point]).unwrap();
    cluster.node("a").vm_comes_to(MACHINE, "running");
    cluster.node("a").start_vm_move(MACHINE, "b");
    cluster.node("b").vm_comes_to(MACHINE, "running");
    cluster.node_mut("a").kill();
    std::fs::copy(&copy, store(cluster.node("a"))).unwrap();
    cluster.node_mut("a").start(&[]).unwrap();
    let a = cluster.node("a");
    let since = "node 'b' has had the VM since";
    until("it is told of", || {
        a.vm(MACHINE)["problem"].to_string().contains(since)
    });
    a.refuses(&["vm", "resume", MACHINE], &[since]);
    assert_eq!(a.vm_state(MACHINE), "paused");
    assert_eq!(cluster.node("b").vm_state(MACHINE), "running");
}

#[test]
fn a_machine_whose_memory_is_anothers_stands_still() {
    let _turn = Scenario::shared();
    let pool = MemoryPool::new().unwrap();
    let mut cluster = Cluster::plain(&["a", "b"]);
    pool.give_to(&mut cluster);
    cluster.start_all().unwrap();
    cluster
        .node("a")
        .run_vm(MACHINE, &["--memory-pool", MemoryPool::NAME], &[]);
    let opened = Pool::open(pool.path()).unwrap();
    let segment = Segment::open(&opened, MACHINE).unwrap();
    segment.decide("a", 1, "b").unwrap();
    // The node checks at the start, and every quarter of a minute.
    cluster.die_and_start("a");
    let a = cluster.node("a");
    a.vm_comes_to(MACHINE, "paused");
    until("it is told of", || a.vm(MACHINE)["problem"].is_string());
    let resume = ["vm", "resume", MACHINE, "--force"];
    a.refuses(&resume, &["belongs to node 'b'"]);
    assert_eq!(a.vm_state(MACHINE), "paused");
}

/// After a confirmed cancel nothing of the move is at the destination, and the machine may move again.
#[test]
fn a_cancelled_move_leaves_nothing_behind() {
    let _turn = Scenario::shared();
    let cluster = Cluster::plain(&["a", "b"]).started();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.create_disk(DISK, "16M");
    a.run_vm(MACHINE, &["--disk", DISK], &[]);
    let mut cancelled = 0;
    for attempt in 0..24_u64 {
        let id = a.start_vm_move(MACHINE, "b");
        std::thread::sleep(std::time::Duration::from_millis(attempt * 7));
        if a.godwit(&["migration", "cancel", &id]).json().is_ok() {
            cancelled += 1;
            for kind in ["vm", "disk"] {
                let left = b.json(&[kind, "list"]);
                assert_eq!(left.as_array().map(Vec::len), Some(0), "{left}");
            }
        } else {
            break;
        }
    }
    assert!(cancelled > 2, "{cancelled} moves were cancelled");
}
