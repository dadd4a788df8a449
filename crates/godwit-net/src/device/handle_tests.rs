use std::io::Read;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::mpsc;
use std::thread::sleep;
use std::time::Instant;

#[path = "checkpoint_tests.rs"]
mod checkpoints;

use super::*;
use crate::device::queues::features::{MERGEABLE, VERSION_1};
use crate::device::session::{receive_ring, transmit_ring};
use crate::device::test_guest::TestGuest;
use crate::frame::announce::{Token, rarp};
use crate::frame::packet::{HEADER, SMALLEST};
use crate::state::pace::MOST_AHEAD;

const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const OWN: Station = Station {
    mac: MAC,
    vlan: None,
};
/// Longer than the time until the first repeated announcement.
const WHILE: Duration = Duration::from_millis(120);

/// Returns the thread's answer to a request.
fn ask<T: Send + 'static>(question: impl FnOnce(Reply<T>)) -> T {
    let (reply, answer) = mpsc::channel();
    question(Box::new(move |answered| {
        let _ = reply.send(answered);
    }));
    let answer = answer.recv_timeout(Duration::from_secs(10));
    answer.expect("the thread answers")
}

/// Counts the announcements that leave within [`WHILE`].
fn announced(network: &UnixDatagram) -> usize {
    network.set_read_timeout(Some(WHILE)).expect("a limit");
    let mut packet = [0; 2048];
    let mut count = 0;
    while let Ok(length) = network.recv(&mut packet) {
        let frame = &packet[HEADER..length];
        assert_eq!(frame[..42], rarp(OWN, Token::default())[..42]);
        count += 1;
    }
    count
}

/// Carries out a step of the protocol.
fn step(nic: &NetDevice, command: FrontEndCommand) -> u16 {
    ask(|reply| nic.front_end(command, reply)).expect("is done")
}

/// Attaches a front end that shares the guest's memory.
fn attach(nic: &NetDevice, guest: &TestGuest) -> UnixStream {
    let (socket, front_end) = UnixStream::pair().expect("a pair");
    let ram = guest.ram.clone();
    let features = VERSION_1 | MERGEABLE;
    for command in [
        FrontEndCommand::Attach { socket },
        FrontEndCommand::Features { features },
        FrontEndCommand::Memory { ram },
    ] {
        step(nic, command);
    }
    front_end
}

/// Starts a ring of the guest. Returns the kick with which the guest notifies of its buffers.
fn start(nic: &NetDevice, guest: &TestGuest, ring: usize, base: u16) -> Wake {
    let kick = Wake::new().expect("a counter");
    let setup = guest.setup(base, &kick);
    let ring = ring as u16;
    step(nic, FrontEndCommand::Start { ring, setup });
    kick
}

/// Starts the transmit rings of the first `pairs` pairs, in the memory after their receive rings.
fn start_sending(nic: &NetDevice, last_receiving: &TestGuest, pairs: usize) {
    let mut sending = last_receiving.beside();
    for pair in 0..pairs {
        start(nic, &sending, transmit_ring(pair), 0);
        sending = sending.beside();
    }
}

/// Number of packets waiting for the guest at its start.
const BURST: u16 = 200;
const SIZE: u16 = 256;

/// A NIC that has a burst for a guest which has just been attached.
struct Burst {
    nic: NetDevice,
    thread: NetThread,
    guest: TestGuest,
    kick: Wake,
    network: UnixDatagram,
    front_end: UnixStream,
}

impl Burst {
    fn new() -> Self {
        let (uplink, network) = UnixDatagram::pair().expect("a pair");
        uplink.set_nonblocking(true).expect("does not block");
        let uplink = Uplink::from_packets([uplink.into()]);
        let (nic, thread) = NetDevice::spawn("web/0", Nic::new(MAC), uplink).expect("a thread");
        ask(|reply| nic.freeze(reply));
        for _ in 0..BURST {
            network.send(&[7; SMALLEST]).expect("is taken");
        }
        let all_wait = || nic.snapshot().waiting == usize::from(BURST);
        assert!(within(Duration::from_secs(10), all_wait));
        let guest = TestGuest::new(SIZE);
        guest.offer(SIZE);
        let front_end = attach(&nic, &guest);
        let kick = start(&nic, &guest, receive_ring(0), 0);
        start_sending(&nic, &guest, 1);
        nic.release();
        Self {
            nic,
            thread,
            guest,
            kick,
            network,
            front_end,
        }
    }

