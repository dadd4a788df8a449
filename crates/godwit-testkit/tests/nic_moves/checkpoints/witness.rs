//! Witnesses that die or are cut off while a machine is protected.

use std::io;
use std::process::{Command, Stdio};

use godwit_testkit::cluster::{ClusterOptions, issue};
use godwit_testkit::network::{Lan, Namespace};
use godwit_testkit::process::{Process, run, wait_for};
use godwit_testkit::scenario::other;
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM};
use godwit_testkit::{Cluster, Node};

use super::super::{load, may_run};
use super::{PATIENCE, Served, WATCHED, Way, comes_to, goes_on, problem, stands_still, way};

const THIRD: [&str; 2] = ["--witness", "node:c"];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// Waits until the protection says this.
fn tells(node: &Node, words: &str) -> io::Result<()> {
    let is_so = || problem(node).contains(words).then_some(());
    wait_for(PATIENCE, is_so).ok_or_else(|| {
        let (name, shown) = (node.name(), node.vm(VM));
        io::Error::other(format!("node {name} does not tell '{words}': {shown}"))
    })
}

/// A host dies while the witness is dead: the machine waits for the witness.
fn waits_for_its_witness(served: &mut Served) -> io::Result<()> {
    served.kill_host("a");
    comes_to(served.node("b"), "severed")?;
    stands_still(&served.talk)?;
    assert_eq!(served.node("b").vm_state(VM), "backup");
    println!("{}", problem(served.node("b")));
    Ok(())
}

#[test]
fn a_machine_whose_witness_died_waits_for_it_when_the_host_dies() -> io::Result<()> {
    let Some(mut served) = Served::with(&["a", "b", "c"])? else {
        return Ok(());
    };
    served.protect(&THIRD)?;
    served.cluster.node_mut("c").kill();
    tells(served.node("a"), "node 'c'")?;
    std::thread::sleep(WATCHED);
    goes_on(&served.talk)?;
    for node in ["a", "b"] {
        comes_to(served.node(node), "protected")?;
    }
    waits_for_its_witness(&mut served)?;
    tells(served.node("b"), "node 'c'")?;
    served.cluster.node_mut("c").start(&[])?;
    served.goes_on_at("b")?;
    served.protected_again("b", "a")?;
    served.finish("b")
}

#[test]
fn the_node_that_reaches_the_witness_goes_on_when_the_link_is_cut() -> io::Result<()> {
    let Some(served) = Served::with(&["a", "b", "c"])? else {
        return Ok(());
    };
    served.protect(&THIRD)?;
    let lan = &served.lan;
    let mut here = "a";
    for alone in ["neither", "primary", "backup"] {
        let host = |node: &str| if node == "a" { A } else { B };
        let cut_off = match alone {
            "primary" => Some(here),
            "backup" => Some(other(here)),
            _ => None,
        };
        if let Some(node) = cut_off {
            way(lan, [host(node), C], Way::Cut)?;
        }
        goes_on(&served.talk)?;
        way(lan, [A, B], Way::Cut)?;
        stands_still(&served.talk)?;
        here = served.goes_on_once()?;
        println!("{alone} was without the witness");
        if let Some(node) = cut_off {
            assert_eq!(here, other(node), "it reaches the witness");
            way(lan, [host(node), C], Way::Mended)?;
        }
        way(lan, [A, B], Way::Mended)?;
        comes_to(served.node(here), "protected")?;
    }
    served.finish(here)
}

/// An etcd with one member on a host, which ends with this value.
struct Etcd {
    command: Command,
    process: Option<Process>,
}

impl Etcd {
    /// The port for clients.
    const PORT: u16 = 2379;

