use super::*;
use crate::frame::packet::{HEADER, set_queue};
use crate::frame::vlan::Vlan;
use crate::state::held::MOST_PACKETS;
use crate::state::pace::MOST_AHEAD;
use crate::state::stations::REMEMBERED;
use proptest::prelude::*;

const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const TOKEN: Token = Token([7; 16]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);
/// The NIC itself, without a VLAN.
const OWN: Station = Station {
    mac: MAC,
    vlan: None,
};
/// A station behind the NIC, such as a container of the guest.
const BEHIND: Mac = Mac([2, 0, 0, 0, 0, 3]);

fn packet_of(frame: &[u8]) -> Packet {
    [&[0; HEADER][..], frame].concat().into()
}

fn numbered(to: Mac, number: u32) -> Packet {
    let frame = [&to.0[..], &OTHER.0, &[8, 0], &number.to_le_bytes()].concat();
    packet_of(&frame)
}

/// Brings the VM's announcement to the source.
fn announce(source: &mut Nic) {
    let announcement = packet_of(&announce::rarp(OWN, TOKEN));
    assert_eq!(source.from_uplink(&announcement, true), Fate::Announced);
    source.announced();
}

/// Takes all packets that the guest can get now.
fn drain(nic: &mut Nic) -> Vec<Packet> {
    let mut all = Vec::new();
    while let Some(queue) = nic.next_for_guest(|_| true) {
        all.extend(nic.for_guest(queue).map(|packet| Packet::from(&*packet)));
        nic.took_first(queue);
    }
    all
}

/// Moves the NIC's state to a new destination, which is returned.
fn moved(source: &mut Nic) -> Nic {
    let state = State::decode(&source.read_state().encode()).expect("a state");
    let mut destination = Nic::arriving(MAC);
    destination.write_state(state).expect("is taken");
    destination
}

fn frame_from(mac: Mac) -> Vec<u8> {
    [&[0xff; 6][..], &mac.0, &[8, 0], &[0x45; 46]].concat()
}

/// Returns the stations of the announcements.
fn announced(nic: &Nic) -> Vec<Station> {
    let frames = nic.announcements();
    frames.iter().filter_map(|frame| station(frame)).collect()
}

#[test]
fn stations_are_announced_as_which_the_guest_sent_lately_and_no_others() {
    let mut nic = Nic::new(MAC);
    let old = Mac([2, 0, 0, 0, 0, 4]);
    nic.sent(&frame_from(old), 60);
    nic.time_is(REMEMBERED);
    let in_vlan = [&[0xff; 6][..], &MAC.0, &[0x81, 0, 0, 5, 8, 0], &[0; 46]].concat();
    for frame in [frame_from(BEHIND), in_vlan, frame_from(MAC)] {
        nic.sent(&frame, 60);
    }
    let station = |mac, vlan| Station { mac, vlan };
    let behind = station(BEHIND, None);
    let all = [OWN, station(MAC, Vlan::new(5)), behind];
    assert_eq!(announced(&nic), all);
    // The source knows packets for any of these stations.
    let mut elsewhere = moved(&mut nic);
    assert_eq!(announced(&elsewhere), all);
    elsewhere.take_over(false);
    elsewhere.buffer(TOKEN);
    announce(&mut elsewhere);
    assert_eq!(
        elsewhere.from_uplink(&numbered(BEHIND, 1), true),
        Fate::Held
    );
    // A station heard on the network has gone there.
    assert_eq!(
        nic.from_uplink(&packet_of(&frame_from(BEHIND)), true),
        Fate::Deliver
    );
    assert_eq!(announced(&nic), all[..2]);
}

#[test]
fn an_address_that_a_front_end_names_is_announced_unless_it_is_none() {
    let nic = Nic::new(MAC);
    let of = |mac| {
        nic.announcements_with(mac)
            .iter()
            .filter_map(|frame| station(frame))
            .collect::<Vec<_>>()
    };
    let (mac, vlan) = (BEHIND, None);
    assert_eq!(of(BEHIND), [Station { mac, vlan }]);
    for none in [Mac::NOBODY, Mac([0xff; 6])] {
        assert_eq!(of(none), []);
    }
}

