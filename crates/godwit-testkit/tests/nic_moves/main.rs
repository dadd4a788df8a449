//! A machine's NIC moves along: a client outside loses no packet and no connection.

mod adopted;
mod announcements;
mod checkpoints;
mod foreign_front_end;
mod libvirt_nics;
mod queues;
mod uplinks;

use godwit_testkit::scenario::says;
use std::fs::Permissions;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Failure, MemoryPool, Node};
use godwit_testkit::network::{Lan, Namespace, Ping, Pinger, Talk};
use godwit_testkit::process::{self, wait_for};
use godwit_testkit::vm::{GuestLoad, GuestNetwork, NodeGuest, NodeMachine};
use serde_json::Value;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO: u16 = 7000;
/// Few enough for a guest on an emulated processor of a busy host.
const PING_EVERY: Duration = Duration::from_millis(5);

fn load(nic: &str) -> GuestLoad {
    GuestLoad {
        file_mb: 8,
        memory_mb: 8,
        network: Some(GuestNetwork {
            nic: nic.to_owned(),
            address: format!("{GUEST}/24"),
            echo_port: ECHO,
            ..GuestNetwork::default()
        }),
        ..GuestLoad::default()
    }
}

/// Starts two nodes on the hosts of a network, the first with these fail points; without root prints why not.
fn two_nodes(failpoints: &[(&str, &str)]) -> io::Result<Option<(Lan, Cluster)>> {
    if !may_run() {
        return Ok(None);
    }
    let lan = Lan::new(2)?;
    let cluster = cluster_with(&lan, failpoints, None)?;
    Ok(Some((lan, cluster)))
}

/// Does the same with one node.
fn one_node() -> io::Result<Option<(Lan, Cluster)>> {
    if !may_run() {
        return Ok(None);
    }
    let lan = Lan::new(1)?;
    let hosts = [("a", lan.hosts().first())];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    cluster.node_mut("a").start(&[])?;
    Ok(Some((lan, cluster)))
}

/// Starts a client outside that talks to the guest, and one that pings it.
fn outside(lan: &Lan) -> io::Result<(Talk, Pinger)> {
    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
    Ok((talk, Pinger::start(lan.switch(), GUEST, PING_EVERY)?))
}

/// Returns true if the test can run here; otherwise prints why not.
fn may_run() -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        eprintln!("skipped: network namespaces need root");
    }
    may
}

/// Returns a node's description of the guest's NIC.
fn shown(node: &Node) -> io::Result<Value> {
    Ok(node.godwit(&["nic", "show", "guest/0"]).json()?)
}

/// Starts two nodes on the hosts of a network, the first with these fail points, both with a memory pool.
fn cluster_with(
    lan: &Lan,
    failpoints: &[(&str, &str)],
    pool: Option<&MemoryPool>,
) -> io::Result<Cluster> {
    let [a, b] = lan.hosts() else {
        return Err(io::Error::other("two hosts"));
    };
    let hosts = [("a", Some(a)), ("b", Some(b))];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    if let Some(pool) = pool {
        pool.give_to(&mut cluster);
    }
    cluster.node_mut("a").start(failpoints)?;
    cluster.node_mut("b").start(&[])?;
    Ok(cluster)
}

#[test]
fn a_client_outside_loses_nothing_when_the_machine_moves() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &load("tap=tap0"))?;
    let (talk, pinger) = outside(&lan)?;
    there_and_back(&cluster, &guest, &talk)?;
    lost_nothing(talk, pinger)?;
    guest.finish(cluster.node("a"))?;
    Ok(())
}

