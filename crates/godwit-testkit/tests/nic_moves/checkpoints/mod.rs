//! Machines whose checkpoints are kept at a second node: a client outside notices nothing but a pause when the host dies.

mod backup;
mod refused;
mod witness;

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::network::{Lan, Namespace, Talk};
use godwit_testkit::process::{end_machines_of, wait_for};
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM};

use super::{ECHO, GUEST, ip, load, may_run};

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

/// Returns what the protection says of an obstacle.
fn problem(node: &Node) -> String {
    let shown = &node.vm(VM)["protection"]["problem"];
    shown.as_str().unwrap_or_default().to_owned()
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

/// A machine at node `a`, and a client outside that talks to it. The hosts of the network are those of the nodes `a`, `b`
/// and so on, in this order.
struct Served {
    talk: Talk,
    guest: NodeGuest,
    cluster: Cluster,
    lan: Lan,
}

impl Served {
    /// Starts these nodes, after a change of their setup, and the machine; without root prints why not.
    fn start(
        nodes: &[&str],
        hosts: u8,
        load: &GuestLoad,
        prepare: impl FnOnce(&Lan, &mut Cluster) -> io::Result<()>,
    ) -> io::Result<Option<Self>> {
        if !may_run() {
            return Ok(None);
        }
        let lan = Lan::new(hosts)?;
        let on: Vec<_> = nodes
            .iter()
            .copied()
            .zip(lan.hosts().iter().map(Some))
            .collect();
        let mut cluster = Cluster::prepare_on(&on, ClusterOptions::secure()?)?;
        prepare(&lan, &mut cluster)?;
        cluster.start_all()?;
        let guest = NodeGuest::start(&cluster, "a", 1, 64, load)?;
        let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
        goes_on(&talk)?;
        Ok(Some(Self {
            talk,
            guest,
            cluster,
            lan,
        }))
    }

    /// Does the same with nodes of the usual setup.
    fn with(nodes: &[&str]) -> io::Result<Option<Self>> {
        Self::start(nodes, nodes.len() as u8, &load("tap=tap0"), |_, _| Ok(()))
    }

    fn node(&self, name: &str) -> &Node {
        self.cluster.node(name)
    }

    fn protect(&self, how: &[&str]) -> io::Result<()> {
        let protect = ["vm", "protect", VM, "--to", "b"];
        let shown = self.node("a").json(&[&protect[..], how].concat());
        assert_eq!(shown["protection"]["state"], "protected", "{shown}");
        comes_to(self.node("b"), "protected")
    }

    /// Waits until the conversation goes on with the machine at this node.
    fn goes_on_at(&self, node: &str) -> io::Result<()> {
        goes_on(&self.talk).map_err(|error| {
            let node = self.node(node);
            let shown = node.godwit(&["nic", "list"]).text();
            let shown = shown.unwrap_or_else(|error| error.to_string());
            let log = node.log_tail(40);
            io::Error::other(format!("node {}: {error}\n{shown}\n{log}", node.name()))
        })
    }

    /// Kills a node and its machines.
    fn kill_host(&mut self, node: &str) {
        self.cluster.node_mut(node).kill();
        end_machines_of(&self.node(node).spec().dir);
    }

    /// Kills the machine's host, and waits until the conversation goes on at the other one.
    fn host_dies(&mut self, from: &str, to: &str) -> io::Result<Duration> {
        let died = Instant::now();
        self.kill_host(from);
        self.goes_on_at(to)?;
        Ok(died.elapsed())
    }

    /// Starts the other node, and waits until the machine is protected.
    fn protected_again(&mut self, here: &str, there: &str) -> io::Result<()> {
        self.cluster.node_mut(there).start(&[])?;
        comes_to(self.node(here), "protected")
    }

    /// Waits until the conversation goes on. Returns the only node that has the machine: the guest of a severed node may
    /// run, and nobody hears of it.
    fn goes_on_once(&self) -> io::Result<&'static str> {
        goes_on(&self.talk)?;
        let has_it = |node: &&str| {
            let shown = self.node(node).vm(VM);
            shown["state"] == "running" && shown["protection"]["state"] != "severed"
        };
        let here: Vec<_> = ["a", "b"].into_iter().filter(has_it).collect();
        println!("the machine goes on at {here:?}");
        assert_eq!(here.len(), 1, "{here:?}");
        Ok(here[0])
    }

    /// Ends the protection, the conversation and the guest, of which nothing was lost.
    fn finish(self, at: &str) -> io::Result<()> {
        self.node(at).text(&["vm", "unprotect", VM]);
        goes_on(&self.talk)?;
        let talked = self.talk.finish()?;
        assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
        self.guest.finish(self.cluster.node(at))?;
        Ok(())
    }
}

