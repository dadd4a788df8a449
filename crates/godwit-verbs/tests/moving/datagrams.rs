//! Queue pairs for datagrams, and address handles.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, Redirect};
use godwit_verbs::tables::Gid;

use crate::device::{OWN, complete_sends, with};
use crate::{Application, no_data, post_piece};

const KEY: u32 = 0x1111;
const PEER: [u8; 16] = [1; 16];
const MOVED_TO: [u8; 16] = [2; 16];

/// A queue pair for datagrams of an application.
struct Datagrams<'a> {
    application: &'a Application,
    pair: *mut ibv_qp,
}

impl<'a> Datagrams<'a> {
    fn start(application: &'a Application) -> Self {
        // SAFETY: integers and null pointers; the objects are the application's.
        let pair = unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq) = (application.cq, application.cq);
            init.qp_type = IBV_QPT_UD;
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (4, 4);
            shim::create_qp(application.pd, &raw mut init)
        };
        for (state, mask) in [
            (IBV_QPS_INIT, IBV_QP_QKEY | IBV_QP_PORT),
            (IBV_QPS_RTR, 0),
            (IBV_QPS_RTS, 0),
        ] {
            let mut to = ibv_qp_attr {
                qp_state: state,
                qkey: KEY,
                port_num: 1,
                ..Default::default()
            };
            // SAFETY: the pair lives.
            let changed = unsafe { shim::modify_qp(pair, &raw mut to, IBV_QP_STATE | mask) };
            assert_eq!(changed, 0);
        }
        Self { application, pair }
    }

    fn handle(&self, to: [u8; 16]) -> *mut ibv_ah {
        let mut attributes = ibv_ah_attr {
            is_global: 1,
            port_num: 1,
            ..Default::default()
        };
        attributes.grh.dgid.raw = to;
        // SAFETY: the domain is the application's.
        unsafe { shim::create_ah(self.application.pd, &raw mut attributes) }
    }

    fn send(&self, wr_id: u64, ah: *mut ibv_ah, remote_qpn: u32) -> c_int {
        // SAFETY: integers, null pointers and a union of both; the handle lives.
        unsafe {
            let mut request: ibv_send_wr = std::mem::zeroed();
            (request.wr_id, request.opcode) = (wr_id, IBV_WR_SEND);
            request.wr.ud = ibv_ud {
                ah,
                remote_qpn,
                remote_qkey: KEY,
            };
            shim::post_send(self.pair, &raw mut request, &mut ptr::null_mut())
        }
    }

    fn receive(&self, wr_id: u64) -> c_int {
        let mut request = no_data(wr_id);
        // SAFETY: the request has no pieces.
        unsafe { shim::post_recv(self.pair, &raw mut request, &mut ptr::null_mut()) }
    }

    fn poll(&self) -> Vec<u64> {
        let mut into = [ibv_wc::default(); 16];
        // SAFETY: there is room for as many as are asked for, and the pair lives.
        let (count, number) = unsafe {
            let count = shim::poll_cq(self.application.cq, 16, into.as_mut_ptr());
            (count as usize, (*self.pair).qp_num)
        };
        assert!(into[..count].iter().all(|one| one.qp_num == number));
        into[..count].iter().map(|one| one.wr_id).collect()
    }

    /// Drains without the number of datagrams that peers sent, which is unknown.
    fn wait(&self) -> Result<Duration, String> {
        let reliable = BTreeMap::from([(self.application.number(), 0)]);
        shim::drain(&reliable, Duration::from_millis(5))
    }

    fn go_on_elsewhere(&self) {
        shim::recreate(None).unwrap();
        shim::connect(&[self.application.connection()]).unwrap();
        shim::resume(None).unwrap();
    }
}

impl Drop for Datagrams<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: nothing uses the pair any more.
            assert_eq!(unsafe { shim::destroy_qp(self.pair) }, 0);
        }
    }
}

