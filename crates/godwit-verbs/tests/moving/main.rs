//! The steps of a move with a device made of a few tables, as applications and the device see them.

#![allow(unsafe_op_in_unsafe_fn)]

mod ahead;
mod attached;
mod datagrams;
mod device;
mod events;
mod extended;
mod many;
mod windows;
mod written;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use device::{Device, arrive, arrive_shared, complete_sends, with};
use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, Connection};
use godwit_verbs::tables::{Gid, RemoteKey};

/// An application with one connected queue pair that has room for two requests and four receives.
struct Application {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    pair: *mut ibv_qp,
    _alone: MutexGuard<'static, ()>,
}

impl Application {
    fn start() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        shim::install(device::functions());
        static FIRST_KEY: AtomicU32 = AtomicU32::new(0x100);
        with(|device| device.first_key = FIRST_KEY.fetch_add(0x100, Ordering::Relaxed));
        // SAFETY: the calls are in the order that verbs demand.
        unsafe {
            let context = shim::open_device(ptr::null_mut());
            let pd = shim::alloc_pd(context);
            let cq = shim::create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
            let mut application = Self {
                context,
                pd,
                cq,
                pair: ptr::null_mut(),
                _alone: alone,
            };
            application.pair = application.create_pair(ptr::null_mut());
            make_ready(application.pair);
            application
        }
    }

    fn create_pair(&self, srq: *mut ibv_srq) -> *mut ibv_qp {
        // SAFETY: integers and null pointers; the objects are this application's.
        unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq, init.qp_type) = (self.cq, self.cq, IBV_QPT_RC);
            init.srq = srq;
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (2, 4);
            shim::create_qp(self.pd, &raw mut init)
        }
    }

    /// Makes a shared queue with room for four receives.
    fn create_srq(&self) -> *mut ibv_srq {
        let mut wanted = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr {
                max_wr: 4,
                max_sge: 1,
                srq_limit: 0,
            },
        };
        // SAFETY: the domain is this application's.
        unsafe { shim::create_srq(self.pd, &raw mut wanted) }
    }

    fn change(&self, state: c_int) -> c_int {
        change(self.pair, state)
    }

    fn number(&self) -> u32 {
        // SAFETY: the pair is this application's.
        unsafe { (*self.pair).qp_num }
    }

    fn register(&self) -> *mut ibv_mr {
        // SAFETY: the device of this test touches no memory.
        unsafe { shim::reg_mr(self.pd, ptr::null_mut(), 8, 0, 0) }
    }

    /// Sends one piece with this local key; returns the key that the device saw.
    fn send_with_key(&self, lkey: u32) -> u32 {
        post_piece(self.pair, lkey, |_| {});
        complete_sends();
        self.poll();
        with(|device| device.local_keys[0])
    }

    fn send(&self, wr_id: u64) -> c_int {
        // SAFETY: integers, null pointers and a union of both.
        unsafe {
            let mut request: ibv_send_wr = std::mem::zeroed();
            (request.wr_id, request.opcode) = (wr_id, IBV_WR_SEND);
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
        // SAFETY: there is room for as many as are asked for.
        let count = unsafe { shim::poll_cq(self.cq, 16, into.as_mut_ptr()) };
        let polled = &into[..count as usize];
        assert!(polled.iter().all(|one| one.qp_num == self.number()));
        polled.iter().map(|one| one.wr_id).collect()
    }

    fn wait(&self, peer_sent: u32) -> Result<Duration, String> {
        let peer_sent = BTreeMap::from([(self.number(), peer_sent)]);
        shim::drain(&peer_sent, Duration::from_millis(5))
    }

    fn connection(&self) -> Connection {
        Connection {
            number: self.number(),
            remote: Gid([0; 16]),
            remote_physical: 99,
            remote_keys: None,
        }
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // In the middle of a move these calls would wait for its end.
            std::process::abort();
        }
        // SAFETY: as verbs demand, and nothing is used after it.
        unsafe {
            assert_eq!(shim::destroy_qp(self.pair), 0);
            assert_eq!(shim::destroy_cq(self.cq), 0);
            assert_eq!(shim::close_device(self.context), 0);
        }
        with(|device| *device = Device::default());
    }
}

