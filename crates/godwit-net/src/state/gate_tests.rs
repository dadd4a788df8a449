use proptest::prelude::*;

use super::*;

/// Lets all packets of a ring leave that may.
fn left(gate: &mut Gate, ring: usize) -> Vec<u8> {
    std::iter::from_fn(|| gate.next(ring))
        .map(|packet| packet[0])
        .collect()
}

fn keep(gate: &mut Gate, ring: usize, number: u8) {
    gate.keep(ring, vec![number; 60].into());
}

fn holding() -> Gate {
    let mut gate = Gate::new(2);
    gate.hold();
    gate
}

#[test]
fn packets_leave_with_their_epoch_and_no_later_ones_do() {
    let mut gate = holding();
    keep(&mut gate, 0, 1);
    keep(&mut gate, 0, 2);
    gate.end_epoch(1);
    keep(&mut gate, 0, 3);
    keep(&mut gate, 1, 4);
    gate.end_epoch(2);
    keep(&mut gate, 0, 5);
    assert_eq!((left(&mut gate, 0), gate.held()), (vec![], Some(5)));
    gate.release(1);
    assert_eq!(
        [left(&mut gate, 0), left(&mut gate, 1)],
        [vec![1, 2], vec![]]
    );
    gate.release(2);
    assert_eq!([left(&mut gate, 0), left(&mut gate, 1)], [vec![3], vec![4]]);
    assert_eq!(gate.held(), Some(1));
}

#[test]
fn an_epoch_that_has_not_ended_releases_nothing() {
    let mut gate = holding();
    keep(&mut gate, 0, 1);
    for unknown in [1, u64::MAX, 0] {
        gate.release(unknown);
        assert_eq!(left(&mut gate, 0), [], "{unknown}");
    }
    gate.end_epoch(5);
    keep(&mut gate, 0, 2);
    // Numbers that do not grow end nothing.
    gate.end_epoch(5);
    gate.end_epoch(3);
    gate.release(4);
    assert_eq!(left(&mut gate, 0), []);
    gate.release(5);
    assert_eq!(left(&mut gate, 0), [1]);
}

#[test]
fn packets_of_an_earlier_series_wait_for_an_epoch_of_the_new_one() {
    let mut gate = holding();
    keep(&mut gate, 0, 1);
    gate.end_epoch(7);
    gate.hold();
    gate.release(7);
    assert_eq!(left(&mut gate, 0), []);
    gate.end_epoch(1);
    gate.release(1);
    assert_eq!(left(&mut gate, 0), [1]);
}

#[test]
fn an_open_gate_has_room_and_keeps_nothing_back() {
    let mut gate = Gate::new(1);
    assert_eq!(
        (gate.holds(), gate.has_room(), gate.held()),
        (false, true, None)
    );
    gate.hold();
    keep(&mut gate, 0, 1);
    gate.open();
    assert_eq!((left(&mut gate, 0), gate.held()), (vec![1], None));
}

#[test]
fn packets_and_bytes_are_bounded() {
    let mut gate = holding();
    (0..MOST_PACKETS).for_each(|_| keep(&mut gate, 0, 0));
    assert!(!gate.has_room());
    gate.end_epoch(1);
    gate.release(1);
    gate.next(0).expect("a packet");
    assert!(gate.has_room());
    let mut gate = holding();
    gate.keep(0, vec![0; MOST_BYTES].into());
    assert!(!gate.has_room());
    gate.open();
    assert!(gate.has_room(), "it keeps nothing more");
}

#[test]
fn epochs_without_an_acknowledgement_are_bounded() {
    let mut gate = holding();
    for number in 1..=100 {
        keep(&mut gate, 0, number);
        gate.end_epoch(u64::from(number));
    }
    assert_eq!(gate.queues[0].ends.len(), MOST_ENDS);
    gate.release(1);
    assert_eq!(left(&mut gate, 0), [1]);
    gate.release(99);
    assert_eq!(
        left(&mut gate, 0).last(),
        Some(&7),
        "the later ones leave together"
    );
    gate.release(100);
    assert_eq!(left(&mut gate, 0).last(), Some(&100));
}

/// The next event of a protected machine.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(usize),
    EndEpoch,
    /// The acknowledgement of an epoch this far back.
    Release(u64),
    Hold,
    Open,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..2_usize).prop_map(Step::Send),
        4 => Just(Step::EndEpoch),
        4 => (0..4_u64).prop_map(Step::Release),
        1 => Just(Step::Hold),
        1 => Just(Step::Open),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Whatever happens, the packets that leave are those of acknowledged epochs, and all of them in order.
    #[test]
    fn the_packets_that_leave_are_those_of_acknowledged_epochs(steps in steps()) {
        let mut gate = holding();
        // Each waiting packet with its epoch, once that has ended.
        let mut waiting: [VecDeque<(Option<u64>, u8)>; 2] = Default::default();
        let (mut holds, mut last, mut acknowledged, mut sent) = (true, 0, 0, 0_u8);
        for step in steps {
            match step {
                Step::Send(ring) => {
                    sent = sent.wrapping_add(1);
                    if holds {
                        keep(&mut gate, ring, sent);
                        waiting[ring].push_back((None, sent));
                    }
                }
                Step::EndEpoch if holds && last - acknowledged < MOST_ENDS as u64 => {
                    last += 1;
                    gate.end_epoch(last);
                    let all = waiting.iter_mut().flatten();
                    all.for_each(|(epoch, _)| *epoch = epoch.or(Some(last)));
                }
                Step::EndEpoch => {}
                Step::Release(back) => {
                    let number = last.saturating_sub(back);
                    gate.release(number);
                    gate.release(last + 1);
                    acknowledged = acknowledged.max(number);
                }
                Step::Hold => {
                    gate.hold();
                    (holds, last, acknowledged) = (true, 0, 0);
                    waiting.iter_mut().flatten().for_each(|(epoch, _)| *epoch = None);
                }
                Step::Open => {
                    gate.open();
                    holds = false;
                }
            }
            for (ring, waiting) in waiting.iter_mut().enumerate() {
                let may = |(epoch, _): &(Option<u64>, u8)| {
                    !holds || epoch.is_some_and(|epoch| epoch <= acknowledged)
                };
                let mut expected = Vec::new();
                while let Some((_, number)) = waiting.pop_front_if(|packet| may(packet)) {
                    expected.push(number);
                }
                prop_assert_eq!(left(&mut gate, ring), expected);
            }
            let count = waiting.iter().map(VecDeque::len).sum();
            prop_assert_eq!(gate.held(), holds.then_some(count));
        }
    }
}