#[test]
fn what_comes_until_a_queue_pair_ends_is_told_of_as_anything_else() {
    let application = Application::start();
    let datagrams = Datagrams::start(&application);
    assert!((0..4).all(|wr_id| datagrams.receive(wr_id) == 0));
    // SAFETY: the pair lives.
    let known = unsafe { (*datagrams.pair).qp_num };
    // At the second move the device has another number for the queue pair.
    for oldest in 0..2 {
        shim::suspend(None).unwrap();
        complete_sends();
        datagrams.wait().unwrap();
        let pairs = shim::queue_pairs();
        let own = pairs.iter().find(|pair| pair.number == known).unwrap();
        with(|device| device.last_moment.insert(own.physical));
        shim::release().unwrap();
        assert_eq!(datagrams.poll(), [oldest]);
        assert_eq!(datagrams.receive(oldest + 4), 0);
        with(|device| device.numbers.insert(known));
        datagrams.go_on_elsewhere();
    }
}

#[test]
fn nobody_is_looked_for_at_the_other_end_of_datagrams() {
    let application = Application::start();
    let _datagrams = Datagrams::start(&application);
    let pairs = shim::queue_pairs();
    let connected = pairs.iter().filter(|pair| pair.remote.is_some());
    let numbers: Vec<u32> = connected.map(|pair| pair.number).collect();
    assert_eq!((pairs.len(), numbers), (2, vec![application.number()]));
}

#[test]
fn the_pieces_of_a_datagram_are_found_after_a_move() {
    let application = Application::start();
    let before = application.register();
    let datagrams = Datagrams::start(&application);
    let later = application.register();
    // SAFETY: the regions live.
    let known = [before, later].map(|region| unsafe { (*region).lkey });
    let handle = datagrams.handle(PEER);
    let seen = || {
        known.map(|lkey| {
            post_piece(datagrams.pair, lkey, |request| request.wr.ud.ah = handle);
            complete_sends();
            datagrams.poll();
            with(|device| device.local_keys[0])
        })
    };
    assert_eq!(seen(), known, "the device does not know these keys");
    shim::suspend(None).unwrap();
    complete_sends();
    datagrams.wait().unwrap();
    shim::release().unwrap();
    // The new device has given the first key to another region.
    with(|device| device.keys.insert(known[0]));
    datagrams.go_on_elsewhere();
    let moved = seen();
    assert!(moved.iter().all(|key| *key != 0 && *key != known[0]));
    // SAFETY: nothing uses the handle any more.
    assert_eq!(unsafe { shim::destroy_ah(handle) }, 0);
}

fn addressed() -> Vec<([u8; 16], u32)> {
    with(|device| std::mem::take(&mut device.addresses.sent_to))
}

/// A queue pair of the peer that moves in no test: the process never forgets a move.
const UNMOVED: u32 = 50;

#[test]
fn datagrams_complete_before_a_move_or_are_sent_after_it() {
    let application = Application::start();
    assert!(shim::obstacles().is_empty());
    let datagrams = Datagrams::start(&application);
    let handle = datagrams.handle(PEER);
    assert!(shim::obstacles().is_empty(), "{:?}", shim::obstacles());
    assert_eq!([1, 2].map(|wr_id| datagrams.receive(wr_id)), [0, 0]);
    assert_eq!(datagrams.send(7, handle, UNMOVED), 0);
    shim::suspend(None).unwrap();
    // SAFETY: the pair lives.
    let number = unsafe { (*datagrams.pair).qp_num };
    // The marker comes back to its own queue pair, which refuses the marker's key.
    assert_eq!(addressed(), [(PEER, UNMOVED), (OWN, number)]);
    assert!(datagrams.wait().unwrap_err().contains("in flight"));
    assert!(shim::release().unwrap_err().contains("not been waited for"));
    assert_eq!(datagrams.send(8, handle, UNMOVED), 0);
    complete_sends();
    datagrams.wait().unwrap();
    shim::release().unwrap();
    assert!(
        with(|device| device.addresses.routes.is_empty()),
        "a handle would be left at the source"
    );
    assert_eq!(datagrams.poll(), [7]);
    assert_eq!(datagrams.receive(3), 0);
    // Another process has the number at the new place.
    with(|device| device.numbers.insert(number));
    datagrams.go_on_elsewhere();
    assert_eq!(addressed(), [(PEER, UNMOVED)]);
    complete_sends();
    assert_eq!(datagrams.poll(), [8]);
    let waiting = with(|device| {
        let all = device.receives.values().flatten();
        all.copied().collect::<Vec<_>>()
    });
    assert_eq!(waiting, [1, 2, 3]);
    // SAFETY: nothing uses the handle any more.
    assert_eq!(unsafe { shim::destroy_ah(handle) }, 0);
    assert!(with(|device| device.addresses.routes.is_empty()));
    with(|device| device.numbers.remove(&number));
}

