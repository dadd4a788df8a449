//! A card with two queue pairs, of which its guest uses both or one.

use godwit_testkit::scenario::says;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::network::{Lan, Pinger, Talk};
use godwit_testkit::process::wait_for;
use godwit_testkit::vm::{NodeGuest, NodeMachine};
use serde_json::Value;

use super::{ECHO, GUEST, PING_EVERY, answered_once, load, shown, two_nodes};

/// Conversations at a time: enough for each of two processors to have some.
const TALKS: usize = 4;

/// Longest wait for an event that takes a moment when nothing is wrong.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a guest with two processors at the first node, and conversations with it.
fn begin(lan: &Lan, cluster: &Cluster) -> io::Result<(NodeGuest, Vec<Talk>)> {
    let machine = NodeMachine {
        cpus: 2,
        ..NodeMachine::default()
    };
    let load = load("bridge=br0,queues=2");
    let guest = NodeGuest::start_machine(cluster, "a", (1, 64), &load, &machine)?;
    let talk = || Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 256 << 10);
    Ok((guest, (0..TALKS).map(|_| talk()).collect()))
}

/// Expects every conversation to go on.
fn go_on(talks: &[Talk], after: &str) {
    let before: Vec<u64> = talks.iter().map(Talk::bytes).collect();
    let all_do = || {
        let mut all = talks.iter().zip(&before);
        all.all(|(talk, before)| talk.bytes() > *before)
            .then_some(())
    };
    wait_for(PATIENCE, all_do)
        .unwrap_or_else(|| panic!("a conversation stands still after {after}"));
}

/// Expects all conversations to end without a break or wrong bytes.
fn end(talks: Vec<Talk>) -> io::Result<()> {
    for talk in talks {
        let talked = talk.finish()?;
        assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    }
    Ok(())
}

#[test]
fn a_guest_that_uses_two_pairs_of_queues_moves_there_and_back() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let (guest, talks) = begin(&lan, &cluster)?;
    let pinger = Pinger::start(lan.switch(), GUEST, PING_EVERY)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let both_used = || {
            let nic = shown(cluster.node(from)).ok()?;
            let pairs = nic["queues"].as_array()?;
            let works = |pair: &Value| {
                let some = |way: &str| pair[way].as_u64() > Some(20);
                pair["used"] == true && some("sent_packets") && some("received_packets")
            };
            (pairs.len() == 2 && pairs.iter().all(works)).then_some(())
        };
        let worked = wait_for(PATIENCE, both_used);
        worked.unwrap_or_else(|| panic!("both pairs work: {:?}", shown(cluster.node(from))));
        let (moved, _) = guest.migrate(cluster.node(from), to, &[])?;
        println!("{} {}", moved["blackout_ms"], shown(cluster.node(to))?);
        go_on(&talks, "a move");
        let counters = &shown(cluster.node(to))?["counters"];
        assert_eq!(counters["held_overflow"], 0, "{counters}");
    }
    end(talks)?;
    let pings = pinger.finish(Duration::from_secs(5))?;
    answered_once(&pings);
    guest.finish(cluster.node("a"))?;
    Ok(())
}

#[test]
fn connections_go_on_when_their_guest_uses_fewer_queues_or_attaches_a_program_to_its_card()
-> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let (guest, talks) = begin(&lan, &cluster)?;
    go_on(&talks, "the start");
    let tell = |command: &str| {
        let said = guest.console.card(command, PATIENCE);
        go_on(&talks, command);
        said
    };
    assert_eq!(tell("channels 1")?, "channels: done");
    guest.migrate(cluster.node("a"), "b", &[])?;
    go_on(&talks, "a move with one pair");
    assert_eq!(tell("channels 2")?, "channels: done");
    // The card cannot be told to bring whole packets only, which such a program needs.
    let refused = tell("xdp driver")?;
    says(&refused, &["not supported"]);
    assert_eq!(tell("xdp stack")?, "xdp: done");
    guest.migrate(cluster.node("b"), "a", &[])?;
    go_on(&talks, "a move with a program");
    end(talks)?;
    guest.finish(cluster.node("a"))?;
    Ok(())
}
