//! Announcements of a moved machine on the network: by the node, and by the guest.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

use godwit_testkit::network::{Capture, Pinger, inside};
use godwit_testkit::process::wait_for;
use godwit_testkit::vm::{
    ConsoleSocket, GuestConsole, GuestImage, GuestLoad, GuestMachine, GuestNetwork, Monitor,
    NodeGuest,
};

use super::adopted::{NIC, create, words_for_qemu};
use super::{GUEST, PING_EVERY, answered_once, ip, load, two_nodes};

const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time between repeated announcements.
const ANNOUNCES: Duration = Duration::from_secs(3);

type Mac = [u8; 6];

/// The NIC's own address, the address set by the guest, and a container's.
const OWN: Mac = [0x52, 0x54, 0, 0x80, 2, 1];
const CHANGED: Mac = [0x52, 0x54, 0, 0x80, 2, 2];
const CONTAINER: Mac = [0x52, 0x54, 0, 0x80, 2, 3];
const CONTAINERS_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 11);
/// VLANs of the guest's.
const VLANS: std::ops::RangeInclusive<u16> = 2..=41;

/// A guest that is an IPv6 router, has changed its MAC address, and has VLANs and a container.
const SCRIPT: &str = "
for f in /proc/sys/net/ipv6/conf/*/forwarding; do echo 1 >$f; done
ip link set eth0 address 52:54:00:80:02:02
for n in $(seq 2 41); do
    ip link add link eth0 name v$n type vlan id $n
    ip addr add 10.81.$n.1/24 dev v$n
    ip link set v$n up
done
ip link add link eth0 name c0 type macvlan
ip link set c0 address 52:54:00:80:02:03
ip addr add 10.80.0.11/24 dev c0
ip link set c0 up
";

fn with_network(network: GuestNetwork) -> GuestLoad {
    let mut load = load("tap=tap0,mac=52:54:00:80:02:01");
    if let Some(own) = &mut load.network {
        own.script = network.script;
        own.group_port = network.group_port;
    }
    load
}

/// A frame's claim about the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    /// A station is here: the address and the VLAN.
    Rarp(Mac, u16),
    /// A station has this IPv4 address.
    Arp(Mac, u16, Ipv4Addr),
    /// A station has an IPv6 address; true for a router.
    Neighbour(Mac, u16, bool),
}

fn said(frame: &[u8]) -> Option<Said> {
    let from: Mac = *frame.get(6..)?.first_chunk()?;
    let kind = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
    let (vlan, at) = match kind(12)? {
        0x8100 => (kind(14)? & 0xfff, 18),
        _ => (0, 14),
    };
    let body = frame.get(at..)?;
    match kind(at - 2)? {
        0x8035 => Some(Said::Rarp(from, vlan)),
        0x806 => {
            let address: [u8; 4] = *body.get(14..)?.first_chunk()?;
            Some(Said::Arp(from, vlan, address.into()))
        }
        // A neighbour advertisement.
        0x86dd if body.get(6) == Some(&58) && body.get(40) == Some(&136) => {
            Some(Said::Neighbour(from, vlan, body.get(44)? & 0x80 != 0))
        }
        _ => None,
    }
}

/// Returns the claims heard until all wanted ones are there, and for some time after.
fn hear(capture: &Capture, wanted: &BTreeSet<Said>) -> BTreeSet<Said> {
    let mut heard = BTreeSet::new();
    let mut hear_more = || {
        heard.extend(capture.take().iter().filter_map(|frame| said(frame)));
        wanted.is_subset(&heard).then_some(())
    };
    wait_for(PATIENCE, &mut hear_more);
    sleep(ANNOUNCES);
    hear_more();
    heard
}

#[test]
fn what_a_guest_is_reached_by_is_announced_and_nothing_else() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let network = GuestNetwork {
        script: SCRIPT.to_owned(),
        ..GuestNetwork::default()
    };
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &with_network(network))?;
    let pingers = [GUEST, CONTAINERS_ADDRESS].map(|to| Pinger::start(lan.switch(), to, PING_EVERY));
    let capture = lan.capture()?;
    capture.take();
    guest.migrate(cluster.node("a"), "b", &[])?;
    let stations = [(OWN, 0), (CHANGED, 0), (CONTAINER, 0)].into_iter();
    let stations = stations.chain(VLANS.map(|vlan| (CHANGED, vlan)));
    let rarps: BTreeSet<Said> = stations.map(|(mac, vlan)| Said::Rarp(mac, vlan)).collect();
    // The guest itself announces addresses unknown to the node.
    let vlans_address = |vlan: u16| Ipv4Addr::new(10, 81, vlan as u8, 1);
    let mut wanted: BTreeSet<Said> = VLANS
        .map(|vlan| Said::Arp(CHANGED, vlan, vlans_address(vlan)))
        .collect();
    let mut addresses: BTreeSet<Ipv4Addr> = VLANS.map(vlans_address).collect();
    addresses.extend([GUEST, CONTAINERS_ADDRESS]);
    wanted.insert(Said::Arp(CHANGED, 0, GUEST));
    wanted.insert(Said::Arp(CONTAINER, 0, CONTAINERS_ADDRESS));
    wanted.insert(Said::Neighbour(CHANGED, 0, true));
    wanted.extend(rarps.iter().copied());
    let heard = hear(&capture, &wanted);
    let missing: Vec<&Said> = wanted.difference(&heard).collect();
    assert_eq!(missing, [] as [&Said; 0]);
    for said in heard {
        let is_true = match said {
            Said::Rarp(..) => rarps.contains(&said),
            // Linux resolves other hosts from any interface.
            Said::Arp(CHANGED | CONTAINER, _, address) => addresses.contains(&address),
            Said::Arp(mac, ..) => mac != OWN,
            Said::Neighbour(.., is_router) => is_router,
        };
        assert!(is_true, "{said:?}");
    }
    for pinger in pingers {
        answered_once(&pinger?.finish(Duration::from_secs(5))?);
    }
    guest.finish(cluster.node("b"))?;
    Ok(())
}

/// Neither node takes part in such a move. QEMU has a capable guest announce itself, and otherwise tells the back end
/// to.
#[test]
fn a_machine_that_qemu_itself_moves_is_announced() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let file = |name: String| cluster.dir().join(name);
    let console = GuestConsole::new();
    let mut machines = Vec::new();
    for node in ["a", "b"] {
        let told = create(cluster.node(node), NIC, "tap=tap0,mac=52:54:00:80:02:01")?;
        let line = file(format!("console-{node}"));
        let image = GuestImage::build_or_cached()?;
        let mut machine = GuestMachine::new(image, Vec::new(), ConsoleSocket::Listen(line.clone()));
        machine.load = with_network(GuestNetwork::default());
        let words = words_for_qemu(&told).into_iter();
        let words = words.map(|word| word.replace("romfile=,", "romfile=,guest_announce=off,"));
        let mut words: Vec<OsString> = words.map(Into::into).collect();
        words.extend(Monitor::arguments(&file(format!("monitor-{node}"))));
        if node == "b" {
            words.extend(Monitor::awaits(&file(String::from("stream"))));
        }
        machines.push(machine.spawn(&words)?);
        console.attach(&line, PATIENCE)?;
        if node == "a" {
            console.started(PATIENCE)?;
        }
    }
    let pinger = Pinger::start(lan.switch(), GUEST, PING_EVERY)?;
    let capture = lan.capture()?;
    sleep(ANNOUNCES);
    capture.take();
    let mut monitor = Monitor::connect(&file(String::from("monitor-a")))?;
    monitor.migrate(&file(String::from("stream")))?;
    let wanted = BTreeSet::from([Said::Rarp(OWN, 0)]);
    let heard = hear(&capture, &wanted);
    assert!(wanted.is_subset(&heard), "{heard:?}");
    // QEMU loses packets that arrive while the machine stands still.
    let pings = pinger.finish(Duration::from_secs(5))?;
    let last = pings.iter().rev().take(100);
    assert!(
        last.clone().all(|ping| ping.answers == 1),
        "{}",
        super::lost_at(&pings)
    );
    Ok(())
}

/// Multicast group whose datagrams the guest echoes.
const GROUP: (Ipv4Addr, u16) = (Ipv4Addr::new(239, 80, 0, 1), 7200);

#[test]
fn a_guest_hears_its_group_behind_a_switch_that_snoops() -> io::Result<()> {
    const EVERY: Duration = Duration::from_millis(10);
    /// Datagrams some time after the end of a move.
    const LAST: usize = 150;
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let snoops = "link set br0 type bridge mcast_snooping 1 mcast_querier 1 mcast_query_response_interval 100 \
                  mcast_startup_query_interval 100";
    ip(lan.switch(), snoops)?;
    ip(lan.switch(), "route add 239.0.0.0/8 dev br0")?;
    let network = GuestNetwork {
        group_port: GROUP.1,
        script: String::from("ip route add 239.0.0.0/8 dev eth0"),
        ..GuestNetwork::default()
    };
    let guest = NodeGuest::start(&cluster, "a", 1, 64, &with_network(network))?;
    let socket = inside(lan.switch(), || UdpSocket::bind("0.0.0.0:0")).join();
    let socket = socket.expect("does not panic")?;
    socket.set_nonblocking(true)?;
    let mut answers: Vec<u32> = Vec::new();
    let mut hear = || {
        let mut number = [0; 4];
        while let Ok(4) = socket.recv(&mut number) {
            let number = u32::from_be_bytes(number) as usize;
            answers.resize(answers.len().max(number + 1), 0);
            answers[number] += 1;
        }
        answers.clone()
    };
    let mut sent = 0_u32;
    let send = |sent: &mut u32| {
        let _ = socket.send_to(&sent.to_be_bytes(), GROUP);
        *sent += 1;
        sleep(EVERY);
    };
    while hear().is_empty() {
        send(&mut sent);
        assert!(sent < 6000, "the guest hears its group");
    }
    let first = hear().len() - 1;
    let moving = cluster
        .node("a")
        .godwit(&["migrate", "vm/guest", "--to", "b"]);
    let moving = std::thread::spawn(move || moving.json());
    let mut until = None;
    loop {
        send(&mut sent);
        let answers = hear();
        if until.is_none() && moving.is_finished() {
            until = Some(sent + 6000);
        }
        // All answers except those still on the way.
        let last = answers.iter().rev().skip(LAST / 3).take(LAST);
        let hears =
            answers.len() + LAST / 3 > sent as usize && last.clone().all(|count| *count == 1);
        match until {
            Some(until) if hears && sent + 6000 > until + LAST as u32 => break,
            Some(until) => assert!(sent < until, "the guest hears its group again"),
            None => {}
        }
    }
    moving.join().expect("does not panic")?;
    let runs: Vec<(u32, usize)> = {
        let answers = hear();
        let runs = answers[first..].chunk_by(|a, b| a == b);
        runs.map(|run| (run[0], run.len())).collect()
    };
    println!("of each datagram so many answers came, and of so many in turn: {runs:?}");
    assert!(
        runs.iter().all(|(count, _)| *count <= 1),
        "none comes twice"
    );
    guest.finish(cluster.node("b"))?;
    Ok(())
}
