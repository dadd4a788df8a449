//! Machines whose checkpoints are kept at a second node: a client outside notices nothing but a pause when the host dies.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::Node;
use godwit_testkit::network::Talk;
use godwit_testkit::process::{end_machines_of, wait_for};
use godwit_testkit::vm::{NodeGuest, VM};

use super::{ECHO, GUEST, load, two_nodes};

/// Longest wait for a state of the protection.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time for which a machine is watched.
const WATCHED: Duration = Duration::from_secs(3);

fn comes_to(node: &Node, wanted: &str) -> io::Result<()> {
    let is_so = || (node.vm(VM)["protection"]["state"] == wanted).then_some(());
    wait_for(PATIENCE, is_so).ok_or_else(|| {
        let (name, shown, log) = (node.name(), node.vm(VM), node.log_tail(40));
        io::Error::other(format!(
            "node {name} does not come to {wanted}: {shown}\n{log}"
        ))
    })
}

/// Waits until the conversation goes on.
fn goes_on(talk: &Talk) -> io::Result<()> {
    let before = talk.bytes();
    let more = || (talk.bytes() > before + (64 << 10)).then_some(());
    wait_for(PATIENCE, more).ok_or_else(|| io::Error::other("the conversation does not go on"))
}

/// Kills the machine's host, and waits until the conversation goes on at the other one.
fn host_dies(cluster: &mut Cluster, from: &str, to: &str, talk: &Talk) -> io::Result<Duration> {
    goes_on(talk)?;
    let died = Instant::now();
    cluster.node_mut(from).kill();
    end_machines_of(&cluster.node(from).spec().dir);
    let node = cluster.node(to);
    goes_on(talk).map_err(|error| {
        let shown = node.godwit(&["nic", "list"]).text();
        let shown = shown.unwrap_or_else(|error| error.to_string());
        io::Error::other(format!("{error}\n{shown}\n{}", node.log_tail(20)))
    })?;
    Ok(died.elapsed())
}

#[test]
fn a_client_outside_keeps_its_connection_when_the_host_dies_there_and_back() -> io::Result<()> {
    let Some((lan, mut cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &load("tap=tap0"))?;
    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
    goes_on(&talk)?;
    let how = ["--to", "b", "--frequency", "20", "--when-alone", "continue"];
    let shown = cluster
        .node("a")
        .json(&[&["vm", "protect", VM], &how[..]].concat());
    assert_eq!(shown["protection"]["state"], "protected", "{shown}");
    for (from, to) in [("a", "b"), ("b", "a")] {
        comes_to(cluster.node(from), "protected")?;
        std::thread::sleep(WATCHED);
        println!("{}", cluster.node(from).vm(VM)["protection"]);
        let gap = host_dies(&mut cluster, from, to, &talk)?;
        println!("the conversation stood still for at most {gap:?}");
        cluster.node_mut(from).start(&[])?;
    }
    comes_to(cluster.node("a"), "protected")?;
    cluster.node("a").text(&["vm", "unprotect", VM]);
    goes_on(&talk)?;
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    guest.finish(cluster.node("a"))?;
    Ok(())
}
