//! A virtual machine with its memory in a memory pool mapped by both nodes: the machine moves without the memory, with
//! a guest that checks its disks and its memory.

mod device;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, MemoryPool, Node};
use godwit_testkit::process::{wait_for, words};
use godwit_testkit::scenario::{PATIENCE, Scenario, other, says};
use godwit_testkit::vm::{AdoptedMachine, GuestLoad, NodeGuest, NodeMachine, VM};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const DISK_MIB: u64 = 96;
/// More than the state of the devices, and far less than the memory.
const MOST_BYTES: u64 = 1 << 20;

/// Starts two nodes with a common memory pool.
fn cluster(pool: &MemoryPool) -> Cluster {
    pool.cluster(&["a", "b"], ClusterOptions::secure().unwrap())
        .unwrap()
}

fn pooled() -> NodeMachine {
    NodeMachine {
        memory_pool: Some(MemoryPool::NAME.to_owned()),
        ..NodeMachine::default()
    }
}

/// Starts a machine with `cpus` disks at node "a", with the memory in the pool and the default load.
fn pooled_guest(cluster: &Cluster, seed: u64, cpus: usize) -> NodeGuest {
    let load = GuestLoad::seeded(seed);
    NodeGuest::start_machine(cluster, "a", (cpus, DISK_MIB), &load, &pooled()).unwrap()
}

const FOLLOWS: &[&str] = &["--memory", "zero-copy"];
const STAYS: &[&str] = &["--memory", "zero-copy", "--stay-in-pool"];

/// Moves the guest without its memory.
fn moves(guest: &NodeGuest, from: &Node, to: &str, options: &[&str]) -> Value {
    let (moved, gaps) = guest.migrate(from, to, options).unwrap();
    assert_eq!(moved["phase"], "completed", "{moved}");
    let sent = moved["memory_bytes"].as_u64().unwrap();
    println!(
        "blackout {} ms, {sent} bytes, {gaps:?}",
        moved["blackout_ms"]
    );
    assert!(sent < MOST_BYTES, "{moved}");
    moved
}

/// Waits until all of the guest's memory has followed.
fn has_followed(guest: &NodeGuest, at: &Node) {
    let memory = guest.memory_moved(at).unwrap();
    println!("{memory}");
    assert_eq!(memory["moving"]["problem"], Value::Null, "{memory}");
    assert_eq!(memory["bytes_in_pool"], 0, "{memory}");
}

/// Ends the guest, and expects no errors there, and nothing in the pool.
fn ends(guest: &NodeGuest, at: &Node, pool: &MemoryPool) {
    println!("{:?}", guest.finish(at).unwrap());
    at.stop_vm(VM);
    assert!(pool.is_empty().unwrap(), "the pool is free again");
}

/// Kills node a while the guest's memory moves, before it gives back the former places of a batch, and starts it.
fn dies_while_memory_moves(cluster: &mut Cluster, to: &str) {
    let a = cluster.node_mut("a");
    a.kill();
    a.start(BEFORE_GIVING_BACK).unwrap();
    std::thread::scope(|scope| {
        // The command ends with the node.
        scope.spawn(|| a.refusal(&["vm", "memory", VM, "--to", to]));
        memory_moves(a, to);
        send(u64::from(a.pid().unwrap()), Signal::KILL);
    });
    cluster.die_and_start("a");
}

#[test]
fn a_guest_moves_and_its_memory_stays() {
    let turn = Scenario::alone();
    let pool = MemoryPool::new().unwrap();
    let cluster = cluster(&pool);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let guest = pooled_guest(&cluster, turn.seed, 2);
    for (from, to) in [(a, "b"), (b, "a"), (a, "b")] {
        let before = mapped(from);
        moves(&guest, from, to, STAYS);
        // Memory not touched again by the guest is there as well.
        let all = || (mapped(cluster.node(to)) >= before).then_some(());
        let filled = wait_for(Duration::from_secs(5), all);
        let now = mapped(cluster.node(to));
        println!("{before} bytes were in the page tables at the source, {now} are at {to}");
        assert!(filled.is_some(), "page tables: {now} of {before} bytes");
        let shown = cluster.node(to).json(&["vm", "show", VM]);
        assert_eq!(shown["memory"]["pool"], "cxl", "{shown}");
    }
    ends(&guest, b, &pool);
}

