use proptest::prelude::*;
use vm_memory::GuestAddress;

use super::*;

const SIZE: u16 = 8;

fn ring(left: u16, offered: u16) -> Offered {
    ring_at(0, left, offered)
}

fn ring_at(place: u64, left: u16, offered: u16) -> Offered {
    let at = |offset| GuestAddress(place + offset);
    Offered {
        layout: RingLayout {
            size: SIZE,
            descriptors: at(0),
            available: at(0x1000),
            used: at(0x2000),
        },
        left,
        offered,
    }
}

/// Returns a gate that holds the packets of a ring back.
fn holding(left: u16) -> Gate {
    let mut gate = Gate::new(1);
    gate.started(0, ring(left, left));
    gate.hold(|_| Some(left));
    gate
}

/// Stops the ring of a machine, ends an epoch, and lets the machine go on.
fn checkpoint(gate: &mut Gate, number: u64, ring: Offered) {
    gate.stopped(0, ring);
    gate.end_epoch(number);
    gate.started(0, ring);
}

#[test]
fn packets_leave_with_their_epoch_and_no_later_ones_do() {
    // The count of packets wraps around between the epochs.
    let left = u16::MAX - 1;
    let mut gate = holding(left);
    assert_eq!(gate.sendable(0, left), 0);
    checkpoint(&mut gate, 1, ring(left, left.wrapping_add(3)));
    checkpoint(&mut gate, 2, ring(left, left.wrapping_add(5)));
    assert_eq!(gate.sendable(0, left), 0);
    gate.release(1);
    assert_eq!(gate.sendable(0, left), 3);
    assert_eq!(gate.sendable(0, left.wrapping_add(2)), 1);
    gate.release(2);
    assert_eq!(gate.sendable(0, left.wrapping_add(2)), 3);
    assert_eq!(gate.sendable(0, left.wrapping_add(5)), 0);
    assert_eq!(gate.sendable(0, left.wrapping_add(7)), 0, "never the case");
}

#[test]
fn a_gate_that_nobody_has_closed_is_open() {
    let mut gate = Gate::new(1);
    assert_eq!(
        (gate.sendable(0, 7), gate.held(|_| None)),
        (usize::MAX, None)
    );
    gate.hold(|_| Some(7));
    assert_eq!(gate.sendable(0, 7), 0);
    gate.open();
    assert_eq!(gate.sendable(0, 7), usize::MAX);
    checkpoint(&mut gate, 1, ring(7, 9));
    gate.hold(|_| Some(7));
    gate.release(1);
    assert_eq!(gate.sendable(0, 7), 0, "the epoch was no checkpoint's");
}

#[test]
fn an_epoch_that_has_not_ended_releases_nothing() {
    let mut gate = holding(0);
    gate.stopped(0, ring(0, 2));
    gate.end_epoch(5);
    gate.end_epoch(5);
    gate.end_epoch(3);
    gate.started(0, ring(0, 2));
    for unknown in [6, u64::MAX, 4, 0] {
        gate.release(unknown);
        assert_eq!(gate.sendable(0, 0), 0, "{unknown}");
    }
    gate.release(5);
    assert_eq!(gate.sendable(0, 0), 2);
    // A new series may begin with lower numbers, and knows none of the old ones.
    gate.hold(|_| Some(2));
    gate.release(5);
    checkpoint(&mut gate, 1, ring(2, 3));
    gate.release(1);
    assert_eq!(gate.sendable(0, 2), 1);
}

#[test]
fn a_checkpoint_of_the_stop_at_which_holding_begins_counts() {
    let mut gate = Gate::new(1);
    let left = u16::MAX - 1;
    let ring = ring(left, 0);
    gate.stopped(0, ring);
    gate.hold(|_| None);
    gate.end_epoch(1);
    gate.started(0, ring);
    assert_eq!(gate.sendable(0, left), 0);
    gate.release(1);
    assert_eq!(gate.sendable(0, left), 2);
}

