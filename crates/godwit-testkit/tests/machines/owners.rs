//! Disks and machines that were given away and are owned again by a restored record are held: the nodes find out when
//! they meet.

use std::path::PathBuf;

use godwit_memory::pool::Pool;
use godwit_memory::pool::segment::Segment;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryPool, Node, godwit_binary};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, migrate, migration, start_migration};

const DISK: &str = "d";
const MACHINE: &str = "bare";

fn cluster() -> Cluster {
    let options = ClusterOptions {
        godwit: godwit_binary().unwrap(),
        tls: false,
    };
    Cluster::prepare(&["a", "b"], options).unwrap()
}

fn store(node: &Node) -> PathBuf {
    node.spec().dir.join("godwit.redb")
}

/// Copies the store of a stopped node; returns the copy.
fn back_up(node: &Node) -> PathBuf {
    let copy = store(node).with_extension("before");
    std::fs::copy(store(node), &copy).unwrap();
    copy
}

fn comes_to(node: &Node, state: &str) {
    let is_so = || (node.disk_state(DISK) == state).then_some(());
    wait_for(PATIENCE, is_so).unwrap_or_else(|| panic!("not {state}: {:?}", node.disk(DISK)));
}

#[test]
fn a_store_put_back_serves_nothing_that_was_given_away() {
    let _turn = Scenario::begin(
        "machines",
        "a_store_put_back_serves_nothing_that_was_given_away",
    );
    let mut cluster = cluster();
    cluster.start_all().unwrap();
    let create = ["disk", "create", DISK, "--size", "8M"];
    cluster.node("a").godwit(&create).json().unwrap();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    let copy = back_up(cluster.node("a"));
    cluster.node_mut("a").start(&[]).unwrap();
    migrate(cluster.node("a"), DISK, "b", &[]).unwrap();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    std::fs::copy(&copy, store(cluster.node("a"))).unwrap();
    cluster.node_mut("a").start(&[]).unwrap();
    comes_to(cluster.node("a"), "outdated");
    let held = || {
        let shown = cluster.node("a").disk(DISK).ok()?;
        (shown["serves"] == false).then_some(shown)
    };
    let shown = wait_for(PATIENCE, held).expect("its engine serves no more");
    let problem = shown["problem"].as_str().unwrap();
    assert!(
        problem.contains("node 'b' has had the disk since"),
        "{problem}"
    );
    assert_eq!(cluster.node("b").disk_state(DISK), "serving");
    let metrics = cluster.node("a").metrics().unwrap();
    assert!(
        metrics.contains("godwit_disk_outdated{disk=\"d\"} 1"),
        "{metrics}"
    );
    NbdConnection::connect(&cluster.node("a").nbd(DISK)).expect_err("it is held");
    // The disk is held even if the other node cannot tell.
    cluster.node_mut("b").terminate(PATIENCE).unwrap();
    cluster.node_mut("a").terminate(PATIENCE).unwrap();
    cluster.node_mut("a").start(&[]).unwrap();
    let a = cluster.node("a");
    assert_eq!(a.disk_state(DISK), "outdated");
    let refusal = a.refusal(&["disk", "claim", DISK]);
    assert!(
        refusal.contains("--force") && refusal.contains("node 'b'"),
        "{refusal}"
    );
    a.godwit(&["disk", "claim", DISK, "--force"])
        .json()
        .unwrap();
    assert_eq!(a.disk_state(DISK), "serving");
    assert_eq!(a.disk(DISK).unwrap()["epoch"], 3);
    cluster.node_mut("b").start(&[]).unwrap();
    comes_to(cluster.node("b"), "outdated");
    assert_eq!(cluster.node("a").disk_state(DISK), "serving");
}

#[test]
fn a_disk_in_doubt_can_be_claimed() {
    let _turn = Scenario::begin("machines", "a_disk_in_doubt_can_be_claimed");
    let mut cluster = cluster();
    let point = ("persist::after::relinquished", "sleep(60000)");
    cluster.node_mut("a").start(&[point]).unwrap();
    cluster.node_mut("b").start(&[]).unwrap();
    let create = ["disk", "create", DISK, "--size", "8M"];
    cluster.node("a").godwit(&create).json().unwrap();
    let id = start_migration(cluster.node("a"), DISK, "b", &[]).unwrap();
    comes_to(cluster.node("b"), "accepted");
    cluster.node_mut("a").kill();
    let b = cluster.node("b");
    let refusal = b.refusal(&["disk", "claim", DISK]);
    assert!(refusal.contains("is in doubt"), "{refusal}");
    b.godwit(&["disk", "claim", DISK, "--force"])
        .json()
        .unwrap();
    assert_eq!(b.disk_state(DISK), "serving");
    NbdConnection::connect(&b.nbd(DISK)).expect("it is served");
    let moved = migration(b, &id);
    assert_eq!(moved["phase"], "aborted", "{moved}");
    assert!(
        moved["error"].to_string().contains("was not decided"),
        "{moved}"
    );
}