#[test]
fn packets_pass_while_it_releases() {
    let mut nic = Nic::new(MAC);
    assert_eq!(nic.from_uplink(&numbered(MAC, 1), true), Fate::Deliver);
    assert_eq!(nic.from_uplink(&[0; 13], true), Fate::Dropped, "no frame");
}

#[test]
fn while_it_buffers_what_the_guest_offers_stays_in_its_ring() {
    let mut nic = Nic::new(MAC);
    assert!(nic.may_transmit());
    nic.buffer(TOKEN);
    assert!(!nic.may_transmit());
    nic.release();
    assert!(nic.may_transmit(), "and leaves when it is released");
}

#[test]
fn what_the_guest_has_no_room_for_is_held_while_its_machine_moves_and_waits_in_the_uplink_otherwise()
 {
    let mut nic = Nic::new(MAC);
    assert!(!nic.wants_uplink(0, false));
    nic.keep_all(true);
    assert!(nic.wants_uplink(0, false));
    assert_eq!(nic.from_uplink(&numbered(MAC, 0), false), Fate::Held);
    assert_eq!(nic.from_uplink(&numbered(MAC, 1), true), Fate::Held);
    let mut count = 2;
    while nic.wants_uplink(0, false) {
        assert_eq!(nic.from_uplink(&numbered(MAC, count), false), Fate::Held);
        count += 1;
    }
    assert_eq!(count as usize, MOST_PACKETS, "the uplink has the rest");
    nic.keep_all(false);
    let all: Vec<Packet> = (0..count).map(|number| numbered(MAC, number)).collect();
    assert_eq!(drain(&mut nic), all);
    assert!(!nic.wants_uplink(0, false) && nic.wants_uplink(0, true));
}

/// Builds a packet of an uplink queue.
fn of_queue(queue: u16, number: u32) -> Packet {
    let mut packet = numbered(MAC, number);
    set_queue(&mut packet, queue);
    packet
}

#[test]
fn a_queue_without_room_does_not_stop_another_in_a_move_or_at_other_times() {
    for keeps_all in [false, true] {
        let mut nic = Nic::new(MAC).with_pairs(2);
        nic.keep_all(keeps_all);
        nic.put_off(&of_queue(1, 0));
        assert!(nic.wants_uplink(0, true));
        assert_eq!(nic.from_uplink(&of_queue(0, 1), true), Fate::Deliver);
        nic.put_off(&of_queue(0, 1));
        assert_eq!(nic.next_for_guest(|queue| queue == 0), Some(0));
        assert_eq!(nic.wants_uplink(1, true), keeps_all, "not past another");
        assert_eq!(nic.from_uplink(&of_queue(1, 2), true), Fate::Held);
        let all = [of_queue(1, 0), of_queue(0, 1), of_queue(1, 2)];
        assert_eq!(drain(&mut nic), all, "in order when both have room");
    }
}

#[test]
fn a_queue_goes_on_when_another_has_taken_all_the_room_and_counts_what_it_loses() {
    let mut nic = Nic::new(MAC).with_pairs(2);
    nic.keep_all(true);
    while nic.wants_uplink(1, false) {
        nic.from_uplink(&of_queue(1, 0), false);
    }
    assert!(nic.wants_uplink(0, true) && !nic.wants_uplink(0, false));
    assert_eq!(nic.from_uplink(&of_queue(0, 1), true), Fate::Deliver);
    nic.put_off(&of_queue(0, 1));
    assert_eq!(nic.counters().held_overflow, 1);
    assert_eq!(nic.waiting(), MOST_PACKETS);
}

#[test]
fn a_guest_is_given_packets_at_a_pace_while_its_machine_moves_and_as_they_come_otherwise() {
    let mut nic = Nic::new(MAC);
    nic.pace(0).starts(0, 256);
    nic.pace(0).offered(256);
    for _ in 0..MOST_AHEAD {
        nic.received(0, 60, 1);
    }
    assert!(!nic.is_ahead(0));
    nic.keep_all(true);
    assert!(nic.is_ahead(0), "what it has counts from the start");
    nic.pace(0).offered(257);
    assert!(!nic.is_ahead(0));
}