    /// Asserts that the guest gets this many buffers, and no more within [`WHILE`].
    fn gets(&self, count: u16) {
        within(Duration::from_secs(10), || self.guest.used() >= count);
        sleep(WHILE);
        assert_eq!(self.guest.used(), count);
    }

    fn end(self) {
        self.nic.end();
        assert!(self.thread.join_within(Duration::from_secs(10)));
    }
}

/// Returns true if the condition becomes true within the limit.
fn within(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !is_so() {
        if began.elapsed() > limit {
            return false;
        }
        sleep(Duration::from_millis(1));
    }
    true
}

#[test]
fn a_burst_reaches_the_guest_at_the_pace_at_which_it_comes_to_it() {
    let burst = Burst::new();
    let most = MOST_AHEAD as u16;
    burst.gets(most);
    for again in [1, 10] {
        burst.guest.offer(SIZE + again);
        burst.kick.signal();
        burst.gets(most + again);
    }
    burst.end();
}

#[test]
fn what_was_held_for_a_guest_waits_for_the_ring_of_its_answers() {
    let burst = Burst::new();
    let most = MOST_AHEAD as u16;
    burst.gets(most);
    let sending = transmit_ring(0) as u16;
    step(&burst.nic, FrontEndCommand::Stop { ring: sending });
    burst.guest.offer(SIZE + 10);
    burst.kick.signal();
    burst.gets(most);
    start_sending(&burst.nic, &burst.guest, 1);
    burst.gets(most + 10);
    burst.end();
}

#[test]
fn a_guest_that_offers_its_buffers_again_late_waits_no_longer_than_it_takes_to_come_to_all() {
    let burst = Burst::new();
    let most = MOST_AHEAD as u16;
    burst.gets(most);
    burst.guest.came_to(most - 1);
    burst.gets(most);
    burst.guest.came_to(most);
    let gets_all = || burst.guest.used() == BURST;
    assert!(within(Duration::from_millis(300), gets_all));
    burst.end();
}

#[test]
fn a_machine_whose_memory_shrinks_is_disconnected_alone() {
    let [mut burst, beside] = [Burst::new(), Burst::new()];
    burst.gets(MOST_AHEAD as u16);
    burst.guest.memory.set_len(0).expect("shrinks");
    burst.kick.signal();
    let is_told = || burst.nic.snapshot().lost_pages;
    assert!(within(Duration::from_secs(10), is_told));
    let left = burst.front_end.read(&mut [0; 1]).expect("is disconnected");
    assert_eq!(left, 0);
    assert!(!burst.nic.snapshot().broken, "its guest is not to blame");
    beside.gets(MOST_AHEAD as u16);
    step(&burst.nic, FrontEndCommand::Detach);
    let next = TestGuest::new(SIZE);
    next.offer(SIZE);
    let _front_end = attach(&burst.nic, &next);
    let _kick = start(&burst.nic, &next, receive_ring(0), 0);
    start_sending(&burst.nic, &next, 1);
    assert!(within(Duration::from_secs(10), || next.used() > 0));
    assert!(!burst.nic.snapshot().lost_pages);
    burst.end();
    beside.end();
}

#[test]
fn late_packets_for_a_thread_that_does_not_take_them_are_bounded() {
    let unread = Unread::default();
    let packets = vec![Packet::from([0; 100]); MOST_PACKETS];
    assert_eq!(unread.add(&packets[..10]), 10);
    assert_eq!(unread.add(&packets), MOST_PACKETS - 10);
    assert_eq!(unread.add(&packets[..1]), 0);
    unread.remove(&packets[..3]);
    assert_eq!(unread.add(&packets[..10]), 3);
    unread.remove(&packets);
    let large = Packet::from(vec![0; MOST_BYTES]);
    assert_eq!(unread.add(&[large.clone(), large]), 1);
}

