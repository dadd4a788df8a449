//! A NIC of a node with other front ends than QEMU. One is foreign: DPDK's testpmd, behind `make test-slow`, since
//! DPDK has to be installed. testpmd does not log written pages; the front end of this crate does.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::network::{Lan, Namespace, Testpmd, inside};
use godwit_testkit::process::{self, wait_for};
use godwit_testkit::vhost_client::{BASE, Client, Options, WRITE};
use serde_json::Value;

const VM: &str = "one";
const MAC: &str = "52:54:00:80:02:01";
const MAC_BYTES: [u8; 6] = [0x52, 0x54, 0, 0x80, 2, 1];
const DRIVER: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 10);
const PORT: u16 = 7100;
/// Frames that each testpmd sends: fewer than its ring holds.
const SENDS: u32 = 200;
/// Numbers sent by a client in a second.
const RATE: u32 = 500;
const PATIENCE: Duration = Duration::from_secs(60);

/// Writes a program that the node takes for QEMU: QEMU with all NICs plugged into nothing. The sockets of the NICs are
/// free for other front ends.
fn qemu_without_nics(folder: &Path) -> io::Result<PathBuf> {
    let script = r#"#!/bin/bash
words=()
while (($#)); do
    case "$1 $2" in
        "-chardev socket,id=godwit-nic"*) shift 2 ;;
        "-netdev vhost-user,id="*)
            id=${2#vhost-user,id=}
            words+=(-netdev "hubport,id=${id%%,*},hubid=0")
            shift 2
            ;;
        *) words+=("$1"); shift ;;
    esac
done
exec qemu-system-x86_64 "${words[@]}"
"#;
    let program = folder.join("qemu-system-without-nics");
    std::fs::write(&program, script)?;
    std::fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    Ok(program)
}

/// Starts two nodes on the hosts of a network, and a machine on the first whose NIC is free for other front ends.
fn machine(lan: &Lan, nic: &str) -> io::Result<Cluster> {
    let hosts = [("a", Some(&lan.hosts()[0])), ("b", Some(&lan.hosts()[1]))];
    let mut cluster = Cluster::prepare_on(&hosts, ClusterOptions::secure()?)?;
    for name in ["a", "b"] {
        cluster.node_mut(name).start(&[])?;
    }
    let qemu = qemu_without_nics(cluster.dir())?;
    let qemu = qemu.to_string_lossy();
    let nic = format!("{nic},mac={MAC}");
    let words = [
        "vm",
        "run",
        VM,
        "--nic",
        &nic,
        "--qemu",
        &qemu,
        "--memory",
        "64MiB",
        "--accel",
        "tcg",
        "--",
        "-nodefaults",
    ];
    cluster.node("a").godwit(&words).json()?;
    let known = format!("neigh replace {DRIVER} lladdr {MAC} dev {}", Lan::BRIDGE);
    ip(lan.switch(), &known)?;
    Ok(cluster)
}

/// Runs `ip` on a host.
fn ip(host: &Namespace, words: &str) -> io::Result<Vec<u8>> {
    let mut command = host.command();
    command.arg("ip").args(words.split(' '));
    Ok(process::run(&mut command)?.stdout)
}

/// Returns the packets from a host to a tap, and those from the tap to the host.
fn on_tap(host: &Namespace, tap: &str) -> io::Result<(u64, u64)> {
    let shown: Value = serde_json::from_slice(&ip(host, &format!("-json -s link show {tap}"))?)?;
    let packets = |direction: &str| shown[0]["stats64"][direction]["packets"].as_u64();
    let both = packets("tx").zip(packets("rx"));
    both.ok_or_else(|| io::Error::other(format!("{tap} shows no packets: {shown}")))
}

fn socket(node: &Node) -> PathBuf {
    node.spec().dir.join("vms").join(VM).join("nic0.vhost")
}

fn nic(node: &Node) -> io::Result<Value> {
    Ok(node.godwit(&["nic", "show", &format!("{VM}/0")]).json()?)
}

fn counter(node: &Node, name: &str) -> io::Result<u64> {
    let shown = nic(node)?;
    let count = shown["counters"][name].as_u64();
    count.ok_or_else(|| io::Error::other(format!("{name}: {shown}")))
}