#[test]
fn a_station_that_only_claims_to_announce_the_machine_changes_nothing() {
    let mut nic = Nic::new(MAC);
    nic.buffer(TOKEN);
    let forged = packet_of(&announce::rarp(OWN, Token([8; 16])));
    nic.from_uplink(&forged, true);
    assert!(!nic.is_announced_elsewhere());
    announce(&mut nic);
    assert!(nic.is_announced_elsewhere());
}

#[test]
fn what_other_queues_brought_before_the_announcement_is_held_until_all_of_it_is() {
    let many = Mac([0xff; 6]);
    let mut nic = Nic::new(MAC);
    nic.buffer(TOKEN);
    let announcement = packet_of(&announce::rarp(OWN, TOKEN));
    assert_eq!(nic.from_uplink(&announcement, true), Fate::Announced);
    assert!(!nic.is_announced_elsewhere());
    assert_eq!(nic.from_uplink(&numbered(many, 1), true), Fate::Held);
    nic.announced();
    assert!(nic.is_announced_elsewhere());
    assert_eq!(nic.from_uplink(&numbered(many, 2), true), Fate::Dropped);
}

#[test]
fn a_move_that_fails_gives_everything_back_in_order() {
    let mut nic = Nic::new(MAC);
    nic.buffer(TOKEN);
    for number in 0..3 {
        assert_eq!(nic.from_uplink(&numbered(MAC, number), true), Fate::Held);
    }
    assert_eq!(nic.read_state().held.len(), 3);
    for number in 3..5 {
        assert_eq!(nic.from_uplink(&numbered(MAC, number), true), Fate::Held);
    }
    assert_eq!(nic.copy_new().len(), 2);
    assert_eq!(nic.next_for_guest(|_| true), None);
    nic.release();
    // A new packet comes after the waiting packets.
    assert!(!nic.wants_uplink(0, true));
    assert_eq!(nic.from_uplink(&numbered(MAC, 5), true), Fate::Held);
    let all: Vec<Packet> = (0..6).map(|number| numbered(MAC, number)).collect();
    assert_eq!(drain(&mut nic), all);
    assert_eq!(nic.from_uplink(&numbered(MAC, 6), true), Fate::Deliver);
}

#[test]
fn at_the_new_place_the_guest_gets_the_former_places_packets_first() {
    let mut source = Nic::new(MAC);
    source.sent(&frame_from(BEHIND), 60);
    source.buffer(TOKEN);
    source.from_uplink(&numbered(MAC, 0), true);
    let mut destination = moved(&mut source);
    assert_eq!(
        destination.from_uplink(&numbered(MAC, 0), true),
        Fate::Dropped,
        "its former place has it"
    );
    source.from_uplink(&numbered(MAC, 1), true);
    let frames = destination.take_over(true);
    assert_eq!(
        frames.len(),
        2,
        "its own address and the one that the guest sent from"
    );
    source.from_uplink(&numbered(MAC, 2), true);
    assert_eq!(destination.from_uplink(&numbered(MAC, 3), true), Fate::Held);
    assert!(!source.is_announced_elsewhere());
    assert_eq!(
        source.from_uplink(&packet_of(&frames[0]), true),
        Fate::Announced
    );
    source.announced();
    assert!(source.is_announced_elsewhere());
    assert_eq!(
        source.from_uplink(&numbered(Mac([0xff; 6]), 9), true),
        Fate::Dropped,
        "the new place has it"
    );
    assert_eq!(
        drain(&mut destination),
        [numbered(MAC, 0)],
        "what is here need not wait"
    );
    source
        .copy_new()
        .into_iter()
        .for_each(|packet| destination.late(packet));
    destination.late_ended();
    let rest = [1, 2, 3].map(|number| numbered(MAC, number));
    assert_eq!(drain(&mut destination), rest);
    assert_eq!(destination.counters().moves, 1);
    assert!(!source.may_transmit(), "the source never sends again");
}