/// Returns the device's keys of regions by the application's keys.
fn keys_of_regions(keys: &[RemoteKey]) -> BTreeMap<u32, u32> {
    let regions = keys.iter().filter_map(|key| match *key {
        RemoteKey::Region(known, physical) => Some((known, physical)),
        RemoteKey::Window { .. } => None,
    });
    regions.collect()
}

/// Sends one piece with this local key on a queue pair; `more` sets other fields of the request.
fn post_piece(pair: *mut ibv_qp, lkey: u32, more: impl FnOnce(&mut ibv_send_wr)) {
    let mut piece = ibv_sge {
        lkey,
        ..Default::default()
    };
    // SAFETY: integers, null pointers and a union of both; the queue pair and the piece live.
    unsafe {
        let mut request: ibv_send_wr = std::mem::zeroed();
        request.opcode = IBV_WR_SEND;
        (request.sg_list, request.num_sge) = (&raw mut piece, 1);
        more(&mut request);
        let result = shim::post_send(pair, &raw mut request, &mut ptr::null_mut());
        assert_eq!(result, 0);
    }
}

/// Links the requests into one list, each with its index as its number.
fn chain(list: &mut [ibv_send_wr]) {
    for place in (0..list.len()).rev() {
        list[place].wr_id = place as u64;
        list[place].next = match list.get_mut(place + 1) {
            Some(next) => next,
            None => ptr::null_mut(),
        };
    }
}

/// Brings a queue pair into the state RTS.
fn make_ready(pair: *mut ibv_qp) {
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        assert_eq!(change(pair, state), 0);
    }
}

fn change(pair: *mut ibv_qp, state: c_int) -> c_int {
    let mut to = ibv_qp_attr {
        qp_state: state,
        ..Default::default()
    };
    // SAFETY: the pair lives.
    unsafe { shim::modify_qp(pair, &raw mut to, IBV_QP_STATE) }
}

fn no_data(wr_id: u64) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id,
        next: ptr::null_mut(),
        sg_list: ptr::null_mut(),
        num_sge: 0,
    }
}

fn post_shared(queue: *mut ibv_srq, wr_id: u64) -> c_int {
    let mut request = no_data(wr_id);
    // SAFETY: the queue is the calling test's, and the request has no pieces.
    unsafe { shim::post_srq_recv(queue, &raw mut request, &mut ptr::null_mut()) }
}

fn suspend_and_release(application: &Application, peer_sent: u32) {
    shim::suspend(None).unwrap();
    complete_sends();
    application.wait(peer_sent).unwrap();
    shim::release().unwrap();
}

#[test]
fn no_key_and_no_number_means_another_object_after_a_move() {
    let application = Application::start();
    let known = [application.register(), application.register()];
    // SAFETY: the regions live.
    let keys = known.map(|region| unsafe { (*region).rkey });
    suspend_and_release(&application, 0);
    // At the new place other processes have the first key and the first number.
    with(|device| (device.keys.insert(keys[0]), device.numbers.insert(1)));
    let made = shim::recreate(None).unwrap();
    let moved = keys_of_regions(&made.remote_keys);
    assert_ne!(
        moved[&keys[0]], keys[1],
        "a partner without a table would write into the other region"
    );
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    with(|device| (device.keys.remove(&keys[0]), device.numbers.remove(&1)));
    let later = application.register();
    // SAFETY: the region lives.
    let key = unsafe { (*later).rkey };
    assert!(
        !moved.contains_key(&key),
        "partners translate {key} to another region"
    );
    let pair = application.create_pair(ptr::null_mut());
    // SAFETY: the pair lives.
    assert_ne!(unsafe { (*pair).qp_num }, application.number());
    assert_eq!(application.change(IBV_QPS_RESET), 0);
    assert_eq!(application.change(IBV_QPS_INIT), libc::EOPNOTSUPP);
    // SAFETY: the pair lives.
    unsafe { shim::destroy_qp(pair) };
}