/// Returns a broadcast datagram with this number.
fn datagram(number: u32) -> Vec<u8> {
    let content = [
        &PORT.to_be_bytes()[..],
        &PORT.to_be_bytes(),
        &[0, 12, 0, 0],
        &number.to_be_bytes(),
    ]
    .concat();
    let mut header = [
        &[0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0][..],
        &DRIVER.octets(),
        &[10, 80, 0, 255],
    ]
    .concat();
    let words = header
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    header[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    let mut frame = [&[0xff; 6][..], &MAC_BYTES, &[8, 0], &header, &content].concat();
    frame.resize(60, 0);
    frame
}

/// Returns the number in a frame of [`Sender`]'s.
fn number(frame: &[u8]) -> Option<u32> {
    let port = frame.get(36..38)? == PORT.to_be_bytes();
    let ours = frame.get(12..14)? == [8, 0] && frame.get(23) == Some(&17) && port;
    let number = u32::from_be_bytes(*frame.get(42..)?.first_chunk()?);
    (ours && frame.get(..6)? == MAC_BYTES).then_some(number)
}

/// A client that sends numbers to the NIC.
struct Sender {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU32>,
    sending: JoinHandle<io::Result<()>>,
}

impl Sender {
    fn start(from: &Namespace) -> Self {
        let (stop, sent) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU32::new(0)),
        );
        let (ends, count) = (Arc::clone(&stop), Arc::clone(&sent));
        let sending = inside(from, move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            while !ends.load(Ordering::Relaxed) {
                let number = count.load(Ordering::Relaxed);
                socket.send_to(&number.to_be_bytes(), (DRIVER, PORT))?;
                count.store(number + 1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_secs(1) / RATE);
            }
            Ok(())
        });
        Self {
            stop,
            sent,
            sending,
        }
    }

    fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Stops sending; returns the count of sent numbers.
    fn finish(self) -> io::Result<u32> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.sending.join();
        ended.map_err(|_| io::Error::other("the client panicked"))??;
        Ok(self.sent.load(Ordering::Relaxed))
    }
}

/// Listens from inside a namespace. The thread returns the received numbers once none has come for two seconds.
fn hear(from: &Namespace) -> io::Result<JoinHandle<io::Result<Vec<u32>>>> {
    let bound = inside(from, || UdpSocket::bind(("0.0.0.0", PORT))).join();
    let socket = bound.map_err(|_| io::Error::other("no socket"))??;
    Ok(std::thread::spawn(move || {
        socket.set_read_timeout(Some(PATIENCE))?;
        let (mut numbers, mut content) = (Vec::new(), [0; 4]);
        while let Ok(4) = socket.recv(&mut content) {
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
            numbers.push(u32::from_be_bytes(content));
        }
        Ok(numbers)
    }))
}

/// Returns frames with numbers from `first` on.
fn datagrams(first: u32) -> Vec<Vec<u8>> {
    (first..first + SENDS).map(datagram).collect()
}

#[test]
#[ignore = "needs DPDK: make test-slow ONLY=foreign_front_end"]
fn testpmd_sends_and_receives_through_a_nodes_nic_which_goes_on_at_another_node() -> io::Result<()>
{
    let lan = Lan::new(2)?;
    let cluster = machine(&lan, "tap=tap0")?;
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let heard = hear(lan.switch())?;
    let driver = Testpmd::start(&socket(a), cluster.dir(), "first", &[datagrams(0)])?;
    let left = || (counter(a, "sent_packets").ok()? == u64::from(SENDS)).then_some(());
    wait_for(PATIENCE, left).unwrap_or_else(|| panic!("{:?}\n{}", nic(a), driver.said()));
    let sender = Sender::start(lan.switch());
    wait_for(PATIENCE, || (sender.sent() > 2 * RATE).then_some(()));
    let heard = heard.join().expect("does not panic")?;
    assert_eq!(
        heard,
        (0..SENDS).collect::<Vec<_>>(),
        "all that it sent, once, in order"
    );
    assert_eq!(on_tap(&lan.hosts()[0], Lan::TAP)?.1, u64::from(SENDS));

    // The state is taken while testpmd goes on, and given to the other node's NIC.
    let heard = hear(lan.switch())?;
    let moved = a
        .godwit(&["migrate", &format!("vm/{VM}"), "--to", "b"])
        .json()?;
    let at_first = driver.finish()?;
    let driver = Testpmd::start(&socket(b), cluster.dir(), "second", &[datagrams(SENDS)])?;
    let left = || (counter(b, "sent_packets").ok()? == u64::from(2 * SENDS)).then_some(());
    wait_for(PATIENCE, left).unwrap_or_else(|| panic!("{:?}\n{}", nic(b), driver.said()));
    wait_for(PATIENCE, || (nic(b).ok()?["waiting"] == 0).then_some(()));
    std::thread::sleep(Duration::from_secs(1));
    let sent = sender.finish()?;
    let heard = heard.join().expect("does not panic")?;
    assert_eq!(heard, (SENDS..2 * SENDS).collect::<Vec<_>>());
    let shown = nic(b)?;
    let at_second = driver.finish()?;
    println!(
        "{moved}\n{shown}\n{} and {} frames",
        at_first.len(),
        at_second.len()
    );
    let counters = &shown["counters"];
    assert_eq!(counters["moves"], 1, "{shown}");
    assert_eq!(counters["held_overflow"], 0, "{shown}");
    assert!(counters["held"].as_u64() > Some(0), "{shown}");
    let got: Vec<u32> = at_first
        .iter()
        .chain(&at_second)
        .filter_map(|frame| number(frame))
        .collect();
    assert_eq!(
        got,
        (0..sent).collect::<Vec<_>>(),
        "each number once, in order, over the move"
    );
    // The NIC and testpmd count the same frames; one frame may come between the two queries.
    let frames = (at_first.len() + at_second.len()) as u64;
    let counted = counters["received_packets"].as_u64().unwrap_or_default();
    let counted = counted..=counter(b, "received_packets")?;
    assert!(counted.contains(&frames), "{counted:?}: {frames}");
    b.stop_vm(VM);
    Ok(())
}

