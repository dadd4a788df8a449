//! A machine's NIC moves with it: a client outside loses no packet and no connection.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::network::{Lan, Pinger, Talk};
use godwit_testkit::vm::{GuestLoad, GuestNetwork, NodeGuest};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const ECHO: u16 = 7000;

fn load(nic: &str) -> GuestLoad {
    GuestLoad {
        file_mb: 8,
        memory_mb: 8,
        network: Some(GuestNetwork {
            nic: nic.to_owned(),
            address: format!("{GUEST}/24"),
            echo_port: ECHO,
        }),
        ..GuestLoad::default()
    }
}

/// Two nodes on the hosts of a network.
fn cluster(lan: &Lan) -> io::Result<Cluster> {
    let [a, b] = lan.hosts() else {
        return Err(io::Error::other("two hosts"));
    };
    let hosts = [("a", Some(a)), ("b", Some(b))];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    cluster.start_all()?;
    Ok(cluster)
}

#[test]
fn a_client_outside_loses_nothing_when_the_machine_moves() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let lan = Lan::new(2)?;
    let cluster = cluster(&lan)?;
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &load("tap=tap0"))?;
    let talk = Talk::start(lan.switch(), SocketAddr::from((GUEST, ECHO)), 1 << 20);
    let pinger = Pinger::start(lan.switch(), GUEST, Duration::from_millis(1))?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        std::thread::sleep(Duration::from_secs(1));
        let before = talk.bytes();
        let (moved, _) = guest.migrate(cluster.node(from), to, &[])?;
        std::thread::sleep(Duration::from_secs(1));
        assert!(talk.bytes() > before, "the conversation goes on");
        let nic = cluster
            .node(to)
            .godwit(&["nic", "show", "guest/0"])
            .json()?;
        println!("{} {nic}", moved["blackout_ms"]);
        assert!(nic["counters"]["held"].as_u64() > Some(0), "{nic}");
        assert_eq!(nic["counters"]["held_overflow"], 0, "{nic}");
        let left = cluster.node(from).godwit(&["nic", "list"]).json()?;
        assert_eq!(left.as_array().map(Vec::len), Some(0), "{left}");
    }
    let talked = talk.finish()?;
    assert!(!talked.reset && talked.wrong == 0, "{talked:?}");
    let pings = pinger.finish(Duration::from_secs(5))?;
    let lost = pings.iter().filter(|ping| ping.answers == 0).count();
    let twice = pings.iter().filter(|ping| ping.answers > 1).count();
    assert_eq!((lost, twice), (0, 0), "of {} pings", pings.len());
    guest.finish(cluster.node("a"))?;
    Ok(())
}