/// Moves the guest from a to b and back while the client talks. Returns both moves.
fn there_and_back(cluster: &Cluster, guest: &NodeGuest, talk: &Talk) -> io::Result<Vec<Value>> {
    let mut moves = Vec::new();
    for (from, to) in [("a", "b"), ("b", "a")] {
        std::thread::sleep(Duration::from_secs(1));
        let before = talk.bytes();
        let (moved, _) = guest.migrate(cluster.node(from), to, &[])?;
        std::thread::sleep(Duration::from_secs(1));
        assert!(talk.bytes() > before, "the conversation goes on");
        let nic = shown(cluster.node(to))?;
        println!("{} {nic}", moved["blackout_ms"]);
        assert!(nic["counters"]["held"].as_u64() > Some(0), "{nic}");
        assert_eq!(nic["counters"]["held_overflow"], 0, "{nic}");
        let left = cluster.node(from).godwit(&["nic", "list"]).json()?;
        assert_eq!(left.as_array().map(Vec::len), Some(0), "{left}");
        moves.push(moved);
    }
    Ok(moves)
}

/// Expects the client's conversation to reach its end, and one answer to each of the client's pings.
fn lost_nothing(talk: Talk, pinger: Pinger) -> io::Result<()> {
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    answered_once(&pinger.finish(Duration::from_secs(5))?);
    Ok(())
}

fn answered_once(pings: &[Ping]) {
    let lost = pings.iter().filter(|ping| ping.answers == 0).count();
    let twice = pings.iter().filter(|ping| ping.answers > 1).count();
    assert_eq!(
        (lost, twice),
        (0, 0),
        "of {} pings: {}",
        pings.len(),
        lost_at(pings)
    );
}

/// Describes the runs of pings with and without an answer: times since the start of the test, and the slowest answer.
fn lost_at(pings: &[Ping]) -> String {
    let Some(start) = pings.first().map(|ping| ping.sent) else {
        return String::new();
    };
    let runs = pings.chunk_by(|a, b| (a.answers == 0) == (b.answers == 0));
    let told = runs.map(|run| {
        let from = run[0].sent.duration_since(start);
        let to = run[run.len() - 1].sent.duration_since(start);
        let waits = run
            .iter()
            .filter_map(|ping| Some(ping.answered?.duration_since(ping.sent)));
        match waits.max() {
            Some(slowest) => format!("{} answered, at most {slowest:?} late", run.len()),
            None => format!("{} lost from {from:?} to {to:?}", run.len()),
        }
    });
    told.collect::<Vec<_>>().join(", ")
}

#[test]
fn a_move_that_fails_after_the_guest_stopped_gives_everything_back() -> io::Result<()> {
    let Some((lan, mut cluster)) = two_nodes(&[("vm::loaded", "1*sleep(1500)")])? else {
        return Ok(());
    };
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &load("tap=tap0"))?;
    let (talk, pinger) = outside(&lan)?;
    let command = cluster
        .node("a")
        .godwit(&["migrate", "vm/guest", "--to", "b"]);
    let moving = std::thread::spawn(move || command.json().is_ok());
    let holds = || (shown(cluster.node("a")).ok()?["mode"] == "buffering").then_some(());
    wait_for(Duration::from_secs(60), holds).expect("the guest stands still");
    std::thread::sleep(Duration::from_millis(200));
    cluster.node_mut("b").kill();
    assert!(!moving.join().expect("does not panic"), "the move fails");
    guest.alive()?;
    let nic = shown(cluster.node("a"))?;
    assert_eq!(nic["mode"], "releasing", "{nic}");
    assert!(nic["counters"]["held"].as_u64() > Some(0), "{nic}");
    lost_nothing(talk, pinger)?;
    // The remains at the destination are not in the way of the next attempt.
    cluster.node_mut("b").start(&[])?;
    guest.migrate(cluster.node("a"), "b", &[])?;
    guest.finish(cluster.node("b"))?;
    Ok(())
}