/// The memory stays there: only ordinary pages move under a guest.
#[test]
fn a_guest_on_huge_pages_moves_and_its_memory_stays() {
    let turn = Scenario::alone();
    // The memory, a page for its header, and one for the nodes' proof of a common pool.
    let Some(pool) = MemoryPool::huge(192 / 2 + 2).unwrap() else {
        return;
    };
    let cluster = cluster(&pool);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let guest = pooled_guest(&cluster, turn.seed, 1);
    for command in [
        &["vm", "memory", VM, "--to", "local"][..],
        &words("migrate vm/guest --to b --memory zero-copy"),
    ] {
        a.refuses(command, &["leave it in the pool with --stay-in-pool"]);
    }
    for (from, to) in [(a, "b"), (b, "a")] {
        moves(&guest, from, to, STAYS);
    }
    println!("{:?}", guest.finish(a).unwrap());
    a.stop_vm(VM);
    // libvirt, where it runs, has a separate folder in each such file system.
    for kind in ["memory", "segment"] {
        let file = pool.path().join(format!("{VM}.{kind}"));
        assert!(!file.exists(), "the pool is free again");
    }
}

/// A third party started QEMU, with the memory in a file of the pool: the guest moves without the memory, which follows
/// at the destination. The source's node is killed and started again first.
#[test]
fn an_adopted_guest_moves_and_its_memory_follows() {
    let turn = Scenario::alone();
    let pool = MemoryPool::new().unwrap();
    let mut cluster = cluster(&pool);
    let file = pool.path().join(format!("{VM}.memory"));
    let machine = AdoptedMachine {
        memory_file: Some(&file),
        ..AdoptedMachine::default()
    };
    let started = NodeGuest::adopt(
        &cluster,
        cluster.node("a"),
        (1, DISK_MIB),
        &GuestLoad::seeded(turn.seed),
        machine,
    );
    let (guest, _qemu) = started.unwrap();
    cluster.die_and_start("a");
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let memory = memory_of(a);
    assert_eq!(memory["pool"], MemoryPool::NAME, "{memory}");
    assert_eq!(memory["bytes_in_pool"], memory["bytes"], "{memory}");
    assert_eq!(allocated(&file), memory["bytes"], "its room is reserved");
    // Nothing in this QEMU moves the memory.
    a.refuses(
        &["vm", "memory", VM, "--to", "local"],
        &["move the machine to another node"],
    );
    moves(&guest, a, "b", FOLLOWS);
    has_followed(&guest, b);
    goes(&guest, b, "pool");
    guest.migrate(b, "a", STAYS).unwrap();
    // And with memory sent into private memory.
    guest.migrate(a, "b", &[]).unwrap();
    assert_eq!(memory_of(b), Value::Null);
    ends(&guest, b, &pool);
}

/// Moves the memory of a guest with two processors and disks under unlimited load, whose requests read and write the
/// moving memory. The guest moves `times` times with the memory following, and then the memory goes out of the pool and
/// back `round_trips` times.
fn memory_moves_under_load(times: usize, round_trips: usize) {
    let turn = Scenario::alone();
    let pool = MemoryPool::new().unwrap();
    let cluster = cluster(&pool);
    let load = GuestLoad {
        seed: turn.seed,
        rate: 0,
        memory_rate_mb: 64,
        linear_scan_mib: 8,
        random_access_mib: 8,
        ..GuestLoad::default()
    };
    let machine = NodeMachine {
        cpus: 2,
        ..pooled()
    };
    let guest = NodeGuest::start_machine(&cluster, "a", (2, DISK_MIB), &load, &machine).unwrap();
    let mut here = "a";
    for _ in 0..times {
        let from = cluster.node(here);
        let to = other(here);
        moves(&guest, from, to, FOLLOWS);
        let at = cluster.node(to);
        has_followed(&guest, at);
        guest.alive().unwrap();
        // Local memory cannot be given to the other node in place, and the refusal comes before anything moves.
        let refused = guest.try_migrate(at, here, FOLLOWS);
        let refused = refused.unwrap_err().to_string();
        says(&refused, &["vm memory guest --to pool"]);
        goes(&guest, at, "pool");
        here = to;
    }
    let at = cluster.node(here);
    for number in 1..=round_trips {
        for to in ["local", "pool"] {
            let moving = goes(&guest, at, to);
            println!("round trip {number}: {moving}");
        }
    }
    ends(&guest, at, &pool);
}