#[test]
fn a_ring_that_may_be_a_new_drivers_waits_for_the_next_checkpoint() {
    let before = ring(0, 3);
    let others = [
        ("after no checkpoint", before, false),
        ("at another position", ring(1, 4), true),
        ("elsewhere in memory", ring_at(0x8000, 0, 3), true),
        ("with less in it", ring(0, 2), true),
        ("with more than its size in it", ring(0, SIZE + 1), true),
    ];
    for (why, after, ends_epoch) in others {
        let mut gate = holding(0);
        checkpoint(&mut gate, 1, before);
        gate.stopped(0, before);
        if ends_epoch {
            gate.end_epoch(2);
        }
        gate.started(0, after);
        gate.release(2);
        gate.release(1);
        assert_eq!(gate.sendable(0, after.left), 0, "{why}");
        let next = Offered {
            offered: after.left + 4,
            ..after
        };
        checkpoint(&mut gate, 3, next);
        gate.release(3);
        assert_eq!(gate.sendable(0, after.left), 4, "{why}");
    }
}

#[test]
fn a_ring_with_more_than_its_size_has_nothing_to_release() {
    let mut gate = holding(0);
    checkpoint(&mut gate, 1, ring(0, SIZE + 1));
    gate.release(1);
    assert_eq!(gate.sendable(0, 0), 0);
}

#[test]
fn epochs_without_an_acknowledgement_are_bounded() {
    let mut gate = holding(0);
    let numbers = 1..=100;
    for number in numbers.clone() {
        checkpoint(&mut gate, number, ring(0, (number as u16).min(SIZE)));
    }
    assert_eq!(gate.rings[0].ends.len(), MOST_ENDS);
    gate.release(1);
    assert_eq!(gate.sendable(0, 0), 1);
    gate.release(*numbers.end());
    assert_eq!(gate.sendable(0, 0), usize::from(SIZE));
}

#[test]
fn packets_that_wait_are_counted_whether_their_ring_runs_or_not() {
    let mut gate = Gate::new(2);
    gate.hold(|_| None);
    gate.stopped(0, ring(1, 4));
    let running = |pair| (pair == 1).then(|| ring(0, 2));
    assert_eq!(gate.held(running), Some(5));
}

/// The next event of a protected machine.
#[derive(Clone, Copy, Debug)]
enum Step {
    Offer(usize, u16),
    Send(usize),
    Checkpoint,
    /// A stop for another reason.
    Pause,
    /// A new driver, with its ring at the old place or at another, after an epoch of its own or not.
    Reset(usize, u64, bool),
    /// The acknowledgement of an epoch this far back.
    Release(u64),
    Hold,
    Open,
}

/// A packet: the driver that has offered it, and the epoch in which it was offered, once that has ended.
#[derive(Clone, Copy, Debug)]
struct Packet {
    epoch: Option<u64>,
    number: u64,
}

/// A driver's ring: packets in the ring, and the number of packets that have left.
struct Driver {
    place: u64,
    left: u16,
    packets: VecDeque<Packet>,
}

impl Driver {
    fn ring(&self) -> Offered {
        let offered = self.left.wrapping_add(self.packets.len() as u16);
        ring_at(self.place, self.left, offered)
    }
}

/// A machine with two transmit rings, which knows of each packet when it may leave.
struct Machine {
    gate: Gate,
    holds: bool,
    last: u64,
    acknowledged: u64,
    drivers: [Driver; 2],
    offered: u64,
    sent: u64,
}

impl Machine {
    fn new(left: u16) -> Self {
        let driver = || Driver {
            place: 0,
            left,
            packets: VecDeque::new(),
        };
        let mut gate = Gate::new(2);
        (0..2).for_each(|pair| gate.started(pair, ring(left, left)));
        Self {
            gate,
            holds: false,
            last: 0,
            acknowledged: 0,
            drivers: [driver(), driver()],
            offered: 0,
            sent: 0,
        }
    }

    /// Returns true if a packet may leave.
    fn may_leave(&self, packet: Packet) -> bool {
        !self.holds || packet.epoch.is_some_and(|epoch| epoch <= self.acknowledged)
    }

    fn stop(&mut self) {
        for pair in 0..2 {
            self.gate.stopped(pair, self.drivers[pair].ring());
        }
    }

    fn start(&mut self) {
        for pair in 0..2 {
            self.gate.started(pair, self.drivers[pair].ring());
        }
    }

    /// Forgets the epochs of a ring's packets: they belong to the next one that ends.
    fn forget(&mut self, pair: usize) {
        let packets = self.drivers[pair].packets.iter_mut();
        packets.for_each(|packet| packet.epoch = None);
    }

