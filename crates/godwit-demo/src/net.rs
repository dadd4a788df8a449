//! A machine whose NIC moves along, there and back between two nodes on two hosts of one network. A client outside
//! holds a TCP conversation of which every byte is checked, and sends a thousand pings a second.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use clap::Args;
use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::network::{Lan, Ping, Pinger, Talk, Talked};
use godwit_testkit::process::wait_for;
use godwit_testkit::report::{Report, Target};
use godwit_testkit::vm::{GuestLoad, GuestNetwork, NodeGuest, VM};
use serde_json::{Value, json};

use crate::vm::figure;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO_PORT: u16 = 7000;
/// Rate of the conversation with the guest.
const BYTES_PER_SECOND: u64 = 1 << 20;
const PING_EVERY: Duration = Duration::from_millis(1);
/// Time before and after a move that counts as part of the move.
const AROUND: Duration = Duration::from_millis(500);
/// Longest time for the last answers.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest median excess of the client's gap over the guest's blackout, in milliseconds.
const GAP_GOAL: f64 = 30.0;

/// Figures of a move. The blackout lasts from QEMU's stop at the source to QEMU's start at the destination; the gap is
/// the client's longest time without an answer.
const FIGURES: &str = "blackout_ms_guest ms, gap_ms_client ms, gap_beyond_blackout_ms ms, packets_lost, packets_twice, \
    held_packets";

/// Moves a virtual machine between two hosts while a client outside watches the network
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of moves
    #[arg(long, default_value_t = 20)]
    moves: usize,
    /// MiB of the machine's disk
    #[arg(long, default_value_t = 64)]
    disk_mib: u64,
}

pub(crate) fn play(arguments: &Arguments) -> io::Result<()> {
    let mut report = Report::new("demo-net", &["qemu-system-x86_64"])?;
    report.table("moves", "from, to", FIGURES, "");
    let lan = Lan::new(2)?;
    let [a, b] = lan.hosts() else {
        return Err(io::Error::other("the network has not two hosts"));
    };
    let hosts = [("a", Some(a)), ("b", Some(b))];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::release()?)?;
    cluster.start_all()?;
    let guest = start(&cluster, arguments.disk_mib)?;
    let server = SocketAddr::from((GUEST, ECHO_PORT));
    let talk = Talk::start(lan.switch(), server, BYTES_PER_SECOND);
    // Pings before the client has resolved the guest's address would be lost at the client.
    let answers = || (talk.bytes() > 0).then_some(());
    wait_for(PATIENCE, answers).ok_or_else(|| io::Error::other("the guest does not answer"))?;
    let pinger = Pinger::start(lan.switch(), GUEST, PING_EVERY)?;
    let mut moves = Vec::new();
    let (mut from, mut to) = ("a", "b");
    for _ in 0..arguments.moves {
        moves.push(move_once(&cluster, (from, to), &guest, &talk, &pinger)?);
        (from, to) = (to, from);
    }
    let talked = talk.finish()?;
    let pings = pinger.finish(PATIENCE)?;
    guest.finish(cluster.node(from))?;
    for (mut run, range) in moves {
        judge(&mut run, &pings[range]);
        report.add("moves", run)?;
    }
    // Packets without a receiver are among the dropped ones, which show the place of a loss.
    for (name, place) in [("a", a), ("b", b), ("switch", lan.switch())] {
        report.fact(
            &format!("dropped_by_kernel_{name}"),
            json!(place.dropped()?),
        );
    }
    conclude(&mut report, &pings, &talked)
}

fn start(cluster: &Cluster, disk_mib: u64) -> io::Result<NodeGuest> {
    let load = GuestLoad {
        file_mb: 8,
        memory_mb: 8,
        network: Some(GuestNetwork {
            nic: format!("tap={}", Lan::TAP),
            address: format!("{GUEST}/24"),
            echo_port: ECHO_PORT,
            ..GuestNetwork::default()
        }),
        ..GuestLoad::default()
    };
    NodeGuest::start(cluster, "a", 1, disk_mib, &load)
}