#[test]
#[ignore = "needs DPDK: make test-slow ONLY=foreign_front_end"]
fn testpmd_uses_two_pairs_of_queues() -> io::Result<()> {
    /// Source ports of the numbers: the host spreads traffic from many ports over the queues.
    const PORTS: u32 = 50;
    let lan = Lan::new(2)?;
    let cluster = machine(&lan, "bridge=br0,queues=2")?;
    let a = cluster.node("a");
    let heard = hear(lan.switch())?;
    let sends = [datagrams(0), datagrams(SENDS)];
    let driver = Testpmd::start(&socket(a), cluster.dir(), "two", &sends)?;
    let mut heard = heard.join().expect("does not panic")?;
    heard.sort_unstable();
    let shown = nic(a)?;
    let said = driver.said();
    assert_eq!(heard, (0..2 * SENDS).collect::<Vec<_>>(), "{shown}\n{said}");
    let sockets = inside(lan.switch(), || {
        let sockets = (0..PORTS).map(|_| UdpSocket::bind("0.0.0.0:0"));
        sockets.collect::<io::Result<Vec<_>>>()
    });
    let sockets = sockets.join().expect("does not panic")?;
    for number in 0..10 * PORTS {
        let socket = &sockets[(number % PORTS) as usize];
        socket.send_to(&number.to_be_bytes(), (DRIVER, PORT))?;
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_secs(1));
    let shown = nic(a)?;
    let frames = driver.finish()?;
    let mut got: Vec<u32> = frames.iter().filter_map(|frame| number(frame)).collect();
    got.sort_unstable();
    assert_eq!(got, (0..10 * PORTS).collect::<Vec<_>>(), "{shown}");
    for pair in 0..2 {
        let pair = &shown["queues"][pair];
        assert_eq!(pair["sent_packets"], SENDS, "{shown}");
        assert!(pair["received_packets"].as_u64() > Some(100), "{shown}");
    }
    a.stop_vm(VM);
    Ok(())
}

/// Bytes of each offered buffer, and the distance of two buffers: each begins in a page, and ends in the next.
const BUFFER: u32 = 3000;
const APART: u64 = 2 * PAGE;
const BUFFERS: u16 = 32;
const PAGE: u64 = 4096;
/// Bytes of the header in front of a packet's frame.
const HEADER: usize = 12;

/// Returns the offsets of the pages of a range.
fn pages(offset: u64, bytes: u64) -> impl Iterator<Item = u64> {
    let first = offset / PAGE;
    (first..(offset + bytes).div_ceil(PAGE)).map(|page| page * PAGE)
}

/// Connects a driver of a NIC's receive and transmit ring, and offers the buffers.
fn driver(socket: &Path) -> io::Result<Client> {
    let mut client = Client::connect(
        socket,
        Options {
            queues: 2,
            pairs: true,
            // These bits have other meanings at a NIC.
            flush: false,
            ..Options::default()
        },
    )?;
    client.start()?;
    let start = client.data() + PAGE - 60;
    for head in 0..BUFFERS {
        let place = BASE + start + u64::from(head) * APART;
        client.queues[0].put(head, place, BUFFER, WRITE, 0);
        client.queues[0].offer(head);
    }
    client.queues[0].notify();
    Ok(client)
}