/// Cuts the way between two hosts, or mends it: their other ways stay.
fn way(lan: &Lan, between: [usize; 2], does: Way) -> io::Result<()> {
    let [one, other] = between.map(|number| &lan.hosts()[number]);
    let does = match does {
        Way::Cut => "add",
        Way::Mended => "del",
    };
    let route = |from: &Namespace, to: &Namespace| {
        ip(from, &format!("route {does} blackhole {}", to.address()))
    };
    route(one, other)?;
    route(other, one)
}

#[derive(Clone, Copy)]
enum Way {
    Cut,
    Mended,
}

#[test]
fn a_client_outside_keeps_its_connection_when_the_host_dies_there_and_back() -> io::Result<()> {
    let Some(mut served) = Served::with(&["a", "b"])? else {
        return Ok(());
    };
    served.protect(&[&["--frequency", "20"], &CONTINUE[..]].concat())?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        comes_to(served.node(from), "protected")?;
        std::thread::sleep(WATCHED);
        println!("{}", served.node(from).vm(VM)["protection"]);
        let gap = served.host_dies(from, to)?;
        println!("the conversation stood still for at most {gap:?}");
        served.protected_again(to, from)?;
        let moves = served.node(to).json(&["migration", "list"]);
        let mut all = moves.as_array().into_iter().flatten();
        let back = all.find(|it| it["from"] == to);
        let by = back.map(|it| &it["progress"]["delta"]["by"]);
        let compared = by.is_none_or(|by| by != "written");
        assert!(!compared, "the disk was compared: {moves}");
    }
    served.finish("a")
}

#[test]
#[ignore = "slow: hosts die"]
fn a_card_that_qemu_serves_keeps_its_connections_when_hosts_die() -> io::Result<()> {
    let mut load = load("");
    let network = load.network.as_mut().expect("a network");
    network.own_card = String::from(
        "-netdev tap,id=own,ifname=tap0,script=no,downscript=no,vhost=off \
         -device virtio-net-pci,netdev=own,mac=52:54:00:80:00:10,romfile=",
    );
    let Some(mut served) = Served::start(&["a", "b"], 2, &load, |_, _| Ok(()))? else {
        return Ok(());
    };
    served.protect(&[&["--frequency", "20"], &CONTINUE[..]].concat())?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        comes_to(served.node(from), "protected")?;
        std::thread::sleep(WATCHED);
        let gap = served.host_dies(from, to)?;
        println!("the conversation stood still for at most {gap:?}");
        served.protected_again(to, from)?;
    }
    served.finish("a")
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
    let Some(mut served) = Served::with(&["a", "b"])? else {
        return Ok(());
    };
    let at = |point: &str| format!("checkpoint::{point}");
    // Longer than the start of a node on a busy host.
    served.protect(&[&CONTINUE[..], &["--heartbeat-timeout", "8s"]].concat())?;
    let (mut here, mut there) = ("a", "b");
    for point in primary {
        // The backup's node starts again with the point set, and then the machine comes to it.
        served
            .cluster
            .restart(there, &[(&at(point), "60*off->pause")]);
        comes_to(served.node(here), "protected")?;
        served.host_dies(here, there)?;
        (here, there) = (there, here);
        served.protected_again(here, there)?;
        stands_still(&served.talk)?;
        let gap = served.host_dies(here, there)?;
        println!("the primary died at {point}: {gap:?}");
        (here, there) = (there, here);
        served.protected_again(here, there)?;
    }
    for point in backup {
        served
            .cluster
            .restart(there, &[(&at(point), "60*off->pause")]);
        comes_to(served.node(here), "protected")?;
        stands_still(&served.talk)?;
        served.kill_host(there);
        goes_on(&served.talk)?;
        println!("the backup died at {point}");
        served.protected_again(here, there)?;
    }
    // The process of the node alone: its QEMU goes on.
    let qemu = served.node(here).qemu();
    served.cluster.die_and_start(here);
    served.goes_on_at(here)?;
    comes_to(served.node(here), "protected")?;
    assert_eq!(served.node(here).qemu(), qemu, "the same machine goes on");
    // The machine alone: its node lives, and leaves the machine to the backup.
    let died = Instant::now();
    end_machines_of(&served.node(here).spec().dir);
    (here, there) = (there, here);
    served.goes_on_at(here).map_err(|error| {
        io::Error::other(format!("{error}\n{}", served.node(there).log_tail(30)))
    })?;
    println!("the machine died: {:?}", died.elapsed());
    comes_to(served.node(here), "protected")?;
    assert_eq!(served.node(there).vm_state(VM), "backup");
    // The QEMU that waits at the backup.
    end_machines_of(&served.node(there).spec().dir);
    std::thread::sleep(STILL);
    served.goes_on_at(here)?;
    comes_to(served.node(here), "protected")?;
    let talked = served.talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    stays_off(&served.cluster, &served.guest, here, there)
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