#[test]
fn a_local_key_means_its_region_wherever_the_process_is() {
    let application = Application::start();
    let known = [application.register(), application.register()];
    // SAFETY: the regions live.
    let keys = known.map(|region| unsafe { (*region).lkey });
    assert_eq!(keys.map(|key| application.send_with_key(key)), keys);
    suspend_and_release(&application, 0);
    with(|device| device.keys.extend(keys));
    let made = shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    let moved = keys.map(|key| application.send_with_key(key));
    // This device's local and remote keys of a region are equal.
    let expected = keys.map(|key| keys_of_regions(&made.remote_keys)[&key]);
    assert_eq!(moved, expected);
    assert!(moved.iter().all(|key| !keys.contains(key)));
    // SAFETY: the region lives until here.
    assert_eq!(unsafe { shim::dereg_mr(known[0]) }, 0);
    assert_eq!(
        application.send_with_key(keys[0]),
        0,
        "a region that is gone is reached"
    );
    // The device would give a region the number that the application knows for another.
    with(|device| device.keys.retain(|key| !keys.contains(key)));
    let later = application.register();
    // SAFETY: the region lives.
    let key = unsafe { (*later).lkey };
    assert!(!keys.contains(&key));
    assert_eq!(application.send_with_key(key), key);
    assert_eq!(application.send_with_key(keys[1]), moved[1]);
}

#[test]
fn the_partner_of_a_process_that_moved_keeps_its_local_keys() {
    let application = Application::start();
    let only = [application.number()];
    // SAFETY: the region lives.
    let known = unsafe { (*application.register()).lkey };
    assert_eq!(application.send_with_key(known), known);
    shim::suspend(Some(&only)).unwrap();
    complete_sends();
    application.wait(0).unwrap();
    let mut connection = application.connection();
    connection.remote_keys = Some(vec![RemoteKey::Region(5, 6)]);
    shim::connect(&[connection]).unwrap();
    shim::resume(Some(&only)).unwrap();
    assert_eq!(application.send_with_key(known), known);
    assert_eq!(application.send_with_key(known), known);
}

#[test]
fn receives_of_a_shared_queue_complete_in_any_order_and_move() {
    let application = Application::start();
    let queue = application.create_srq();
    let pair = application.create_pair(queue);
    let post = |wr_id| post_shared(queue, wr_id);
    // SAFETY: the pair lives.
    let number = unsafe { (*pair).qp_num };
    let arrive_at = |place| arrive_shared(place, number);
    let polled = || {
        let mut into = [ibv_wc::default(); 16];
        // SAFETY: there is room for as many as are asked for.
        let count = unsafe { shim::poll_cq(application.cq, 16, into.as_mut_ptr()) };
        into[..count as usize]
            .iter()
            .map(|one| one.wr_id)
            .collect::<Vec<_>>()
    };
    // Two receives with the same name, as applications may post.
    assert_eq!([7, 7, 9, 8].map(post), [0; 4]);
    // The second receive completes first.
    arrive_at(1);
    assert_eq!(polled(), [7]);
    // A move requires a connected queue pair.
    for state in [IBV_QPS_INIT, IBV_QPS_RTR] {
        let mut to = ibv_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        // SAFETY: the pair lives.
        let changed = unsafe { shim::modify_qp(pair, &raw mut to, IBV_QP_STATE) };
        assert_eq!(changed, 0);
    }
    shim::suspend(None).unwrap();
    complete_sends();
    arrive_at(1);
    let peer_sent = BTreeMap::from([(application.number(), 0), (number, 2)]);
    shim::drain(&peer_sent, Duration::from_millis(50)).unwrap();
    shim::release().unwrap();
    assert_eq!(polled(), [9]);
    assert_eq!([10, 11, 12].map(post), [0, 0, libc::ENOMEM]);
    shim::recreate(None).unwrap();
    let mut connection = application.connection();
    connection.number = number;
    shim::connect(&[application.connection(), connection]).unwrap();
    shim::resume(None).unwrap();
    let number = with(|device| *device.numbers.iter().max().unwrap());
    for expected in [7, 8, 10, 11] {
        arrive_shared(0, number);
        assert_eq!(polled(), [expected]);
    }
    // SAFETY: as verbs demand.
    unsafe {
        assert_eq!(shim::destroy_srq(queue), libc::EBUSY);
        assert_eq!(shim::destroy_qp(pair), 0);
        assert_eq!(shim::destroy_srq(queue), 0);
    }
}