/// Waits until the NIC has delivered this number. Returns the pages that the NIC must have written: those of all
/// received packets, and of the used ring.
fn received(client: &mut Client, wanted: u32) -> BTreeSet<u64> {
    let start = client.data() + PAGE - 60;
    let [.., used] = client.queues[0].places();
    let mut written: BTreeSet<u64> = pages(used, client.queues[0].used_bytes()).collect();
    loop {
        let done = client.queues[0].wait(PATIENCE).expect("the number comes");
        let place = start + u64::from(done.head) * APART;
        written.extend(pages(place, u64::from(done.written)));
        let mut packet = vec![0; done.written as usize];
        client.memory.read(place, &mut packet);
        if number(&packet[HEADER..]) == Some(wanted) {
            return written;
        }
    }
}

/// Sends until something arrives: a bridge forwards packets to a tap only some time after the attachment. Then waits
/// until nothing more is on the way.
fn first_received(client: &mut Client, send: impl Fn() -> io::Result<()>) -> io::Result<()> {
    const ON_ITS_WAY: Duration = Duration::from_millis(500);
    let mut tries = PATIENCE.as_millis() / ON_ITS_WAY.as_millis();
    loop {
        send()?;
        if client.queues[0].wait(ON_ITS_WAY).is_some() {
            break;
        }
        tries -= 1;
        assert_ne!(tries, 0, "something comes");
    }
    while client.queues[0].wait(ON_ITS_WAY).is_some() {}
    Ok(())
}

#[test]
fn a_front_end_that_logs_finds_every_page_that_the_nic_wrote_and_no_other() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let lan = Lan::new(2)?;
    // A packet of the kernel's own could be written between the number and the look at the log.
    for host in lan.hosts().iter().chain([lan.switch()]) {
        let shown = String::from_utf8_lossy(&ip(host, "-6 addr show dev br0")?).into_owned();
        assert_eq!(shown, "", "no IPv6");
    }
    let cluster = machine(&lan, "tap=tap0")?;
    let a = cluster.node("a");
    let mut client = driver(&socket(a))?;
    let outside = inside(lan.switch(), || UdpSocket::bind("0.0.0.0:0")).join();
    let outside = outside.map_err(|_| io::Error::other("no socket"))??;
    let send = |number: u32| outside.send_to(&number.to_be_bytes(), (DRIVER, PORT));
    first_received(&mut client, || send(0).map(drop))?;
    client.start_log()?;
    client.take_log();
    send(1)?;
    let expected = received(&mut client, 1);
    let logged: BTreeSet<u64> = client.take_log().into_iter().collect();
    assert_eq!(logged, expected);

    // A packet from the guest is read; only the used ring is written.
    let heard = hear(lan.switch())?;
    let place = send_datagram(&mut client, 0, 7);
    assert_eq!(heard.join().expect("does not panic")?, [7]);
    let [.., used] = client.queues[1].places();
    let of_ring: BTreeSet<u64> = pages(used, client.queues[1].used_bytes()).collect();
    let logged: BTreeSet<u64> = client.take_log().into_iter().collect();
    assert!(logged.is_superset(&of_ring), "{logged:x?}: {of_ring:x?}");
    assert!(!logged.contains(&(place / PAGE * PAGE)), "{logged:x?}");

    client.stop_log()?;
    send(2)?;
    received(&mut client, 2);
    assert_eq!(client.take_log(), [] as [u64; 0]);
    a.stop_vm(VM);
    Ok(())
}

/// Sends this number by the driver's descriptor `head`, and waits for the completion. Returns the packet's offset.
fn send_datagram(client: &mut Client, head: u16, number: u32) -> u64 {
    let frame = [&[0; HEADER][..], &datagram(number)].concat();
    let place = client.data();
    client.memory.write(place, &frame);
    client.queues[1].put(head, BASE + place, frame.len() as u32, 0, 0);
    client.queues[1].offer(head);
    client.queues[1].notify();
    client.queues[1].wait(PATIENCE).expect("it leaves");
    place
}

/// A guest takes the queue pair away from sockets with packets under way: the sockets wait until their packets are
/// gone.
#[test]
fn what_is_offered_in_a_disabled_ring_is_dropped() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let lan = Lan::new(2)?;
    let cluster = machine(&lan, "tap=tap0")?;
    let a = cluster.node("a");
    let mut client = driver(&socket(a))?;
    let heard = hear(lan.switch())?;
    send_datagram(&mut client, 0, 1);
    client.enable_queue(1, false)?;
    send_datagram(&mut client, 1, 2);
    client.enable_queue(1, true)?;
    send_datagram(&mut client, 2, 3);
    assert_eq!(heard.join().expect("does not panic")?, [1, 3]);
    assert_eq!(counter(a, "send_refused")?, 1);
    a.stop_vm(VM);
    Ok(())
}
