//! The state of a NIC, or packets for it, from a node that sends anything.

#![no_main]

use godwit_net::clone::{State, decode_packets};
use godwit_net::state::nic::{Fate, Nic};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // Nearly no input would have the right hash: half of them get it.
    let sealed = data.split_first().map(|(first, rest)| {
        let mut sealed = rest.to_vec();
        if first & 1 != 0 {
            let hash = blake3::hash(&sealed);
            sealed.extend_from_slice(&hash.as_bytes()[..16]);
        }
        sealed
    });
    let data = sealed.as_deref().unwrap_or(data);
    let _ = decode_packets(data);
    let Ok(state) = State::decode(data) else {
        return;
    };
    let again = State::decode(&state.encode());
    assert!(again.is_ok(), "what was decoded can be encoded");
    let mut nic = Nic::arriving(state.mac).with_pairs(state.paces.len());
    nic.write_state(state).expect("its own state");
    nic.take_over(false);
    for frame in nic.announcements() {
        let packet = [&[0; 12], frame.as_slice()].concat();
        nic.sent(&frame, packet.len());
        if nic.from_uplink(&packet, false) == Fate::Announced {
            nic.announced();
        }
    }
    while let Some(queue) = nic.next_for_guest(|_| true) {
        assert!(
            nic.for_guest(queue).is_some(),
            "the queue that is next has a packet"
        );
        nic.took_first(queue);
    }
});
