//! The NIC of a machine that is stopped for a checkpoint again and again.

use std::fs::File;
use std::os::unix::fs::FileExt;

use godwit_vhost::features::LOG_ALL;
use godwit_vhost::memory::dirty_log::DirtyLog;
use godwit_vhost::memory::relocated::FileId;
use godwit_vhost::memory::written::WrittenPages;

use super::*;
use crate::device::test_guest::{BUFFERS, MEMORY, NUMBER_AT, USED};

const PAGE: u64 = 4096;
const NONE: [u64; 0] = [];
const NOTHING: [u16; 0] = [];

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

/// A guest that sends, its NIC, and the network at the uplink of each pair.
struct Sender {
    nic: NetDevice,
    thread: NetThread,
    networks: Vec<UnixDatagram>,
    /// The guest's transmit rings.
    rings: Vec<TestGuest>,
    kicks: Vec<Wake>,
    front_end: UnixStream,
}

/// Packets that leave, by their numbers.
type Numbers = Vec<u16>;

impl Sender {
    /// Creates a guest of which this many packets have left each ring, and whose packets are held back from now on.
    fn new(pairs: usize, base: u16) -> Self {
        let (nic, thread, networks) = match pairs {
            1 => {
                let (nic, thread, network) = one_pair();
                (nic, thread, vec![network])
            }
            _ => two_pairs(),
        };
        let first = TestGuest::new(8);
        let second = first.beside();
        let front_end = attach(&nic, &first);
        let mut sender = Self {
            nic,
            thread,
            networks,
            rings: vec![first, second],
            kicks: Vec::new(),
            front_end,
        };
        sender.rings.truncate(pairs);
        for ring in &sender.rings {
            ring.send(base, base);
        }
        sender.start(&vec![base; pairs]);
        ask(|reply| sender.nic.hold_back(reply));
        sender
    }

    /// Offers packets in a ring, and notifies the NIC.
    fn offers(&self, pair: usize, begin: u16, end: u16) {
        self.rings[pair].send(begin, end);
        self.kicks[pair].signal();
    }

    fn start(&mut self, bases: &[u16]) {
        let rings = self.rings.iter().zip(bases).enumerate();
        let kicks =
            rings.map(|(pair, (ring, base))| start(&self.nic, ring, transmit_ring(pair), *base));
        self.kicks = kicks.collect();
    }

    fn stop(&self) -> Vec<u16> {
        let rings = 0..self.rings.len();
        rings
            .map(|pair| stop(&self.nic, transmit_ring(pair)))
            .collect()
    }

    /// Stops the machine, ends a checkpoint, and lets the machine go on. Returns the positions of the rings.
    fn checkpoint(&mut self, number: u64) -> Vec<u16> {
        let bases = self.stop();
        ask(|reply| self.nic.end_checkpoint(number, reply));
        self.start(&bases);
        bases
    }

    /// Waits until this many packets wait in the NIC.
    fn waits(&self, count: usize) {
        let waits = || self.nic.snapshot().held_back == Some(count);
        assert!(within(Duration::from_secs(10), waits));
    }

    /// Returns the packets that leave a pair within [`WHILE`].
    fn left(&self, pair: usize) -> Numbers {
        let network = &self.networks[pair];
        network.set_read_timeout(Some(WHILE)).expect("a limit");
        let mut packet = [0; 2048];
        let mut numbers = Vec::new();
        while let Ok(length) = network.recv(&mut packet) {
            assert!(length > NUMBER_AT + 2, "a packet of the guest");
            numbers.push(u16::from_ne_bytes([
                packet[NUMBER_AT],
                packet[NUMBER_AT + 1],
            ]));
        }
        numbers
    }

    fn end(self) {
        drop(self.front_end);
        end(&self.nic, self.thread);
    }
}

fn numbers(begin: u16, count: u16) -> Numbers {
    (0..count)
        .map(|number| begin.wrapping_add(number))
        .collect()
}

