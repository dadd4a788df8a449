use std::os::unix::net::{UnixDatagram, UnixStream};

use godwit_vhost::protocol::device::Device;
use godwit_vhost::protocol::session::FrontEndCommand;

use super::*;
use crate::device::handle::NetDevice;
use crate::device::queues::features::{MERGEABLE, VERSION_1};
use crate::device::test_guest::TestGuest;
use crate::device::uplink::Uplink;
use crate::device::wake::Wake;
use crate::frame::packet::SMALLEST;
use crate::mac::Mac;
use crate::state::nic::Nic;
use crate::state::pace::MOST_AHEAD;

const SIZE: u16 = 256;
const BURST: u16 = 200;

/// The guest may process and answer packets at any moment: here after its answers were last sent.
#[test]
fn a_guest_gets_more_only_after_the_answers_to_what_it_has_come_to_were_sent() {
    let (uplink, network) = UnixDatagram::pair().expect("a pair");
    uplink.set_nonblocking(true).expect("does not block");
    let uplink = Uplink::from_packets([uplink.into()]);
    let mac = Mac([2, 0, 0, 0, 0, 1]);
    let (nic, mut worker) = NetDevice::with_worker("web/0", Nic::new(mac), uplink).expect("a NIC");
    let guest = TestGuest::new(SIZE);
    guest.offer(SIZE);
    let answers = guest.beside();
    let (socket, _front_end) = UnixStream::pair().expect("a pair");
    let ram = guest.ram.clone();
    let features = VERSION_1 | MERGEABLE;
    let mut steps = vec![
        FrontEndCommand::Attach { socket },
        FrontEndCommand::Features { features },
        FrontEndCommand::Memory { ram },
    ];
    let kick = Wake::new().expect("a counter");
    for (index, ring) in [(receive_ring(0), &guest), (transmit_ring(0), &answers)] {
        let setup = ring.setup(0, &kick);
        let ring = index as u16;
        steps.push(FrontEndCommand::Start { ring, setup });
    }
    nic.freeze(Box::new(|_| ()));
    for step in steps {
        nic.front_end(step, Box::new(|done| assert!(done.is_ok())));
    }
    nic.release();
    worker.commands();
    worker.timers();
    for _ in 0..BURST {
        network.send(&[7; SMALLEST]).expect("is taken");
    }
    worker.uplink_brings();
    worker.turn();
    let most = MOST_AHEAD as u16;
    assert_eq!(guest.used(), most);
    // The guest does not notify of the answers, since the device has not asked for a notification.
    for come_to in [10, 30] {
        worker.send();
        guest.offer(SIZE + come_to);
        answers.offer(come_to);
        worker.pairs[0].guest_may_have_room();
        let before = guest.used();
        assert!(worker.receive(), "there is more at once");
        assert_eq!(guest.used(), before, "{come_to} answers have not been sent");
        worker.turn();
        assert_eq!(answers.used(), come_to);
        assert_eq!(guest.used(), most + come_to);
    }
}