#[test]
fn datagrams_find_a_queue_pair_that_has_moved() {
    let application = Application::start();
    let datagrams = Datagrams::start(&application);
    let before = datagrams.handle(PEER);
    let moved = |to, physical| Redirect {
        remote: Gid(PEER),
        number: 5,
        to: Gid(to),
        physical,
    };
    shim::redirect(&[moved(MOVED_TO, 6)]).unwrap();
    // Made by an application that does not know of the move.
    let later = datagrams.handle(PEER);
    let mut sent = 0;
    let mut send = |handle, number| {
        sent += 1;
        assert_eq!(datagrams.send(sent, handle, number), 0);
        complete_sends();
        assert_eq!(datagrams.poll(), [sent]);
        addressed()[0]
    };
    for handle in [before, later] {
        assert_eq!(send(handle, 5), (MOVED_TO, 6));
        // A neighbour at the old place has not moved.
        assert_eq!(send(handle, 7), (PEER, 7));
    }
    // After its own move the sender still finds the queue pair.
    shim::suspend(None).unwrap();
    complete_sends();
    datagrams.wait().unwrap();
    shim::release().unwrap();
    datagrams.go_on_elsewhere();
    addressed();
    assert_eq!(send(before, 5), (MOVED_TO, 6));
    // The queue pair has come back.
    shim::redirect(&[moved(PEER, 4)]).unwrap();
    assert_eq!(send(before, 5), (PEER, 4));
    assert_eq!(send(later, 5), (PEER, 4));
    for handle in [before, later] {
        // SAFETY: nothing uses the handle any more.
        assert_eq!(unsafe { shim::destroy_ah(handle) }, 0);
    }
    assert!(with(|device| device.addresses.routes.is_empty()));
}

#[test]
fn whoever_sends_datagrams_can_be_told_where_a_queue_pair_is() {
    let application = Application::start();
    let datagrams = Datagrams::start(&application);
    assert_eq!(shim::redirects(), []);
    let mut places = vec![(OWN, number_of(&datagrams))];
    for host in [[7; 16], [8; 16], OWN] {
        shim::suspend(None).unwrap();
        complete_sends();
        datagrams.wait().unwrap();
        shim::release().unwrap();
        // Another process has the number at the new place.
        let taken = 40 + places.len() as u32;
        with(|device| {
            device.addresses.own = Some(host);
            device.numbers.extend(1..taken);
        });
        datagrams.go_on_elsewhere();
        let told = shim::redirects();
        let physical = told[0].physical;
        assert!(physical >= taken);
        let from: Vec<_> = told.iter().map(|one| (one.remote.0, one.number)).collect();
        assert_eq!(from, places);
        let now = |one: &Redirect| (one.to.0, one.physical) == (host, physical);
        assert!(told.iter().all(now), "{told:?}");
        places.push((host, physical));
    }
}