/// Moves the machine. Returns the run, and the numbers of the pings that left meanwhile.
fn move_once(
    cluster: &Cluster,
    (from, to): (&str, &str),
    guest: &NodeGuest,
    talk: &Talk,
    pinger: &Pinger,
) -> io::Result<(Value, Range<usize>)> {
    std::thread::sleep(AROUND);
    let first = pinger
        .sent()
        .saturating_sub(AROUND.as_millis() as usize / 2);
    let before = held(cluster.node(from))?;
    let (shown, _) = guest.migrate(cluster.node(from), to, &[])?;
    std::thread::sleep(AROUND);
    let run = json!({
        "from": from, "to": to, "blackout_ms_guest": figure(&shown, "blackout_ms")?,
        "connections_reset": u32::from(talk.has_ended()), "held_packets": held(cluster.node(to))? - before,
    });
    println!("{from} -> {to}");
    Ok((run, first..pinger.sent()))
}

/// Adds the outcome of the pings that left from shortly before the move until shortly after.
fn judge(run: &mut Value, pings: &[Ping]) {
    let (lost, twice) = faults(pings);
    let mut answers: Vec<_> = pings.iter().filter_map(|ping| ping.answered).collect();
    answers.sort_unstable();
    let gaps = answers.windows(2).map(|pair| pair[1] - pair[0]);
    let gap = gaps.max().unwrap_or_default().as_secs_f64() * 1000.0;
    let blackout = run["blackout_ms_guest"].as_f64().unwrap_or_default();
    run["packets_lost"] = lost.into();
    run["packets_twice"] = twice.into();
    run["gap_ms_client"] = gap.into();
    run["gap_beyond_blackout_ms"] = (gap - blackout).into();
}

/// Returns the number of lost pings, and of pings answered more than once.
fn faults(pings: &[Ping]) -> (usize, usize) {
    let lost = pings.iter().filter(|ping| ping.answers == 0).count();
    (lost, pings.iter().filter(|ping| ping.answers > 1).count())
}

/// Adds the figures of all moves, and those between the moves. The client's waiting time is no problem.
fn conclude(report: &mut Report, pings: &[Ping], talked: &Talked) -> io::Result<()> {
    let moves = report.runs("moves");
    let beyond = moves.median("gap_beyond_blackout_ms");
    let (blackout, gap) = (
        moves.median("blackout_ms_guest"),
        moves.median("gap_ms_client"),
    );
    let moved = !moves.0.is_empty();
    report.fact("blackout_ms_guest", blackout);
    report.fact("gap_ms_client", gap);
    report.fact("gap_beyond_blackout_ms", beyond);
    let name = "median time for which the client misses the guest beyond its blackout, ms";
    report.targets.push(Target::at_most(name, GAP_GOAL, beyond));
    let (lost, twice) = faults(pings);
    for (name, count) in [
        ("pings", pings.len() as u64),
        ("pings_lost", lost as u64),
        ("pings_twice", twice as u64),
        ("bytes_checked", talked.bytes),
        ("bytes_wrong", talked.wrong),
        ("connections_reset", u64::from(talked.reset)),
    ] {
        report.fact(name, count);
    }
    report.check(moved, "nothing moved");
    report.check(lost == 0, format!("{lost} pings were lost"));
    report.check(twice == 0, format!("{twice} pings were answered twice"));
    report.check(!talked.reset, "the connection was reset");
    report.check(
        talked.wrong == 0,
        format!("{} bytes were wrong", talked.wrong),
    );
    report.check(talked.bytes > 0, "no byte was checked");
    report.conclude()
}

/// Returns the number of packets held so far by the machine's NIC.
fn held(node: &Node) -> io::Result<u64> {
    let nic: Value = node.godwit(&["nic", "show", &format!("{VM}/0")]).json()?;
    let held = nic["counters"]["held"].as_u64();
    held.ok_or_else(|| io::Error::other(format!("no counter in {nic}")))
}
