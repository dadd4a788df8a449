//! Machines whose checkpoints are kept at a second node: a client outside notices nothing but a pause when the host dies.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::network::{Lan, Talk};
use godwit_testkit::process::{end_machines_of, wait_for};
use godwit_testkit::vm::{NodeGuest, VM};

use super::{ECHO, GUEST, ip, load, may_run, two_nodes};

const CONTINUE: [&str; 2] = ["--when-alone", "continue"];
/// Longest wait for a state of the protection.
const PATIENCE: Duration = Duration::from_secs(120);
/// Silence after which a conversation stands still.
const STILL: Duration = Duration::from_millis(700);
/// Time for which a machine is watched.
const WATCHED: Duration = Duration::from_secs(1);

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

/// Waits until nothing of the conversation passes any more: a node stands still at a fail point.
fn stands_still(talk: &Talk) -> io::Result<()> {
    let rests = || {
        let before = talk.bytes();
        std::thread::sleep(STILL);
        (talk.bytes() == before).then_some(())
    };
    wait_for(PATIENCE, rests).ok_or_else(|| io::Error::other("no node stands still"))
}

fn protect(cluster: &Cluster, decides: [&str; 2]) -> io::Result<()> {
    let how = ["vm", "protect", VM, "--to", "b", "--frequency", "20"];
    let a = cluster.node("a");
    let shown = a.json(&[&how[..], &decides].concat());
    assert_eq!(shown["protection"]["state"], "protected", "{shown}");
    comes_to(cluster.node("b"), "protected")
}

/// Waits until the conversation goes on with the machine at this node.
fn goes_on_at(node: &Node, talk: &Talk) -> io::Result<()> {
    goes_on(talk).map_err(|error| {
        let shown = node.godwit(&["nic", "list"]).text();
        let shown = shown.unwrap_or_else(|error| error.to_string());
        let log = node.log_tail(40);
        io::Error::other(format!("node {}: {error}\n{shown}\n{log}", node.name()))
    })
}

/// Kills a node and its machines.
fn kill_host(cluster: &mut Cluster, node: &str) {
    cluster.node_mut(node).kill();
    end_machines_of(&cluster.node(node).spec().dir);
}

/// Kills the machine's host, and waits until the conversation goes on at the other one.
fn host_dies(cluster: &mut Cluster, from: &str, to: &str, talk: &Talk) -> io::Result<Duration> {
    let died = Instant::now();
    kill_host(cluster, from);
    goes_on_at(cluster.node(to), talk)?;
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
        comes_to(cluster.node(to), "protected")?;
        let moves = cluster.node(to).json(&["migration", "list"]);
        let back = moves
            .as_array()
            .and_then(|all| all.iter().find(|it| it["from"] == to));
        let by = back.map(|it| &it["progress"]["delta"]["by"]);
        assert!(
            by.is_some_and(|by| by == "written"),
            "nothing is compared: {moves}"
        );
    }
    cluster.node("a").text(&["vm", "unprotect", VM]);
    goes_on(&talk)?;
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    guest.finish(cluster.node("a"))?;
    Ok(())
}

/// Lets the guest shut down by itself: it stays off, and its backup does not bring it back.
fn stays_off(cluster: &Cluster, guest: &NodeGuest, here: &str, there: &str) -> io::Result<()> {
    let takeovers = || {
        cluster
            .node(there)
            .log()
            .matches("takes the VM over")
            .count()
    };
    let before = takeovers();
    guest.finish(cluster.node(here))?;
    std::thread::sleep(WATCHED);
    assert_eq!(takeovers(), before, "{}", cluster.node(there).log_tail(20));
    assert_eq!(cluster.node(here).vm_state(VM), "stopped");
    cluster.node(here).text(&["vm", "unprotect", VM]);
    Ok(())
}

/// The points at which the processes of a protected machine die, the primary's first. Each is passed some times before.
const PRIMARY_DIES: [&str; 3] = ["before-stop", "stopped", "captured"];
const BACKUP_DIES: [&str; 2] = ["whole", "acknowledged"];