#[test]
fn the_addresses_of_a_port_are_asked_for_once_while_a_process_is_stopped() {
    let application = Application::start();
    let _pairs = [(); 3].map(|()| Datagrams::start(&application));
    shim::suspend(None).unwrap();
    complete_sends();
    shim::drain(
        &BTreeMap::from([(application.number(), 0)]),
        Duration::from_millis(5),
    )
    .unwrap();
    with(|device| device.addresses.asked = 0);
    shim::release().unwrap();
    assert_eq!(with(|device| device.addresses.asked), 16);
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
}

/// Acts while the device delivers requests.
fn while_sends_complete<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let acts = scope.spawn(act);
        while !acts.is_finished() {
            complete_sends();
            std::thread::sleep(Duration::from_millis(1));
        }
        acts.join().unwrap()
    })
}

fn number_of(datagrams: &Datagrams) -> u32 {
    // SAFETY: the pair lives.
    unsafe { (*datagrams.pair).qp_num }
}

#[test]
fn a_handle_lives_as_long_as_a_datagram_that_was_posted_with_it() {
    let application = Application::start();
    let datagrams = Datagrams::start(&application);
    // The library never forgets a queue pair's place, so no other test uses this one.
    let (peer, number) = ([8; 16], 50);
    let handle = datagrams.handle(peer);
    let moved = |to: u8| Redirect {
        remote: Gid(peer),
        number,
        to: Gid([to; 16]),
        physical: 6,
    };
    let leads_to = |to: u8| {
        with(|device| {
            device
                .addresses
                .routes
                .values()
                .any(|route| *route == [to; 16])
        })
    };
    shim::redirect(&[moved(2)]).unwrap();
    assert_eq!(datagrams.send(1, handle, number), 0);
    shim::redirect(&[moved(3)]).unwrap();
    assert!(leads_to(2), "what is in the queue has no handle any more");
    complete_sends();
    assert_eq!(datagrams.poll(), [1]);
    // After any number of a peer's moves, few handles are left.
    while_sends_complete(|| {
        for to in 10..110 {
            shim::redirect(&[moved(to)]).unwrap();
        }
    });
    assert!(leads_to(109));
    let left = with(|device| device.addresses.routes.len());
    assert!(left < 20, "{left} handles");
    assert!(datagrams.poll().is_empty());
    // While no datagram leaves, no handle is destroyed that a queued request may use.
    assert_eq!(datagrams.send(2, handle, number), 0);
    let refused = (10..110).find_map(|to| shim::redirect(&[moved(to)]).err());
    assert!(refused.unwrap().contains("in flight"));
    assert!(leads_to(109), "what is in the queue has no handle any more");
    // Neither other queue pairs nor later handles are affected.
    let neighbour = Redirect {
        number: number + 1,
        ..moved(202)
    };
    let refused = shim::redirect(&[moved(201), neighbour]).unwrap_err();
    let stays = format!("still leads to where queue pair {number}");
    assert!(refused.contains(&stays), "{refused}");
    assert!(leads_to(202) && !leads_to(201));
    let later = datagrams.handle(peer);
    assert!(leads_to(201));
    complete_sends();
    assert_eq!(datagrams.poll(), [2]);
    // Once the datagrams have left, a repeated redirect succeeds.
    while_sends_complete(|| shim::redirect(&[moved(203), moved(201)])).unwrap();
    assert_eq!(datagrams.send(3, handle, number), 0);
    assert_eq!(addressed().last(), Some(&([201; 16], 6)));
    complete_sends();
    assert_eq!(datagrams.poll(), [3]);
    for handle in [handle, later] {
        // SAFETY: nothing uses the handle any more.
        assert_eq!(unsafe { shim::destroy_ah(handle) }, 0);
    }
    // Except the handle of the last marker, which goes with its queue pair.
    let mut left = with(|device| device.addresses.routes.clone()).into_values();
    assert!(left.all(|route| route == OWN));
}