#[test]
fn receives_and_completions_come_once() {
    let application = Application::start();
    for wr_id in 1..=3 {
        assert_eq!(application.receive(wr_id), 0);
    }
    arrive(application.number());
    assert_eq!(application.send(10), 0);
    suspend_and_release(&application, 1);
    // Also without a device: as many as fit, and no more.
    assert_eq!(
        [4, 5, 6].map(|wr_id| application.receive(wr_id)),
        [0, 0, libc::ENOMEM]
    );
    assert_eq!(application.send(11), 0);
    assert_eq!(application.poll(), [1, 10]);
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    // A second time, as after a failure at the partner.
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    let waiting = with(|device| {
        device
            .receives
            .values()
            .flatten()
            .copied()
            .collect::<Vec<_>>()
    });
    assert_eq!(waiting, [2, 3, 4, 5]);
    complete_sends();
    assert_eq!(application.poll(), [11]);
    assert!(application.poll().is_empty());
}

#[test]
fn a_move_that_is_given_up_loses_nothing() {
    let application = Application::start();
    assert_eq!([1, 2].map(|wr_id| application.send(wr_id)), [0, 0]);
    shim::suspend(None).unwrap();
    assert_eq!(
        [3, 4, 5].map(|wr_id| application.send(wr_id)),
        [0, 0, libc::ENOMEM]
    );
    assert!(application.wait(0).unwrap_err().contains("in flight"));
    assert!(shim::release().unwrap_err().contains("not been waited for"));
    assert!(
        shim::connect(&[application.connection()])
            .unwrap_err()
            .contains("not been waited for")
    );
    // The device's queue is full of requests in flight.
    shim::resume(None).unwrap();
    complete_sends();
    assert_eq!(application.poll(), [1, 2]);
    complete_sends();
    assert_eq!(application.poll(), [3, 4]);
    assert_eq!(application.send(5), 0);
    complete_sends();
    assert_eq!(application.poll(), [5]);
    // A later move is possible.
    suspend_and_release(&application, 0);
    assert!(shim::resume(None).is_err());
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
}

#[test]
fn two_moves_do_not_share_a_queue_pair() {
    let application = Application::start();
    let only = [application.number()];
    shim::suspend(Some(&only)).unwrap();
    assert!(
        shim::suspend(Some(&only))
            .unwrap_err()
            .contains("suspended already")
    );
    shim::resume(Some(&only)).unwrap();
    complete_sends();
    assert!(application.poll().is_empty());
    assert_eq!(application.change(IBV_QPS_RESET), 0);
    assert!(shim::suspend(None).unwrap_err().contains("was reset"));
    assert!(
        shim::suspend(Some(&only))
            .unwrap_err()
            .contains("was reset")
    );
}