#[test]
fn a_packet_that_the_announcement_has_overtaken_is_not_lost() {
    let mut source = Nic::new(MAC);
    source.buffer(TOKEN);
    let mut destination = moved(&mut source);
    destination.take_over(true);
    announce(&mut source);
    destination.late_ended();
    assert_eq!(source.from_uplink(&numbered(MAC, 1), true), Fate::Held);
    for packet in source.copy_new() {
        destination.late(packet);
    }
    assert_eq!(drain(&mut destination), [numbered(MAC, 1)]);
}

#[test]
fn a_packet_for_many_that_came_to_both_places_is_given_once() {
    let many = Mac([0xff; 6]);
    let mut source = Nic::new(MAC);
    source.buffer(TOKEN);
    let mut destination = moved(&mut source);
    destination.take_over(true);
    source.from_uplink(&numbered(many, 1), true);
    destination.from_uplink(&numbered(many, 1), true);
    destination.from_uplink(&numbered(many, 1), true);
    destination.from_uplink(&numbered(MAC, 1), true);
    source
        .copy_new()
        .into_iter()
        .for_each(|packet| destination.late(packet));
    destination.late_ended();
    let expected = [numbered(many, 1), numbered(many, 1), numbered(MAC, 1)];
    assert_eq!(drain(&mut destination), expected);
    assert_eq!(destination.counters().twins_dropped, 1);
}

/// A switch that tracks the listeners of a group brings the group's packets to the source until the guest has joined at
/// the destination.
#[test]
fn a_packet_for_a_group_that_came_to_one_place_or_both_is_given_once() {
    let group = Mac([1, 0, 0x5e, 0x50, 0, 1]);
    let mut source = Nic::new(MAC);
    source.buffer(TOKEN);
    let mut destination = moved(&mut source);
    // Both nodes have the packet, and the VM runs at neither.
    source.from_uplink(&numbered(group, 0), true);
    destination.from_uplink(&numbered(group, 0), true);
    destination.take_over(true);
    announce(&mut source);
    source.from_uplink(&numbered(group, 1), true);
    destination.late_ended();
    source.from_uplink(&numbered(group, 2), true);
    assert_eq!(
        destination.from_uplink(&numbered(group, 2), true),
        Fate::Deliver
    );
    for packet in source.copy_new() {
        destination.late(packet);
    }
    assert_eq!(
        drain(&mut destination),
        [numbered(group, 0), numbered(group, 1)]
    );
    source.from_uplink(&numbered(group, 3), true);
    for packet in source.copy_new() {
        destination.late(packet);
    }
    assert_eq!(
        destination.from_uplink(&numbered(group, 3), true),
        Fate::Dropped
    );
    assert_eq!(drain(&mut destination), [numbered(group, 3)]);
}

#[test]
fn a_state_is_written_only_in_clone_mode_and_only_to_the_same_nic() {
    let state = Nic::new(MAC).read_state();
    assert_eq!(
        Nic::new(MAC).write_state(state.clone()),
        Err(RestoreError::Working)
    );
    assert_eq!(
        Nic::arriving(OTHER).write_state(state),
        Err(RestoreError::Another {
            theirs: MAC,
            own: OTHER
        })
    );
}

#[test]
fn a_state_with_another_number_of_pairs_is_refused() {
    let state = Nic::new(MAC).with_pairs(2).read_state();
    let refused = Nic::arriving(MAC).write_state(state.clone());
    assert_eq!(refused, Err(RestoreError::Pairs { theirs: 2, own: 1 }));
    let mut same = Nic::arriving(MAC).with_pairs(2);
    assert_eq!(same.write_state(state), Ok(()));
}

#[test]
fn what_overflows_is_counted() {
    let mut nic = Nic::new(MAC);
    nic.buffer(TOKEN);
    let large: Packet = vec![0; 1 << 20].into();
    let fates: Vec<Fate> = (0..40).map(|_| nic.from_uplink(&large, true)).collect();
    assert_eq!(fates.iter().filter(|&&fate| fate == Fate::Held).count(), 32);
    assert_eq!(nic.counters().held_overflow, 8);
    assert_eq!(nic.counters().held, 40);
}

/// The next event of a move.
#[derive(Clone, Copy, Debug)]
enum Step {
    Packet,
    GuestReads,
    SendLate,
}