    fn end_epoch(&mut self) {
        self.last += 1;
        self.gate.end_epoch(self.last);
        if self.holds {
            let packets = self.drivers.iter_mut().flat_map(|it| &mut it.packets);
            for packet in packets {
                packet.epoch.get_or_insert(self.last);
            }
        }
    }

    /// Returns true unless a primary would wait for an acknowledgement first.
    fn may_end_epoch(&self) -> bool {
        self.last - self.acknowledged < MOST_ENDS as u64
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Offer(pair, count) => {
                let driver = &mut self.drivers[pair];
                let room = SIZE - driver.packets.len() as u16;
                for _ in 0..count.min(room) {
                    self.offered += 1;
                    driver.packets.push_back(Packet {
                        epoch: None,
                        number: self.offered,
                    });
                }
            }
            Step::Send(pair) => self.send(pair),
            Step::Checkpoint if self.may_end_epoch() => {
                self.stop();
                self.end_epoch();
                self.start();
            }
            Step::Pause | Step::Checkpoint => {
                self.stop();
                (0..2).for_each(|pair| self.forget(pair));
                self.start();
            }
            Step::Reset(pair, place, ends_epoch) => {
                self.gate.stopped(pair, self.drivers[pair].ring());
                let before = self.drivers[pair].left;
                let left = if place == 0 { before } else { 0 };
                self.drivers[pair] = Driver {
                    place,
                    left,
                    packets: VecDeque::new(),
                };
                if ends_epoch && self.may_end_epoch() {
                    let other = 1 - pair;
                    self.gate.stopped(other, self.drivers[other].ring());
                    self.end_epoch();
                    self.gate.started(other, self.drivers[other].ring());
                }
                self.gate.started(pair, self.drivers[pair].ring());
            }
            Step::Release(back) => {
                let number = self.last.saturating_sub(back);
                self.gate.release(number);
                self.acknowledged = self.acknowledged.max(number);
                self.gate.release(self.last + 1);
            }
            Step::Hold => {
                let left = [0, 1].map(|pair| self.drivers[pair].left);
                self.gate.hold(|pair| Some(left[pair]));
                (self.holds, self.last, self.acknowledged) = (true, 0, 0);
                (0..2).for_each(|pair| self.forget(pair));
            }
            Step::Open => {
                self.gate.open();
                self.holds = false;
            }
        }
    }

    /// Sends all packets that the gate lets leave: exactly those that may.
    fn send(&mut self, pair: usize) {
        let mut last = 0;
        loop {
            let driver = &self.drivers[pair];
            let may = self.gate.sendable(pair, driver.left) > 0;
            let Some(packet) = driver.packets.front().copied() else {
                return assert!(!self.holds || !may, "more than was offered");
            };
            assert_eq!(may, self.may_leave(packet), "{packet:?}");
            if !may {
                return;
            }
            assert!(packet.number > last);
            last = packet.number;
            self.sent += 1;
            let driver = &mut self.drivers[pair];
            driver.packets.pop_front();
            driver.left = driver.left.wrapping_add(1);
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..2_usize, 1..=SIZE).prop_map(|(pair, count)| Step::Offer(pair, count)),
        6 => (0..2_usize).prop_map(Step::Send),
        5 => Just(Step::Checkpoint),
        5 => (0..4_u64).prop_map(Step::Release),
        1 => Just(Step::Pause),
        1 => (0..2_usize, 0..3_u64, any::<bool>())
            .prop_map(|(pair, place, ends)| Step::Reset(pair, place, ends)),
        1 => Just(Step::Hold),
        1 => Just(Step::Open),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Whatever happens, the packets that leave are those of acknowledged epochs, and all of them.
    #[test]
    fn the_packets_that_leave_are_those_of_acknowledged_epochs(
        left in prop_oneof![Just(0), any::<u16>(), Just(u16::MAX - 5)], steps in steps(),
    ) {
        let mut machine = Machine::new(left);
        machine.take(Step::Hold);
        for step in steps {
            machine.take(step);
        }
        machine.take(Step::Open);
        (0..2).for_each(|pair| machine.send(pair));
        prop_assert!(machine.drivers.iter().all(|driver| driver.packets.is_empty()));
    }
}