#[test]
fn a_machine_that_moves_on_is_announced_here_no_more_unless_it_stays() {
    let (uplink, network) = UnixDatagram::pair().expect("a pair");
    uplink.set_nonblocking(true).expect("does not block");
    let uplink = Uplink::from_packets([uplink.into()]);
    let (nic, thread) = NetDevice::spawn("web/0", Nic::arriving(MAC), uplink).expect("a thread");
    ask(|reply| nic.take_over(false, reply));
    ask(|reply| nic.freeze(reply));
    assert_eq!(announced(&network), 1, "the first alone");
    nic.release();
    assert!(announced(&network) > 0, "the machine stays after all");
    nic.end();
    assert!(thread.join_within(Duration::from_secs(10)));
}

#[test]
fn a_front_end_has_its_machine_announced_once_that_is_here() {
    let (uplink, network) = UnixDatagram::pair().expect("a pair");
    uplink.set_nonblocking(true).expect("does not block");
    let uplink = Uplink::from_packets([uplink.into()]);
    let (nic, thread) = NetDevice::spawn("web/0", Nic::arriving(MAC), uplink).expect("a thread");
    let announce = || step(&nic, FrontEndCommand::Announce { mac: MAC.0 });
    announce();
    assert_eq!(announced(&network), 0, "it is its former place's");
    nic.release();
    announce();
    assert_eq!(announced(&network), 1);
    nic.end();
    assert!(thread.join_within(Duration::from_secs(10)));
}

#[test]
fn what_waited_for_a_driver_is_not_given_to_the_next_that_begins_anew() {
    for goes_on in [true, false] {
        let burst = Burst::new();
        let most = MOST_AHEAD as u16;
        burst.gets(most);
        let ring = receive_ring(0);
        let stop = FrontEndCommand::Stop { ring: ring as u16 };
        let base = step(&burst.nic, stop);
        burst.network.send(&[8; SMALLEST]).expect("is taken");
        // A new driver clears the ring.
        let guest = if goes_on {
            burst.guest.offer(SIZE + most);
            None
        } else {
            Some(TestGuest::new(SIZE))
        };
        if let Some(guest) = &guest {
            guest.offer(SIZE);
            let ram = guest.ram.clone();
            step(&burst.nic, FrontEndCommand::Memory { ram });
        }
        let at = if goes_on { base } else { 0 };
        let _kick = start(&burst.nic, guest.as_ref().unwrap_or(&burst.guest), ring, at);
        burst.network.send(&[9; SMALLEST]).expect("is taken");
        let (seen, expected) = match &guest {
            Some(guest) => (guest, 1),
            None => (&burst.guest, BURST + 2),
        };
        let gets_all = || seen.used() >= expected;
        assert!(within(Duration::from_secs(10), gets_all), "{}", seen.used());
        sleep(WHILE);
        assert_eq!(seen.used(), expected, "{goes_on}");
        burst.end();
    }
}

/// Creates a NIC with two queue pairs that a thread serves, and returns the network's end of each uplink queue.
fn two_pairs() -> (NetDevice, NetThread, Vec<UnixDatagram>) {
    let (queues, networks): (Vec<_>, Vec<_>) = (0..2)
        .map(|_| {
            let (queue, network) = UnixDatagram::pair().expect("a pair");
            queue.set_nonblocking(true).expect("does not block");
            (queue.into(), network)
        })
        .unzip();
    let uplink = Uplink::from_packets(queues);
    let (nic, thread) = NetDevice::spawn("web/0", Nic::new(MAC), uplink).expect("a thread");
    (nic, thread, networks)
}

#[test]
fn a_pair_without_room_does_not_stop_the_other() {
    let (nic, thread, networks) = two_pairs();
    let first = TestGuest::new(SIZE);
    let second = first.beside();
    let _front_end = attach(&nic, &first);
    first.offer(SIZE);
    let _kick = start(&nic, &first, receive_ring(0), 0);
    let kick = start(&nic, &second, receive_ring(1), 0);
    start_sending(&nic, &second, 2);
    networks[1].send(&[7; SMALLEST]).expect("is taken");
    assert!(within(Duration::from_secs(10), || nic.snapshot().waiting == 1));
    for count in 1..=2 {
        networks.iter().for_each(|network| {
            network.send(&[7; SMALLEST]).expect("is taken");
        });
        let gets_it = || first.used() == count;
        assert!(within(Duration::from_secs(10), gets_it), "{}", first.used());
    }
    second.offer(SIZE);
    kick.signal();
    let gets_all = || second.used() == 3;
    assert!(
        within(Duration::from_secs(10), gets_all),
        "{}",
        second.used()
    );
    nic.end();
    assert!(thread.join_within(Duration::from_secs(10)));
}