proptest! {
    /// A switch brings each packet to the known node, and the announcement in between. Whatever the order of events,
    /// the guest gets every packet once and in order.
    #[test]
    fn no_packet_is_lost_or_twice_or_out_of_order(
        before in 0_u32..5, frozen in 0_u32..20, until_announced in 0_u32..20,
        steps in prop::collection::vec(prop_oneof![
            Just(Step::Packet), Just(Step::GuestReads), Just(Step::SendLate)
        ], 0..60),
        fails in any::<bool>(),
    ) {
        let mut number = 0;
        let mut next = || { number += 1; numbered(MAC, number) };
        let mut got: Vec<Packet> = Vec::new();
        let mut source = Nic::new(MAC);
        for _ in 0..before {
            let packet = next();
            prop_assert_eq!(source.from_uplink(&packet, true), Fate::Deliver);
            got.push(packet);
        }
        source.buffer(TOKEN);
        for _ in 0..frozen {
            source.from_uplink(&next(), true);
        }
        let mut destination = moved(&mut source);
        for _ in 0..until_announced {
            source.from_uplink(&next(), true);
        }
        if fails {
            source.release();
            got.extend(drain(&mut source));
        } else {
            destination.take_over(true);
            let mut ended = false;
            announce(&mut source);
            for step in steps {
                match step {
                    Step::Packet => {
                        let packet = next();
                        if destination.from_uplink(&packet, true) == Fate::Deliver {
                            prop_assert!(destination.next_for_guest(|_| true).is_none());
                            got.push(packet);
                        }
                    }
                    Step::GuestReads => got.extend(drain(&mut destination)),
                    Step::SendLate if !ended => {
                        ended = true;
                        source.copy_new().into_iter().for_each(|packet| destination.late(packet));
                        destination.late_ended();
                    }
                    Step::SendLate => {}
                }
            }
            if !ended {
                source.copy_new().into_iter().for_each(|packet| destination.late(packet));
                destination.late_ended();
            }
            got.extend(drain(&mut destination));
        }
        let all: Vec<Packet> = (1..=number).map(|number| numbered(MAC, number)).collect();
        prop_assert_eq!(got, all);
    }
}

#[test]
fn a_move_after_one_that_failed_takes_what_the_guest_has_not_got_yet_with_it() {
    let mut nic = Nic::new(MAC);
    nic.buffer(TOKEN);
    assert_eq!(nic.from_uplink(&numbered(MAC, 0), true), Fate::Held);
    assert_eq!(nic.read_state().held.len(), 1);
    // The VM stays, and moves before the guest has room for the held packets.
    nic.release();
    nic.buffer(TOKEN);
    assert_eq!(nic.from_uplink(&numbered(MAC, 1), true), Fate::Held);
    let mut destination = moved(&mut nic);
    destination.take_over(false);
    assert_eq!(
        drain(&mut destination),
        [numbered(MAC, 0), numbered(MAC, 1)]
    );
}

#[test]
fn a_machine_that_moves_on_before_all_came_takes_what_came_meanwhile_with_it() {
    let mut nic = Nic::arriving(MAC);
    nic.take_over(true);
    assert_eq!(nic.from_uplink(&numbered(MAC, 1), true), Fate::Held);
    nic.late(numbered(MAC, 0));
    nic.buffer(TOKEN);
    assert_eq!(nic.from_uplink(&numbered(MAC, 2), true), Fate::Held);
    let mut next = moved(&mut nic);
    next.take_over(false);
    let all: Vec<Packet> = (0..3).map(|number| numbered(MAC, number)).collect();
    assert_eq!(drain(&mut next), all);
}

#[test]
fn a_late_packet_that_found_no_room_is_no_reason_to_drop_its_twin() {
    let mut nic = moved(&mut Nic::new(MAC));
    nic.take_over(true);
    let everybody = Mac::ALL;
    for number in 0..MOST_PACKETS as u32 {
        nic.late(numbered(MAC, number));
    }
    nic.late(numbered(everybody, 0));
    assert_eq!(nic.counters().held_overflow, 1);
    assert_eq!(nic.from_uplink(&numbered(everybody, 0), true), Fate::Held);
    drain(&mut nic);
    nic.late_ended();
    assert_eq!(drain(&mut nic), [numbered(everybody, 0)]);
}