    /// Prepares an etcd with a certificate of the cluster's authority, and tells the nodes of this authority.
    fn new(host: &Namespace, cluster: &mut Cluster) -> io::Result<Self> {
        let program = run(&mut Command::new(
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-etcd"),
        ))?;
        let (address, certificates) = (host.address().to_string(), cluster.certificates());
        issue(
            &cluster.options().godwit,
            certificates,
            "etcd",
            &["--ip", &address],
        )?;
        let options = cluster.dir().join("etcd-options");
        let authority = certificates.join("ca.pem");
        std::fs::write(&options, format!("ca = {}\n", authority.display()))?;
        let url = format!("https://{address}:{}", Self::PORT);
        let mut command = host.command();
        command.arg(String::from_utf8_lossy(&program.stdout).trim());
        for (option, value) in [
            ("data-dir", cluster.dir().join("etcd").display().to_string()),
            (
                "cert-file",
                certificates.join("etcd.pem").display().to_string(),
            ),
            (
                "key-file",
                certificates.join("etcd.key").display().to_string(),
            ),
            ("listen-client-urls", url.clone()),
            ("advertise-client-urls", url),
        ] {
            command.arg(format!("--{option}={value}"));
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        for node in ["a", "b"] {
            let option = format!("--etcd-options={}", options.display());
            cluster.node_mut(node).spec_mut().options.push(option);
        }
        Ok(Self {
            command,
            process: None,
        })
    }

    /// Starts the etcd. Whoever asks before it answers asks again.
    fn start(&mut self) -> io::Result<()> {
        self.process = Some(Process::spawn(&mut self.command)?);
        Ok(())
    }

    /// Kills the etcd.
    fn kill(&mut self) {
        self.process = None;
    }
}

#[test]
#[ignore = "slow: an etcd and hosts die"]
fn a_machine_goes_on_once_although_its_etcd_dies_at_any_time() -> io::Result<()> {
    let mut etcd = None;
    let prepare = |lan: &Lan, cluster: &mut Cluster| {
        etcd = Some(Etcd::new(&lan.hosts()[C], cluster)?);
        Ok(())
    };
    let started = Served::start(&["a", "b"], 3, &load("tap=tap0"), prepare)?;
    let (Some(mut served), Some(mut etcd)) = (started, etcd) else {
        return Ok(());
    };
    etcd.start()?;
    let witness = format!(
        "etcd://{}:{}/godwit",
        served.lan.hosts()[C].address(),
        Etcd::PORT
    );
    served.protect(&["--witness", &witness])?;
    etcd.kill();
    tells(served.node("a"), "the etcd")?;
    goes_on(&served.talk)?;
    comes_to(served.node("a"), "protected")?;
    etcd.start()?;
    served.host_dies("a", "b")?;
    served.protected_again("b", "a")?;
    goes_on(&served.talk)?;

    // Both nodes live, lose each other, and ask an etcd that has died since.
    way(&served.lan, [A, B], Way::Cut)?;
    etcd.kill();
    for node in ["a", "b"] {
        comes_to(served.node(node), "severed")?;
    }
    stands_still(&served.talk)?;
    etcd.start()?;
    let here = served.goes_on_once()?;
    way(&served.lan, [A, B], Way::Mended)?;
    comes_to(served.node(here), "protected")?;
    served.finish(here)
}

/// A machine that would be started anew, without a witness at its own node, which does not run it beside the backup.
#[test]
#[ignore = "slow: a guest boots twice"]
fn a_machine_is_started_only_where_the_witness_is_reached() -> io::Result<()> {
    if !may_run() {
        return Ok(());
    }
    let lan = Lan::new(3)?;
    let hosts: Vec<_> = ["a", "b", "c"]
        .into_iter()
        .zip(lan.hosts().iter().map(Some))
        .collect();
    let cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?.started();
    let load = GuestLoad {
        file_mb: 4,
        memory_mb: 0,
        reboots: true,
        ..GuestLoad::default()
    };
    let guest = NodeGuest::start(&cluster, "a", 1, 32, &load)?;
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.json(&[&["vm", "protect", VM, "--to", "b", "--restart"], &THIRD[..]].concat());
    comes_to(b, "protected")?;
    way(&lan, [A, C], Way::Cut)?;
    guest.alive()?;
    way(&lan, [A, B], Way::Cut)?;
    b.vm_comes_to(VM, "running");
    guest.console.booted_again(1, PATIENCE)?;
    guest.alive()?;
    assert_eq!(guest.console.lost_writes(), 0);
    comes_to(a, "severed")?;
    way(&lan, [A, C], Way::Mended)?;
    way(&lan, [A, B], Way::Mended)?;
    comes_to(b, "protected")?;
    b.text(&["vm", "unprotect", VM]);
    guest.finish(b)?;
    Ok(())
}