/// Lets all of the guest's memory go to the pool, or out of it, while the guest goes on. Returns the node's description
/// of the memory move.
fn goes(guest: &NodeGuest, at: &Node, to: &str) -> Value {
    let moved = at.json(&["vm", "memory", VM, "--to", to]);
    let memory = &moved["memory"];
    let in_pool = if to == "pool" {
        memory["bytes"].clone()
    } else {
        0.into()
    };
    assert_eq!(memory["bytes_in_pool"], in_pool, "{moved}");
    guest.alive().unwrap();
    memory["moving"].clone()
}

#[test]
fn the_memory_of_a_guest_under_load_follows_and_goes_back() {
    memory_moves_under_load(1, 1);
}

/// Each move is a full one: the guest goes to the other node, and all of the memory follows.
#[test]
#[ignore = "takes minutes on a busy machine: make test-slow ONLY=zero_copy"]
fn three_full_moves_and_ten_round_trips_of_memory_under_load() {
    memory_moves_under_load(3, 10);
}

/// The node dies while memory moves, before giving back the former places of the last batch. The next node process
/// finds the memory: the disks go on in the right pages, and the places are given back.
#[test]
fn a_node_that_dies_while_memory_moves_finds_it_again() {
    let turn = Scenario::alone();
    let pool = MemoryPool::new().unwrap();
    let mut cluster = cluster(&pool);
    let guest = pooled_guest(&cluster, turn.seed, 1);
    for to in ["local", "pool"] {
        let begin = memory_of(cluster.node("a"))["bytes_in_pool"].clone();
        dies_while_memory_moves(&mut cluster, to);
        let a = cluster.node("a");
        let memory = memory_of(a);
        println!("{begin} in the pool before, and after the restart {memory}");
        let in_pool = memory["bytes_in_pool"].as_u64().unwrap();
        let local = memory["bytes"].as_u64().unwrap() - in_pool;
        assert!(0 < in_pool && 0 < local, "{memory}");
        let segment = pool.path().join(format!("{VM}.memory"));
        assert_eq!(allocated(&segment), in_pool, "bytes that the pool holds");
        let files = local_files(qemu_of(a));
        let held: u64 = files.iter().map(|file| allocated(file)).sum();
        assert_eq!(held, local, "bytes of local memory");
        guest.alive().unwrap();
        // Local memory that the node no longer remembers stands in the way of a move all the same.
        let refused = guest.try_migrate(a, "b", FOLLOWS);
        let refused = refused.unwrap_err().to_string();
        says(&refused, &["is not in memory pool cxl"]);
        a.json(&["vm", "memory", VM, "--to", to]);
        guest.alive().unwrap();
    }
    ends(&guest, cluster.node("a"), &pool);
}

/// Holds the node between the fifth batch of memory and giving back the former places of the batch.
const BEFORE_GIVING_BACK: &[(&str, &str)] = &[("vm::moving-memory", "4*off->1*sleep(60000)")];

/// Returns the bytes allocated to a file.
fn allocated(file: &Path) -> u64 {
    std::fs::metadata(file).unwrap().blocks() * 512
}

/// Returns the open files of local memory of a QEMU, each once.
fn local_files(qemu: u64) -> Vec<PathBuf> {
    let all = std::fs::read_dir(format!("/proc/{qemu}/fd")).unwrap();
    let mut files: Vec<PathBuf> = all.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| {
        let name = std::fs::read_link(file).unwrap_or_default();
        name.to_string_lossy().contains("memfd:godwit-memory")
    });
    files.sort_by_key(|file| std::fs::metadata(file).unwrap().ino());
    files.dedup_by_key(|file| std::fs::metadata(file).unwrap().ino());
    files
}