/// Kills primaries and backups at each point of a checkpoint, one after the other.
fn dies_everywhere(primary: &[&str], backup: &[&str]) -> io::Result<()> {
    let Some((lan, mut cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let at = |point: &str| format!("checkpoint::{point}");
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &load("tap=tap0"))?;
    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
    goes_on(&talk)?;
    protect(&cluster, CONTINUE)?;
    let (mut here, mut there) = ("a", "b");
    for point in primary {
        // The backup's node starts again with the point set, and then the machine comes to it.
        cluster
            .node_mut(there)
            .restart(&[(&at(point), "60*off->pause")]);
        comes_to(cluster.node(here), "protected")?;
        host_dies(&mut cluster, here, there, &talk)?;
        cluster.node_mut(here).start(&[])?;
        (here, there) = (there, here);
        comes_to(cluster.node(here), "protected")?;
        stands_still(&talk)?;
        let gap = host_dies(&mut cluster, here, there, &talk)?;
        println!("the primary died at {point}: {gap:?}");
        cluster.node_mut(here).start(&[])?;
        (here, there) = (there, here);
        comes_to(cluster.node(here), "protected")?;
    }
    for point in backup {
        cluster
            .node_mut(there)
            .restart(&[(&at(point), "60*off->pause")]);
        comes_to(cluster.node(here), "protected")?;
        stands_still(&talk)?;
        kill_host(&mut cluster, there);
        goes_on(&talk)?;
        println!("the backup died at {point}");
        cluster.node_mut(there).start(&[])?;
        comes_to(cluster.node(here), "protected")?;
    }
    // The process of the node alone: its QEMU goes on.
    let qemu = cluster.node(here).qemu();
    cluster.node_mut(here).die_and_start();
    goes_on_at(cluster.node(here), &talk)?;
    comes_to(cluster.node(here), "protected")?;
    assert_eq!(cluster.node(here).qemu(), qemu, "the same machine goes on");
    // The machine alone: its node lives, and leaves the machine to the backup.
    let died = Instant::now();
    end_machines_of(&cluster.node(here).spec().dir);
    (here, there) = (there, here);
    goes_on_at(cluster.node(here), &talk).map_err(|error| {
        io::Error::other(format!("{error}\n{}", cluster.node(there).log_tail(30)))
    })?;
    println!("the machine died: {:?}", died.elapsed());
    comes_to(cluster.node(here), "protected")?;
    assert_eq!(cluster.node(there).vm_state(VM), "backup");
    // The QEMU that waits at the backup.
    end_machines_of(&cluster.node(there).spec().dir);
    std::thread::sleep(STILL);
    goes_on_at(cluster.node(here), &talk)?;
    comes_to(cluster.node(here), "protected")?;
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    stays_off(&cluster, &guest, here, there)
}

#[test]
fn a_client_outside_loses_nothing_when_a_node_dies_amid_a_checkpoint() -> io::Result<()> {
    dies_everywhere(&[], &BACKUP_DIES[..1])
}

#[test]
#[ignore = "takes minutes"]
fn a_client_outside_loses_nothing_wherever_a_node_dies() -> io::Result<()> {
    dies_everywhere(&PRIMARY_DIES, &BACKUP_DIES)
}

/// Both nodes live and reach the witness and the client, but not each other.
#[test]
fn one_node_goes_on_when_the_link_between_both_is_cut() -> io::Result<()> {
    if !may_run() {
        return Ok(());
    }
    let lan = Lan::new(3)?;
    let hosts = ["a", "b", "c"].into_iter().zip(lan.hosts());
    let hosts: Vec<_> = hosts.map(|(name, host)| (name, Some(host))).collect();
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    for node in ["a", "b", "c"] {
        cluster.node_mut(node).start(&[])?;
    }
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &load("tap=tap0"))?;
    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
    goes_on(&talk)?;
    protect(&cluster, ["--witness", "node:c"])?;
    let [a, b, _] = lan.hosts() else {
        return Err(io::Error::other("three hosts"));
    };
    for (host, other) in [(a, "10.80.0.2"), (b, "10.80.0.1")] {
        ip(host, &format!("route add blackhole {other}"))?;
    }
    stands_still(&talk)?;
    goes_on(&talk)?;
    let has_it = |node: &&str| cluster.node(node).vm_state(VM) == "running";
    let here: Vec<_> = ["a", "b"].into_iter().filter(has_it).collect();
    println!("the machine goes on at {here:?}");
    assert_eq!(here.len(), 1, "{here:?}");
    for (host, other) in [(a, "10.80.0.2"), (b, "10.80.0.1")] {
        ip(host, &format!("route del blackhole {other}"))?;
    }
    comes_to(cluster.node(here[0]), "protected")?;
    goes_on(&talk)?;
    cluster.node(here[0]).text(&["vm", "unprotect", VM]);
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    guest.finish(cluster.node(here[0]))?;
    Ok(())
}

#[test]
fn what_stands_in_the_way_of_checkpoints_is_named() -> io::Result<()> {
    let cluster = Cluster::start(&["a", "b"])?;
    let a = cluster.node("a");
    a.create_disk("own", "1MiB");
    let run = [
        "vm", "run", VM, "--memory", "64MiB", "--accel", "tcg", "--disk", "own",
    ];
    let card = "virtio-net-pci,netdev=own,romfile=";
    let rest = [
        "--",
        "-S",
        "-nodefaults",
        "-netdev",
        "hubport,id=own,hubid=0",
        "-device",
        card,
    ];
    a.json(&[&run[..], &rest].concat());
    let protect = ["vm", "protect", VM, "--to", "b", "--when-alone", "stop"];
    a.refuses(
        &protect,
        &[
            "its guest does not run",
            "QEMU itself serves its network card (virtio-net-pci), whose packets cannot be held back",
            "nothing was changed",
        ],
    );
    a.refuses(
        &[&protect[..], &["--frequency", "101"]].concat(),
        &["give 1 to 100"],
    );
    let both = [&protect[..], &["--frequency", "20", "--restart"]].concat();
    a.refuses(&both, &["cannot be used with"]);
    assert_eq!(a.vm(VM)["protection"], serde_json::Value::Null);
    a.stop_vm(VM);
    Ok(())
}