/// A NIC's mapping does not follow memory that moves under the guest, so such memory does not move. The memory may stay
/// in the pool, and then the client outside loses nothing.
#[test]
fn a_machine_with_a_nic_leaves_its_memory_in_the_pool() -> io::Result<()> {
    if !may_run() {
        return Ok(());
    }
    let lan = Lan::new(2)?;
    let pool = MemoryPool::new()?;
    let cluster = cluster_with(&lan, &[], Some(&pool))?;
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let machine = NodeMachine {
        memory_pool: Some(MemoryPool::NAME.to_owned()),
        ..NodeMachine::default()
    };
    let guest = NodeGuest::start_machine(&cluster, "a", (1, 64), &load("tap=tap0"), &machine)?;
    let (talk, pinger) = outside(&lan)?;
    let follows = ["migrate", "vm/guest", "--to", "b", "--memory", "zero-copy"];
    for words in [&follows[..], &["vm", "memory", "guest", "--to", "local"]] {
        let refused = a.refusal(words);
        println!("{refused}");
        let why = "NIC 0 uses the memory through a mapping that does not follow it";
        says(&refused, &[why]);
    }
    let (moved, _) = guest.migrate(a, "b", &["--memory", "zero-copy", "--stay-in-pool"])?;
    println!("{} ms", moved["blackout_ms"]);
    assert_eq!(guest.memory(b)?["bytes_in_pool"], guest.memory(b)?["bytes"]);
    lost_nothing(talk, pinger)?;
    guest.finish(b)?;
    Ok(())
}

/// Runs an idle machine, with this NIC.
fn run(node: &Node, name: &str, nic: &str) -> Result<Value, Failure> {
    let rest = [
        "--memory",
        "64MiB",
        "--accel",
        "tcg",
        "--",
        "-S",
        "-nodefaults",
    ];
    let words = [&["vm", "run", name, "--nic", nic], &rest[..]].concat();
    node.godwit(&words).json()
}

/// Runs `ip` on a host.
fn ip(host: &Namespace, words: &str) -> io::Result<()> {
    let mut command = host.command();
    command.arg("ip").args(words.split(' '));
    process::run(&mut command).map(drop)
}

/// Returns the number of RARP frames in a file of QEMU's `filter-dump`.
fn announcements(dump: &Path) -> usize {
    let bytes = std::fs::read(dump).unwrap_or_default();
    let frame = [&[0xff; 6][..], &OWN_MAC, &[0x80, 0x35]].concat();
    let windows = bytes.windows(frame.len());
    windows.filter(|window| *window == frame).count()
}

/// The address of a card served by QEMU itself.
const OWN_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 9];
/// Number of announcements of an arrived machine by QEMU itself.
const BY_ITSELF: usize = 5;

#[test]
fn a_move_says_what_a_card_of_qemus_own_loses_and_announces_it_when_the_machine_runs()
-> io::Result<()> {
    let cluster = Cluster::start(&["a", "b"])?;
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let dump = cluster.dir().join("own.pcap");
    let filter = format!("filter-dump,id=dump,netdev=own,file={}", dump.display());
    a.godwit(&[
        "vm",
        "run",
        "one",
        "--memory",
        "64MiB",
        "--accel",
        "tcg",
        "--",
        "-nodefaults",
        "-netdev",
        "hubport,id=own,hubid=0",
        "-device",
        "virtio-net-pci,netdev=own,mac=52:54:00:00:00:09,romfile=",
        "-object",
        &filter,
    ])
    .json()?;
    let moved = a.godwit(&["migrate", "vm/one", "--to", "b"]).json()?;
    let warnings = moved["warnings"].to_string();
    assert!(
        warnings.contains("(virtio-net-pci): QEMU itself serves it"),
        "{moved}"
    );
    let more = || (announcements(&dump) > BY_ITSELF).then_some(());
    assert!(
        wait_for(Duration::from_secs(10), more).is_some(),
        "{} announcements",
        announcements(&dump)
    );
    b.stop_vm("one");
    Ok(())
}

#[test]
fn what_is_missing_at_the_destination_is_named_before_anything_moves() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    run(a, "one", "tap=tap0")?;
    for (change, said) in [
        (
            "link set tap0 mtu 1400",
            "MTU of 1400 bytes there and of 1500",
        ),
        ("link set tap0 down", "tap tap0 is down"),
        ("link del tap0", "there is no interface tap0"),
    ] {
        ip(&lan.hosts()[1], change)?;
        let refused = a.refusal(&["migrate", "vm/one", "--to", "b"]);
        assert!(refused.contains(said), "{change}: {refused}");
        let nic = a.godwit(&["nic", "show", "one/0"]).json()?;
        assert!(
            nic["attached"] == true && nic["mode"] == "releasing",
            "{nic}"
        );
        b.refusal(&["vm", "show", "one"]);
    }
    a.stop_vm("one");
    Ok(())
}