/// Stops QEMU while memory moves, and disturbs the move. The node has to tell this problem. When QEMU has handled the
/// request after all, the disks go on at the memory's place.
fn an_answer_is_lost(disturb: impl FnOnce(&Node, u64), told: &[&str], check: impl FnOnce(&Value)) {
    let turn = Scenario::alone();
    let pool = MemoryPool::new().unwrap();
    let cluster = cluster(&pool);
    let a = cluster.node("a");
    let guest = pooled_guest(&cluster, turn.seed, 1);
    let qemu = qemu_of(a);
    std::thread::scope(|scope| {
        scope.spawn(|| a.refusal(&words(SLOWLY)));
        memory_moves(a, "local");
        send(qemu, Signal::STOP);
        disturb(a, qemu);
    });
    let memory = guest.memory_moved(a).unwrap();
    println!("{memory}");
    says(memory["moving"]["problem"].as_str().unwrap(), told);
    check(&memory);
    send(qemu, Signal::CONT);
    guest.alive().unwrap();
    for to in ["local", "pool"] {
        goes(&guest, a, to);
    }
    println!("{:?}", guest.finish(a).unwrap());
}

/// QEMU is stopped for longer than its agent may take. The node has not heard the place of the chunk: QEMU's mappings
/// tell.
#[test]
#[ignore = "waits for longer than the agent may take: make test-slow ONLY=zero_copy"]
fn memory_that_a_qemu_moves_too_late_is_found() {
    let disturb = |_: &Node, qemu| {
        std::thread::sleep(Duration::from_secs(13));
        send(qemu, Signal::CONT);
    };
    let told = ["does not answer", "what has moved stays"];
    an_answer_is_lost(disturb, &told, |memory| {
        let bytes = |of: &Value| of.as_u64().unwrap();
        let local = bytes(&memory["bytes"]) - bytes(&memory["bytes_in_pool"]);
        let moved = bytes(&memory["moving"]["bytes_moved"]);
        assert!(local > moved, "a chunk moved too late to be counted");
    });
}

/// The same, and the move is cancelled before QEMU answers. Then the machine can be stopped.
#[test]
#[ignore = "waits for longer than the agent may take, twice: make test-slow ONLY=zero_copy"]
fn memory_that_a_cancelled_move_lost_is_found() {
    let disturb = |node: &Node, _| {
        // The next request is under way by then.
        std::thread::sleep(Duration::from_secs(1));
        node.json(&["vm", "memory", VM, "--cancel"]);
    };
    an_answer_is_lost(disturb, &["stand still"], |_| {});
}

const SLOWLY: &str = "vm memory guest --to local --max-bandwidth 64M";

/// Returns the bytes of the guest's memory in the page tables of QEMU.
fn mapped(node: &Node) -> u64 {
    let all = std::fs::read_to_string(format!("/proc/{}/smaps", qemu_of(node))).unwrap();
    let file = format!("/{VM}.memory");
    let mut lines = all.lines().skip_while(|line| !line.ends_with(&file));
    let resident = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    let kilobytes: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    kilobytes << 10
}

fn qemu_of(node: &Node) -> u64 {
    let shown = node.json(&["vm", "show", VM]);
    shown["pid"].as_u64().unwrap()
}

/// Waits until a move of the guest's memory is well under way.
fn memory_moves(node: &Node, to: &str) {
    wait_for(PATIENCE, || {
        let moving = memory_of(node)["moving"].clone();
        let ends = moving["ended"] == true || moving["to"] != to;
        (!ends && moving["bytes_moved"].as_u64()? > 32 << 20).then_some(())
    })
    .unwrap();
}

fn send(process: u64, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

fn memory_of(node: &Node) -> Value {
    node.json(&["vm", "show", VM])["memory"].clone()
}