fn machine(node: &Node) -> serde_json::Value {
    node.godwit(&["vm", "show", MACHINE])
        .json()
        .unwrap_or_default()
}

fn machine_comes_to(node: &Node, what: &str, is_so: impl Fn(&serde_json::Value) -> bool) {
    let reached = || is_so(&machine(node)).then_some(());
    wait_for(PATIENCE, reached).unwrap_or_else(|| panic!("not {what}: {}", machine(node)));
}

fn run_machine(node: &Node, more: &[&str]) {
    let run = ["vm", "run", MACHINE, "--accel", "tcg", "--memory", "64M"];
    let rest = ["--", "-nic", "none"];
    node.godwit(&[&run[..], more, &rest[..]].concat())
        .json()
        .unwrap();
}

#[test]
fn a_machine_that_went_on_elsewhere_stands_still() {
    let _turn = Scenario::begin("machines", "a_machine_that_went_on_elsewhere_stands_still");
    let mut cluster = cluster();
    cluster.start_all().unwrap();
    run_machine(cluster.node("a"), &[]);
    cluster.node_mut("a").kill();
    let copy = back_up(cluster.node("a"));
    // The machine's QEMU stays, as if the host had been put back, too.
    let point = ("vm::before::quit", "sleep(60000)");
    cluster.node_mut("a").start(&[point]).unwrap();
    machine_comes_to(cluster.node("a"), "running", |it| it["state"] == "running");
    let vm = format!("vm/{MACHINE}");
    let detached = ["migrate", &vm, "--to", "b", "--detach"];
    cluster.node("a").godwit(&detached).json().unwrap();
    machine_comes_to(cluster.node("b"), "running", |it| it["state"] == "running");
    cluster.node_mut("a").kill();
    std::fs::copy(&copy, store(cluster.node("a"))).unwrap();
    cluster.node_mut("a").start(&[]).unwrap();
    let a = cluster.node("a");
    machine_comes_to(a, "told of", |it| {
        let problem = it["problem"].as_str().unwrap_or_default();
        problem.contains("node 'b' has had the VM since")
    });
    let refusal = a.refusal(&["vm", "resume", MACHINE]);
    assert!(
        refusal.contains("node 'b' has had the VM since"),
        "{refusal}"
    );
    assert_eq!(machine(a)["state"], "paused");
    assert_eq!(machine(cluster.node("b"))["state"], "running");
}

#[test]
fn a_machine_whose_memory_is_anothers_stands_still() {
    let _turn = Scenario::begin(
        "machines",
        "a_machine_whose_memory_is_anothers_stands_still",
    );
    let pool = MemoryPool::new().unwrap();
    let mut cluster = cluster();
    pool.give_to(&mut cluster);
    cluster.start_all().unwrap();
    run_machine(cluster.node("a"), &["--memory-pool", MemoryPool::NAME]);
    let opened = Pool::open(pool.path()).unwrap();
    let segment = Segment::open(&opened, MACHINE).unwrap();
    segment.decide("a", 1, "b").unwrap();
    // The node checks at the start, and every quarter of a minute.
    cluster.node_mut("a").kill();
    cluster.node_mut("a").start(&[]).unwrap();
    let a = cluster.node("a");
    machine_comes_to(a, "still", |it| {
        it["state"] == "paused" && it["problem"].is_string()
    });
    let refusal = a.refusal(&["vm", "resume", MACHINE, "--force"]);
    assert!(refusal.contains("belongs to node 'b'"), "{refusal}");
    assert_eq!(machine(a)["state"], "paused");
}

/// After a confirmed cancel nothing of the move is at the destination, and the machine may move again.
#[test]
fn a_cancelled_move_leaves_nothing_behind() {
    let _turn = Scenario::begin("machines", "a_cancelled_move_leaves_nothing_behind");
    let mut cluster = cluster();
    cluster.start_all().unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.godwit(&["disk", "create", DISK, "--size", "16M"])
        .json()
        .unwrap();
    run_machine(a, &["--disk", DISK]);
    let vm = format!("vm/{MACHINE}");
    let mut cancelled = 0;
    for attempt in 0..24_u64 {
        let begun = a.godwit(&["migrate", &vm, "--to", "b", "--detach"]).json();
        let id = begun.unwrap()["id"].as_str().unwrap().to_owned();
        std::thread::sleep(std::time::Duration::from_millis(attempt * 7));
        if a.godwit(&["migration", "cancel", &id]).json().is_ok() {
            cancelled += 1;
            let left = b.godwit(&["vm", "list"]).json().unwrap();
            assert_eq!(left.as_array().map(Vec::len), Some(0), "{left}");
            let disks = b.godwit(&["disk", "list"]).json().unwrap();
            assert_eq!(disks.as_array().map(Vec::len), Some(0), "{disks}");
        } else {
            break;
        }
    }
    assert!(cancelled > 2, "{cancelled} moves were cancelled");
}