#[test]
fn packets_leave_with_their_checkpoint_and_no_others_do() {
    for base in [0, u16::MAX - 3] {
        let at = |count: u16| base.wrapping_add(count);
        let mut sender = Sender::new(1, base);
        sender.offers(0, base, at(3));
        assert_eq!(sender.left(0), NOTHING);
        assert_eq!(sender.nic.snapshot().held_back, Some(3));
        assert_eq!(sender.checkpoint(1), [at(3)], "the guest's sockets go on");
        sender.offers(0, at(3), at(5));
        assert_eq!(sender.left(0), NOTHING);
        sender.nic.release_checkpoint(2);
        assert_eq!(sender.left(0), NOTHING, "there is no such checkpoint");
        sender.nic.release_checkpoint(1);
        assert_eq!(sender.left(0), numbers(base, 3));
        assert_eq!(sender.checkpoint(2), [at(5)]);
        // Both at once, while the machine stands still.
        sender.offers(0, at(5), at(6));
        sender.waits(3);
        let bases = sender.stop();
        ask(|reply| sender.nic.end_checkpoint(3, reply));
        sender.nic.release_checkpoint(3);
        assert_eq!(sender.left(0), numbers(at(3), 3));
        sender.start(&bases);
        sender.offers(0, at(6), at(8));
        assert_eq!(sender.left(0), NOTHING);
        assert_eq!(sender.nic.snapshot().held_back, Some(2));
        sender.end();
    }
}

#[test]
fn packets_for_the_guest_pass_while_its_own_are_held_back() {
    let mut sender = Sender::new(1, 0);
    let receiving = sender.rings[0].beside();
    receiving.offer(8);
    start(&sender.nic, &receiving, receive_ring(0), 0);
    sender.offers(0, 0, 8);
    sender.checkpoint(1);
    for count in 1..=5 {
        sender.networks[0].send(&[7; SMALLEST]).expect("is taken");
        let gets_it = || receiving.used() == count;
        assert!(within(Duration::from_secs(10), gets_it), "{count}");
    }
    assert_eq!(sender.left(0), NOTHING);
    sender.end();
}

#[test]
fn a_machine_that_goes_on_alone_sends_all_in_order() {
    let mut sender = Sender::new(1, 0);
    sender.offers(0, 0, 3);
    sender.waits(3);
    sender.checkpoint(1);
    sender.offers(0, 3, 7);
    ask(|reply| sender.nic.stop_holding(reply));
    assert_eq!(sender.left(0), numbers(0, 7));
    sender.offers(0, 7, 9);
    assert_eq!(sender.left(0), numbers(7, 2));
    assert_eq!(sender.nic.snapshot().held_back, None);
    // Protected again, with a series of checkpoints of its own.
    ask(|reply| sender.nic.hold_back(reply));
    sender.offers(0, 9, 10);
    sender.nic.release_checkpoint(1);
    assert_eq!(sender.left(0), NOTHING);
    sender.checkpoint(1);
    sender.nic.release_checkpoint(1);
    assert_eq!(sender.left(0), numbers(9, 1));
    sender.end();
}

#[test]
fn packets_of_a_new_driver_wait_for_a_checkpoint_of_their_own() {
    let mut sender = Sender::new(1, 0);
    sender.offers(0, 0, 2);
    sender.waits(2);
    sender.checkpoint(1);
    // The driver begins anew at the same place, and offers as much as the one before.
    sender.stop();
    sender.start(&[0]);
    sender.waits(4);
    sender.nic.release_checkpoint(1);
    assert_eq!(sender.left(0), numbers(0, 2));
    sender.checkpoint(2);
    sender.nic.release_checkpoint(2);
    assert_eq!(sender.left(0), numbers(0, 2));
    // Another front end. Its packets belong to no checkpoint of the one before.
    sender.offers(0, 2, 4);
    sender.waits(2);
    sender.checkpoint(3);
    step(&sender.nic, FrontEndCommand::Detach);
    sender.front_end = attach(&sender.nic, &sender.rings[0]);
    sender.start(&[4]);
    sender.offers(0, 4, 5);
    sender.waits(3);
    sender.nic.release_checkpoint(3);
    assert_eq!(sender.left(0), numbers(2, 2));
    sender.end();
}