#[test]
fn what_is_kept_is_not_overtaken_by_a_thread_that_receives() {
    let application = Application::start();
    assert_eq!([1, 2].map(|wr_id| application.send(wr_id)), [0, 0]);
    shim::suspend(None).unwrap();
    assert_eq!([3, 4].map(|wr_id| application.send(wr_id)), [0, 0]);
    // The device's queue is full of requests in flight.
    shim::resume(None).unwrap();
    assert_eq!(application.receive(20), 0);
    // The queue has room again before any poll.
    complete_sends();
    assert_eq!(application.send(5), 0);
    complete_sends();
    assert_eq!(application.poll(), [1, 2, 3, 4, 5]);
}

#[test]
fn every_receive_that_was_taken_is_posted_again() {
    let application = Application::start();
    // This device takes any number, like a device with a larger queue than requested.
    let mut taken: Vec<u64> = Vec::new();
    while taken.len() < 100 && application.receive(taken.len() as u64) == 0 {
        taken.push(taken.len() as u64);
    }
    assert!(taken.len() >= 4);
    suspend_and_release(&application, 0);
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    let waiting: Vec<u64> = with(|device| device.receives.values().flatten().copied().collect());
    assert_eq!(waiting, taken);
    // Nor more after the move.
    assert_eq!(application.receive(100), libc::ENOMEM);
}

#[test]
fn what_a_queue_pair_received_before_its_end_keeps_its_name() {
    let application = Application::start();
    let queue = application.create_srq();
    let pair = application.create_pair(queue);
    assert_eq!(post_shared(queue, 7), 0);
    // SAFETY: the pair lives until its end here, and there is room for a completion.
    unsafe {
        let qp_num = (*pair).qp_num;
        arrive_shared(0, qp_num);
        assert_eq!(shim::destroy_qp(pair), 0);
        let mut into = ibv_wc::default();
        assert_eq!(shim::poll_cq(application.cq, 1, &raw mut into), 1);
        assert_eq!((into.wr_id, into.qp_num), (7, qp_num));
        assert_eq!(shim::destroy_srq(queue), 0);
    }
}

#[test]
fn receives_that_a_shared_queue_refused_are_tried_again() {
    let application = Application::start();
    let queue = application.create_srq();
    assert_eq!([7, 8].map(|wr_id| post_shared(queue, wr_id)), [0, 0]);
    suspend_and_release(&application, 0);
    with(|device| device.shared_refused = 1);
    assert!(
        shim::recreate(None)
            .unwrap_err()
            .contains("took less than before")
    );
    shim::recreate(None).unwrap();
    assert_eq!(with(|device| device.shared.len()), 2);
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    // SAFETY: as verbs demand.
    unsafe { assert_eq!(shim::destroy_srq(queue), 0) };
}

#[test]
fn a_queue_pair_that_is_changed_often_is_made_again_in_a_few_steps() {
    let application = Application::start();
    for _ in 0..100 {
        assert_eq!(application.change(IBV_QPS_RTS), 0);
    }
    suspend_and_release(&application, 0);
    shim::recreate(None).unwrap();
    with(|device| device.changes = 0);
    shim::connect(&[application.connection()]).unwrap();
    // To RESET, INIT, RTR and RTS, and the last of the application's changes.
    assert_eq!(with(|device| device.changes), 5);
    shim::resume(None).unwrap();
}

#[test]
fn a_key_that_was_given_back_before_a_move_reaches_nothing_after_it() {
    let application = Application::start();
    let regions = [application.register(), application.register()];
    // SAFETY: the regions live until the first one is given back.
    let keys = regions.map(|region| unsafe { (*region).rkey });
    // SAFETY: as verbs demand.
    assert_eq!(unsafe { shim::dereg_mr(regions[0]) }, 0);
    suspend_and_release(&application, 0);
    // Another process has the second key at the new place, and the device would assign the first.
    with(|device| device.keys.insert(keys[1]));
    let made = shim::recreate(None).unwrap();
    assert!(
        keys_of_regions(&made.remote_keys)
            .values()
            .all(|key| *key != keys[0]),
        "a partner that kept a key of nothing would write into the other region"
    );
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
}