#[test]
fn a_node_that_may_not_administer_the_network_says_so() -> io::Result<()> {
    if !may_run() {
        return Ok(());
    }
    let lan = Lan::new(1)?;
    let hosts = [("a", Some(&lan.hosts()[0]))];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    let limited = cluster.dir().join("limited");
    let program = cluster.node("a").spec().godwit.display().to_string();
    let script = format!("#!/bin/sh\nexec setpriv --bounding-set=-net_admin {program} \"$@\"\n");
    std::fs::write(&limited, script)?;
    std::fs::set_permissions(&limited, Permissions::from_mode(0o755))?;
    cluster.node_mut("a").spec_mut().godwit = limited;
    cluster.node_mut("a").start(&[])?;
    let a = cluster.node("a");
    ip(&lan.hosts()[0], "tuntap add theirs mode tap user 4711")?;
    ip(&lan.hosts()[0], "link set theirs up")?;
    for (nic, said) in [
        (
            "bridge=br0",
            "no tap can be made for bridge br0: the node lacks CAP_NET_ADMIN",
        ),
        ("tap=theirs", "tap theirs belongs to another user"),
    ] {
        let refused = run(a, "one", nic).expect_err(nic).to_string();
        assert!(refused.contains(said), "{nic}: {refused}");
        a.refusal(&["vm", "show", "one"]);
    }
    Ok(())
}

#[test]
fn a_nic_that_cannot_be_had_is_refused_in_a_sentence() -> io::Result<()> {
    // Two threads see the end of a machine's QEMU, and the slower one reports the stop.
    let Some((lan, cluster)) = two_nodes(&[("nics::ending", "sleep(300)")])? else {
        return Ok(());
    };
    let a = cluster.node("a");
    let mac = "mac=52:54:00:00:00:01";
    let run = |name: &str, nic: &str| run(a, name, nic);
    ip(&lan.hosts()[0], "tuntap add many0 mode tap multi_queue")?;
    ip(&lan.hosts()[0], "link set many0 up")?;
    // For a tap in use, the refusal would name only the use.
    let refused = run("one", "tap=tap0,queues=2").expect_err("has one queue");
    assert!(
        refused
            .to_string()
            .contains("is no tap with several queues"),
        "{refused}"
    );
    run("one", &format!("tap=tap0,{mac}"))?;
    for (nic, said) in [
        ("tap=missing", "there is no interface missing"),
        ("bridge=missing", "there is no bridge missing"),
        ("tap=up0", "is no tap"),
        ("bridge=tap0", "is no bridge"),
        ("tap=tap0", "in use"),
        ("tap=many0", "is no tap with a single queue"),
        ("bridge=br0,queues=9", "9 pairs of queues are too many"),
        ("bridge=br0,queues=0", "needs a pair of queues"),
        (&format!("bridge=br0,{mac}"), "has the MAC address"),
    ] {
        let refused = run("two", nic).expect_err(nic).to_string();
        assert!(refused.contains(said), "{nic}: {refused}");
    }
    run("many", "tap=many0,queues=2")?;
    let refused = run("two", "tap=many0,queues=2").expect_err("is taken");
    assert!(refused.to_string().contains("in use"), "{refused}");
    a.stop_vm("many");
    run("many", "tap=many0,queues=2")?;
    a.stop_vm("many");
    run("two", "bridge=br0")?;
    let nics = a.godwit(&["nic", "list"]).json()?;
    assert_eq!(nics.as_array().map(Vec::len), Some(2), "{nics}");
    // A tap is free as soon as the VM has ended.
    a.stop_vm("one");
    run("one", "tap=tap0")?;
    for vm in ["one", "two"] {
        a.stop_vm(vm);
    }
    Ok(())
}
