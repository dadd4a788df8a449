//! The NIC of a machine that is stopped for a checkpoint again and again.

use std::fs::File;
use std::os::unix::fs::FileExt;

use godwit_vhost::features::LOG_ALL;
use godwit_vhost::memory::dirty_log::DirtyLog;
use godwit_vhost::memory::relocated::FileId;
use godwit_vhost::memory::written::WrittenPages;

use super::*;
use crate::device::test_guest::{BUFFERS, MEMORY, USED};

const PAGE: u64 = 4096;
const NONE: [u64; 0] = [];

/// A NIC with one pair of queues, and the network at its uplink.
fn one_pair() -> (NetDevice, NetThread, UnixDatagram) {
    let (uplink, network) = UnixDatagram::pair().expect("a pair");
    uplink.set_nonblocking(true).expect("does not block");
    let uplink = Uplink::from_packets([uplink.into()]);
    let (nic, thread) = NetDevice::spawn("web/0", Nic::new(MAC), uplink).expect("a thread");
    (nic, thread, network)
}

fn end(nic: &NetDevice, thread: NetThread) {
    nic.end();
    assert!(thread.join_within(Duration::from_secs(10)));
}

fn log_of(guest: &TestGuest) -> Arc<WrittenPages> {
    let file = FileId::of(&guest.memory).expect("a file");
    Arc::new(WrittenPages::new(file, 2 * MEMORY))
}

/// Takes the addresses of the pages of a log.
fn taken(log: &WrittenPages) -> Vec<u64> {
    let pages = log.take();
    let runs = pages.runs().iter();
    let pages = runs.flat_map(|run| run.first..run.first + run.pages);
    pages.map(|page| page * PAGE).collect()
}

/// Stops a ring, after which the thread has written all that it writes.
fn stop(nic: &NetDevice, ring: usize) -> u16 {
    let ring = ring as u16;
    step(nic, FrontEndCommand::Stop { ring })
}

/// Gives the guest a packet for each of these buffers, and stops its ring.
fn receive(nic: &NetDevice, guest: &TestGuest, network: &UnixDatagram, buffers: [u16; 2]) {
    let [base, end] = buffers;
    start(nic, guest, receive_ring(0), base);
    for _ in base..end {
        network.send(&[7; SMALLEST]).expect("is taken");
    }
    let gets_all = || guest.used() == end;
    assert!(within(Duration::from_secs(10), gets_all));
    stop(nic, receive_ring(0));
}

#[test]
fn exactly_the_pages_that_a_nic_writes_are_reported_once() {
    let (nic, thread, network) = one_pair();
    let guest = TestGuest::new(SIZE);
    let sending = guest.beside();
    guest.offer(SIZE);
    let front_end = attach(&nic, &guest);
    start(&nic, &sending, transmit_ring(0), 0);
    let log = log_of(&guest);
    stop(&nic, transmit_ring(0));
    ask(|reply| nic.log_writes(Some(log.clone()), reply));
    assert_eq!(taken(&log), NONE, "nothing has happened since");
    start(&nic, &sending, transmit_ring(0), 0);
    receive(&nic, &guest, &network, [0, 3]);
    let used_to_send = sending.layout().used.0;
    let buffers = [0, 1, 2].map(|number| BUFFERS + number * PAGE);
    let expected = [&[USED][..], &buffers, &[used_to_send]].concat();
    assert_eq!(taken(&log), expected);
    assert_eq!(taken(&log), NONE, "each is reported once");
    // Another front end, whose memory lies elsewhere in the same file.
    drop(front_end);
    step(&nic, FrontEndCommand::Detach);
    let next = guest.behind();
    next.offer(SIZE);
    let _front_end = attach(&nic, &next);
    start(&nic, &next.beside(), transmit_ring(0), 0);
    receive(&nic, &next, &network, [0, 1]);
    let pages = [USED, BUFFERS, used_to_send].map(|page| MEMORY + page);
    assert_eq!(taken(&log), pages);
    // A change of the memory alone.
    let ram = guest.ram.clone();
    stop(&nic, transmit_ring(0));
    step(&nic, FrontEndCommand::Memory { ram });
    start(&nic, &sending, transmit_ring(0), 0);
    receive(&nic, &guest, &network, [3, 4]);
    assert_eq!(taken(&log), [USED, BUFFERS + 3 * PAGE, used_to_send]);
    ask(|reply| nic.log_writes(None, reply));
    receive(&nic, &guest, &network, [4, 5]);
    assert_eq!((taken(&log), log.unlogged()), (vec![], 0), "it is off");
    end(&nic, thread);
}

#[test]
fn the_node_and_the_front_end_log_side_by_side() {
    let (nic, thread, network) = one_pair();
    let guest = TestGuest::new(SIZE);
    guest.offer(SIZE);
    let _front_end = attach(&nic, &guest);
    let log = log_of(&guest);
    ask(|reply| nic.log_writes(Some(log.clone()), reply));
    let bits: File = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC)
        .expect("a file")
        .into();
    bits.set_len(PAGE).expect("grows");
    let shared = DirtyLog::new(bits.try_clone().expect("another"), 0, PAGE).expect("a log");
    let log_all = Arc::new(shared);
    step(&nic, FrontEndCommand::Log { log: log_all });
    let features = VERSION_1 | MERGEABLE | LOG_ALL;
    step(&nic, FrontEndCommand::Features { features });
    start(&nic, &guest.beside(), transmit_ring(0), 0);
    let kick = Wake::new().expect("a counter");
    let mut setup = guest.setup(0, &kick);
    setup.log = Some(USED);
    let ring = receive_ring(0) as u16;
    step(&nic, FrontEndCommand::Start { ring, setup });
    network.send(&[7; SMALLEST]).expect("is taken");
    assert!(within(Duration::from_secs(10), || guest.used() == 1));
    stop(&nic, receive_ring(0));
    let mut seen = [0; 8];
    bits.read_exact_at(&mut seen, 0).expect("reads");
    let expected = 1 << (USED / PAGE) | 1 << (BUFFERS / PAGE);
    assert_eq!(u64::from_le_bytes(seen), expected);
    let unnamed = guest.beside().layout().used.0;
    assert_eq!(taken(&log), [USED, BUFFERS, unnamed]);
    end(&nic, thread);
}