#[test]
fn what_a_queue_brought_before_the_announcement_came_by_another_is_not_lost() {
    for is_asked_at_once in [false, true] {
        let (nic, thread, networks) = two_pairs();
        let networks = Arc::new(networks);
        let (asked, answer) = mpsc::channel();
        let ask_late = {
            let nic = nic.clone();
            move || {
                let asked = asked.clone();
                nic.copy_late(Box::new(move |late| {
                    let _ = asked.send(late);
                }));
            }
        };
        // Sent on the NIC's own thread, which finds both packets in the next turn, the announcement first.
        let (sees, at_once) = (Arc::clone(&networks), ask_late.clone());
        nic.freeze(Box::new(move |state| {
            let for_many: Vec<u8> = [&[0; HEADER][..], &[0xff; 6], &[8; 60]].concat();
            sees[1].send(&for_many).expect("is taken");
            let place = [&[0; HEADER][..], &rarp(OWN, state.token)].concat();
            sees[0].send(&place).expect("is taken");
            if is_asked_at_once {
                at_once();
            }
        }));
        if !is_asked_at_once {
            // The thread has read both in a separate turn.
            assert!(within(Duration::from_secs(10), || nic.snapshot().waiting == 1));
            ask_late();
        }
        let late = answer.recv_timeout(Duration::from_secs(10));
        let late = late.expect("the thread answers");
        assert!(late.is_all);
        assert_eq!(late.packets.len(), 1, "{is_asked_at_once}");
        nic.end();
        assert!(thread.join_within(Duration::from_secs(10)));
    }
}

#[test]
fn each_pair_gets_what_its_queue_of_the_uplink_brings_and_one_that_is_used_what_others_do() {
    let (nic, thread, networks) = two_pairs();
    assert_eq!(nic.queues(), 2);
    let first = TestGuest::new(SIZE);
    let second = first.beside();
    let _front_end = attach(&nic, &first);
    for (pair, guest) in [&first, &second].into_iter().enumerate() {
        guest.offer(SIZE);
        start(&nic, guest, receive_ring(pair), 0);
    }
    start_sending(&nic, &second, 2);
    let used = || [first.used(), second.used()];
    let come = |expected: [u16; 2]| {
        within(Duration::from_secs(10), || used() == expected);
        assert_eq!(used(), expected);
    };
    networks[1].send(&[7; SMALLEST]).expect("is taken");
    come([0, 1]);
    networks[0].send(&[7; SMALLEST]).expect("is taken");
    come([1, 1]);
    // Held packets go through the same pairs as packets delivered at once.
    ask(|reply| nic.freeze(reply));
    for network in [&networks[1], &networks[0], &networks[1]] {
        network.send(&[7; SMALLEST]).expect("is taken");
    }
    assert!(within(Duration::from_secs(10), || nic.snapshot().waiting == 3));
    nic.release();
    come([2, 3]);
    let (ring, enabled) = (receive_ring(1) as u16, false);
    step(&nic, FrontEndCommand::Enable { ring, enabled });
    networks[1].send(&[7; SMALLEST]).expect("is taken");
    come([3, 3]);
    let seen = nic.snapshot().queues;
    assert_eq!(
        seen.iter().map(|pair| pair.is_used).collect::<Vec<_>>(),
        [true, false]
    );
    nic.end();
    assert!(thread.join_within(Duration::from_secs(10)));
}

#[test]
fn a_nic_has_no_more_pairs_than_a_front_end_can_have_rings() {
    for count in [0, MOST_PAIRS + 1] {
        let queues = (0..count).map(|_| UnixDatagram::unbound().expect("a socket").into());
        let uplink = Uplink::from_packets(queues);
        assert!(
            NetDevice::spawn("web/0", Nic::new(MAC), uplink).is_err(),
            "{count}"
        );
    }
}
