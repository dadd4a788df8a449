//! The machine, the client and the moves.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node, release_binary};
use godwit_testkit::network::{Lan, Pinger, Talk};
use godwit_testkit::process::wait_for;
use godwit_testkit::vm::{GuestLoad, GuestNetwork, NodeGuest, VM};
use serde_json::Value;

use crate::net::report::{Moved, Report};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO_PORT: u16 = 7000;
/// Rate of the conversation with the guest.
const BYTES_PER_SECOND: u64 = 1 << 20;
const PING_EVERY: Duration = Duration::from_millis(1);
/// Time before and after a move that counts as part of the move.
const AROUND: Duration = Duration::from_millis(500);
/// Longest time for the last answers.
const PATIENCE: Duration = Duration::from_secs(10);

/// Plays the scene.
///
/// # Errors
/// If the machine does not start or move.
pub(crate) fn play(moves: usize, disk_mib: u64) -> io::Result<Report> {
    let lan = Lan::new(2)?;
    let [a, b] = lan.hosts() else {
        return Err(io::Error::other("the network has not two hosts"));
    };
    let options = ClusterOptions {
        godwit: release_binary()?,
        tls: true,
    };
    let mut cluster = Cluster::prepare_on(&[("a", Some(a)), ("b", Some(b))], options)?;
    cluster.start_all()?;
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
    let guest = NodeGuest::start(&cluster, "a", 1, disk_mib, &load)?;
    let server = SocketAddr::from((GUEST, ECHO_PORT));
    let talk = Talk::start(lan.switch(), server, BYTES_PER_SECOND);
    // Pings before the client has resolved the guest's address would be lost at the client.
    let answers = || (talk.bytes() > 0).then_some(());
    wait_for(PATIENCE, answers).ok_or_else(|| io::Error::other("the guest does not answer"))?;
    let pinger = Pinger::start(lan.switch(), GUEST, PING_EVERY)?;
    let mut moved: Vec<(Moved, Range<usize>)> = Vec::new();
    let (mut from, mut to) = ("a", "b");
    for number in 1..=moves {
        std::thread::sleep(AROUND);
        let first = pinger
            .sent()
            .saturating_sub(AROUND.as_millis() as usize / 2);
        let held = held(cluster.node(from))?;
        let (shown, _) = guest.migrate(cluster.node(from), to, &[])?;
        std::thread::sleep(AROUND);
        let blackout = shown["blackout_ms"].as_f64();
        let blackout = blackout.ok_or_else(|| io::Error::other(format!("no blackout: {shown}")))?;
        let here = Moved {
            from: from.to_owned(),
            to: to.to_owned(),
            blackout_ms_guest: blackout,
            gap_ms_client: 0.0,
            packets_lost: 0,
            packets_twice: 0,
            connections_reset: u32::from(talk.has_ended()),
            held_packets: self::held(cluster.node(to))? - held,
        };
        println!(
            "move {number}: {from} -> {to}, the guest stood still for {blackout:.0} ms, {} packets were held",
            here.held_packets
        );
        moved.push((here, first..pinger.sent()));
        (from, to) = (to, from);
    }
    let talked = talk.finish()?;
    let pings = pinger.finish(PATIENCE)?;
    guest.finish(cluster.node(from))?;
    let moves = moved.into_iter().map(|(mut moved, range)| {
        moved.judge(&pings[range]);
        moved
    });
    let mut report = Report::new(moves.collect(), &pings, talked);
    for (name, place) in [("a", a), ("b", b), ("switch", lan.switch())] {
        let dropped = place.dropped()?;
        report.dropped_by_kernel.insert(name.to_owned(), dropped);
    }
    Ok(report)
}

/// Returns the number of packets held so far by the machine's NIC.
fn held(node: &Node) -> io::Result<u64> {
    let nic: Value = node.godwit(&["nic", "show", &format!("{VM}/0")]).json()?;
    let held = nic["counters"]["held"].as_u64();
    held.ok_or_else(|| io::Error::other(format!("no counter in {nic}")))
}