#[test]
fn each_pair_has_its_own_packets_in_a_checkpoint() {
    let mut sender = Sender::new(2, 0);
    sender.offers(0, 0, 4);
    sender.waits(4);
    sender.checkpoint(1);
    sender.offers(0, 4, 5);
    sender.offers(1, 0, 2);
    sender.waits(7);
    sender.nic.release_checkpoint(1);
    assert_eq!([sender.left(0), sender.left(1)], [numbers(0, 4), vec![]]);
    assert_eq!(sender.checkpoint(2), [5, 2]);
    sender.nic.release_checkpoint(2);
    let both = [numbers(4, 1), numbers(0, 2)];
    assert_eq!([sender.left(0), sender.left(1)], both);
    sender.end();
}

#[test]
fn a_ring_that_the_guest_uses_no_more_is_emptied() {
    let mut sender = Sender::new(1, 0);
    sender.offers(0, 0, 2);
    sender.waits(2);
    sender.checkpoint(1);
    let ring = transmit_ring(0) as u16;
    let enabled = false;
    step(&sender.nic, FrontEndCommand::Enable { ring, enabled });
    sender.offers(0, 2, 5);
    let emptied = || sender.rings[0].used() == 5;
    assert!(within(Duration::from_secs(10), emptied));
    let enabled = true;
    step(&sender.nic, FrontEndCommand::Enable { ring, enabled });
    sender.nic.release_checkpoint(1);
    assert_eq!(sender.left(0), numbers(0, 2));
    ask(|reply| sender.nic.stop_holding(reply));
    assert_eq!(sender.left(0), NOTHING);
    sender.end();
}

#[test]
fn packets_stay_in_the_ring_while_too_many_wait() {
    let sender = Sender::new(1, 0);
    let soon = Duration::from_secs(10);
    let ring = &sender.rings[0];
    let most = 16_384;
    for begin in (0..most).step_by(8) {
        sender.offers(0, begin, begin + 8);
        assert!(within(soon, || ring.used() == begin + 8), "{begin}");
    }
    sender.offers(0, most, most + 4);
    sleep(2 * WHILE);
    assert_eq!(ring.used(), most, "there is no room for more");
    ask(|reply| sender.nic.stop_holding(reply));
    assert!(within(soon, || ring.used() == most + 4));
    sender.end();
}

#[test]
fn the_node_announces_a_machine_whose_packets_are_held_back() {
    let sender = Sender::new(1, 0);
    let mac = MAC.0;
    step(&sender.nic, FrontEndCommand::Announce { mac });
    assert_eq!(announced(&sender.networks[0]), 1);
    sender.end();
}

#[test]
fn a_thread_whose_packets_are_all_held_back_rests() {
    let (uplink, network) = UnixDatagram::pair().expect("a pair");
    let uplink = Uplink::from_packets([uplink.into()]);
    let (nic, mut worker) = NetDevice::with_worker("web/0", Nic::new(MAC), uplink).expect("a NIC");
    let ring = TestGuest::new(SIZE);
    let kick = Wake::new().expect("a counter");
    let (socket, _front_end) = UnixStream::pair().expect("a pair");
    ring.send(0, 5);
    let steps = [
        FrontEndCommand::Attach { socket },
        FrontEndCommand::Memory {
            ram: ring.ram.clone(),
        },
        FrontEndCommand::Start {
            ring: transmit_ring(0) as u16,
            setup: ring.setup(0, &kick),
        },
    ];
    nic.hold_back(Box::new(|()| ()));
    for step in steps {
        nic.front_end(step, Box::new(|done| assert!(done.is_ok())));
    }
    worker.commands();
    assert!(!worker.turn(), "there is nothing to do until a release");
    assert_eq!(ring.used(), 5, "the guest's sockets go on");
    nic.stop_holding(Box::new(|()| ()));
    worker.commands();
    assert!(!worker.turn(), "all have left");
    drop(network);
}
