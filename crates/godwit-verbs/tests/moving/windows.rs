//! Memory windows.

mod invalidated;
mod refused;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, Connection, Recreated};
use godwit_verbs::tables::{RemoteKey, RemoteKeys};

use crate::attached::held;
use crate::device::{Reach, complete_sends, with};
use crate::{Application, chain, suspend_and_release};

/// The part of their region that windows of these tests expose.
const ADDRESS: u64 = 0x1000;
const LENGTH: u64 = 64;

/// An application with a region and a window.
struct Windowed<'a> {
    application: &'a Application,
    region: *mut ibv_mr,
    window: *mut ibv_mw,
}

impl<'a> Windowed<'a> {
    fn start(application: &'a Application, window_type: c_int) -> Self {
        Self {
            application,
            region: application.register(),
            window: alloc(application, window_type),
        }
    }

    fn info(&self, length: u64) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.region,
            addr: ADDRESS,
            length,
            mw_access_flags: 2,
        }
    }

    /// Returns a request to bind the window with this tag.
    fn request(&self, wr_id: u64, tag: u32) -> ibv_send_wr {
        // SAFETY: integers, null pointers and a union of both; the window lives.
        unsafe {
            let mut request: ibv_send_wr = std::mem::zeroed();
            (request.wr_id, request.opcode) = (wr_id, IBV_WR_BIND_MW);
            request.bind_mw = ibv_send_bind_mw {
                mw: self.window,
                rkey: (*self.window).rkey & !0xff | tag,
                bind_info: self.info(LENGTH),
            };
            request
        }
    }

    /// Binds the window with a request, as applications do for type 2, and returns its key.
    fn bind(&self, wr_id: u64, tag: u32) -> u32 {
        let mut request = self.request(wr_id, tag);
        assert_eq!(post(self.application, &mut request), 0);
        // SAFETY: the window lives.
        unsafe { (*self.window).rkey = request.bind_mw.rkey };
        request.bind_mw.rkey
    }

    fn invalidate(&self, wr_id: u64, key: u32) {
        self.invalidate_by(self.application.pair, wr_id, key);
    }

    fn invalidate_by(&self, pair: *mut ibv_qp, wr_id: u64, key: u32) {
        // SAFETY: integers, null pointers and a union of both.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        (request.wr_id, request.opcode, request.imm_data) = (wr_id, IBV_WR_LOCAL_INV, key);
        // SAFETY: the pair lives, and the request is whole.
        let posted = unsafe { shim::post_send(pair, &raw mut request, &mut ptr::null_mut()) };
        assert_eq!(posted, 0);
    }

    /// `ibv_bind_mw`
    fn bind_type_1(&self, wr_id: u64, length: u64) -> c_int {
        let mut wanted = ibv_mw_bind {
            wr_id,
            send_flags: 0,
            bind_info: self.info(length),
        };
        // SAFETY: the objects live.
        unsafe {
            let bind = (*self.application.context).ops.bind_mw.unwrap();
            bind(self.application.pair, self.window, &raw mut wanted)
        }
    }

    /// Moves to a place where another process has this process's numbers, and resumes.
    fn moves(&self) -> RemoteKeys {
        self.moves_after(0)
    }

    /// As [`Self::moves`], after the peer has sent so many messages.
    fn moves_after(&self, peer_sent: u32) -> RemoteKeys {
        suspend_and_release(self.application, peer_sent);
        let made = self.arrives();
        shim::connect(&[self.application.connection()]).unwrap();
        shim::resume(None).unwrap();
        RemoteKeys::new(&made.remote_keys)
    }

    fn arrives(&self) -> Recreated {
        self.others_are_there();
        shim::recreate(None).unwrap()
    }

    fn others_are_there(&self) {
        // SAFETY: the objects live.
        let (name, key) = unsafe { ((*self.window).rkey >> 8, (*self.region).rkey) };
        with(|device| (device.windows.names.insert(name), device.keys.insert(key)));
    }

    /// Returns the memory that a peer reaches with this key of the device.
    fn reach(&self, device_key: u32) -> Option<Reach> {
        let pair = self.device_pair();
        with(|device| device.windows.reach(pair, device_key))
    }

    fn device_pair(&self) -> u32 {
        let number = self.application.number();
        let pairs = shim::queue_pairs();
        let own = pairs.iter().find(|pair| pair.number == number);
        own.unwrap().physical
    }

    /// Returns the window's part of the region at the present place.
    fn part(&self, keys: &RemoteKeys) -> Option<Reach> {
        Some(Reach {
            // This device's local and remote keys of a region are equal.
            // SAFETY: the region lives.
            region: keys.physical(unsafe { (*self.region).rkey }),
            address: ADDRESS,
            length: LENGTH,
        })
    }
}

impl Drop for Windowed<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: as verbs demand.
            unsafe { assert_eq!((dealloc(self.window), shim::dereg_mr(self.region)), (0, 0)) };
        }
    }
}

fn alloc(application: &Application, window_type: c_int) -> *mut ibv_mw {
    // SAFETY: the domain is the application's.
    let window = unsafe {
        let alloc = (*application.context).ops.alloc_mw.unwrap();
        alloc(application.pd, window_type)
    };
    assert!(!window.is_null());
    window
}

unsafe fn dealloc(window: *mut ibv_mw) -> c_int {
    (*(*window).context).ops.dealloc_mw.unwrap()(window)
}

fn post(application: &Application, request: &mut ibv_send_wr) -> c_int {
    // SAFETY: the pair lives, and the request is whole.
    unsafe { shim::post_send(application.pair, request, &mut ptr::null_mut()) }
}

/// Returns the translation before any move.
fn nobody_moved() -> RemoteKeys {
    RemoteKeys::default()
}

#[test]
fn a_peer_reaches_what_a_window_shows_before_and_after_a_move() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let key = windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    assert_eq!(windowed.reach(key), windowed.part(&nobody_moved()));
    let keys = windowed.moves();
    assert_ne!(keys.physical(key), key);
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
    assert_eq!(
        windowed.reach(key),
        None,
        "another process's window is reached"
    );
    assert_eq!(windowed.reach(keys.physical(key ^ 1)), None);
    assert!(
        application.poll().is_empty(),
        "the library's own request shows"
    );
    // The partners' first table also translates later keys of the window.
    let mut before = key;
    for tag in [8, 255, 0, 6] {
        windowed.invalidate(2, before);
        assert_eq!(windowed.reach(keys.physical(before)), windowed.part(&keys));
        assert_eq!(application.poll(), [2]);
        assert_eq!(windowed.reach(keys.physical(before)), None);
        before = windowed.bind(3, tag);
        assert_eq!(application.poll(), [3]);
        assert_eq!(before & 0xff, tag);
        assert_eq!(windowed.reach(keys.physical(before)), windowed.part(&keys));
    }
    // A second move from there.
    let keys = windowed.moves();
    assert_eq!(windowed.reach(keys.physical(before)), windowed.part(&keys));
    windowed.invalidate(4, before);
    let again = windowed.moves();
    assert_eq!(application.poll(), [4]);
    assert_eq!(
        windowed.reach(again.physical(before)),
        None,
        "it is bound again"
    );
    // The device's tag differs from the tag in the application's structure.
    let last = windowed.bind(5, 9);
    assert_eq!(application.poll(), [5]);
    assert_eq!(windowed.reach(again.physical(last)), windowed.part(&again));
}

#[test]
fn windows_of_both_types_are_bound_again_with_what_was_made_ahead() {
    let application = Application::start();
    let second = Windowed::start(&application, IBV_MW_TYPE_2);
    let first = Windowed::start(&application, IBV_MW_TYPE_1);
    second.bind(1, 7);
    assert_eq!(first.bind_type_1(2, LENGTH), 0);
    assert_eq!(application.poll(), [1, 2]);
    let plan = shim::plan();
    suspend_and_release(&application, 0);
    for windowed in [&first, &second] {
        windowed.others_are_there();
    }
    let attached = shim::attach(held(&plan, 2)).unwrap();
    let keys = RemoteKeys::new(&attached.remote_keys);
    shim::resume(None).unwrap();
    for windowed in [&first, &second] {
        // SAFETY: the window lives.
        let key = unsafe { (*windowed.window).rkey };
        assert_ne!(keys.physical(key), key);
        assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
    }
    assert!(application.poll().is_empty());
}

#[test]
fn a_window_of_type_1_moves_and_outlives_the_queue_pair_that_bound_it() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_1);
    // SAFETY: the window lives.
    let key = || unsafe { (*windowed.window).rkey };
    let made = key();
    assert_eq!(windowed.bind_type_1(1, LENGTH), 0);
    assert_eq!(key(), made & !0xff | (made + 1) & 0xff);
    assert_eq!(application.poll(), [1]);
    let keys = windowed.moves();
    assert_eq!(windowed.reach(keys.physical(key())), windowed.part(&keys));
    // Bound by another queue pair, which then ends.
    let other = application.create_pair(ptr::null_mut());
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let mut to = ibv_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        // SAFETY: the pair lives.
        let changed = unsafe { shim::modify_qp(other, &raw mut to, IBV_QP_STATE) };
        assert_eq!(changed, 0);
    }
    let mut wanted = ibv_mw_bind {
        wr_id: 2,
        send_flags: 0,
        bind_info: windowed.info(LENGTH),
    };
    // SAFETY: the objects live until the pair's end here.
    unsafe {
        let bind = (*application.context).ops.bind_mw.unwrap();
        assert_eq!(bind(other, windowed.window, &raw mut wanted), 0);
        let mut into = ibv_wc::default();
        assert_eq!(shim::poll_cq(application.cq, 1, &raw mut into), 1);
        assert_eq!(shim::destroy_qp(other), 0);
    }
    let keys = windowed.moves();
    assert_eq!(windowed.reach(keys.physical(key())), windowed.part(&keys));
    // An unbound window stays unbound.
    assert_eq!(windowed.bind_type_1(3, 0), 0);
    let keys = windowed.moves();
    assert_eq!(application.poll(), [3]);
    assert_eq!(windowed.reach(keys.physical(key())), None);
}

#[test]
fn windows_in_any_number_move_to_a_device_that_is_one_name_behind() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let others: Vec<_> = (1..300)
        .map(|_| alloc(&application, IBV_MW_TYPE_2))
        .collect();
    let key = windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    let keys = windowed.moves();
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
    // SAFETY: as verbs demand.
    assert!(unsafe { others.into_iter().all(|window| dealloc(window) == 0) });
}

#[test]
fn what_is_in_flight_when_the_move_begins_is_done_and_what_comes_later_is_done_later() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    // The binding waits for a request before it.
    assert_eq!(application.send(1), 0);
    let first = windowed.bind(2, 7);
    assert!(application.poll().is_empty());
    shim::suspend(None).unwrap();
    // These requests are kept.
    windowed.invalidate(3, first);
    let second = windowed.bind(4, 8);
    assert_eq!(windowed.reach(first), None);
    complete_sends();
    application.wait(0).unwrap();
    shim::release().unwrap();
    assert_eq!(application.poll(), [1, 2]);
    let keys = RemoteKeys::new(&windowed.arrives().remote_keys);
    shim::connect(&[application.connection()]).unwrap();
    assert_eq!(windowed.reach(keys.physical(first)), windowed.part(&keys));
    // A second time, as after a failure at the partner.
    shim::connect(&[application.connection()]).unwrap();
    assert_eq!(windowed.reach(keys.physical(first)), windowed.part(&keys));
    shim::resume(None).unwrap();
    assert_eq!(application.poll(), [3, 4]);
    assert_eq!(windowed.reach(keys.physical(first)), None);
    assert_eq!(windowed.reach(keys.physical(second)), windowed.part(&keys));
}

#[test]
fn what_fails_at_one_queue_pair_keeps_no_window_of_another_from_being_bound() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let second = Windowed::start(&application, IBV_MW_TYPE_2);
    let polled = || {
        let mut into = [ibv_wc::default(); 3];
        // SAFETY: there is room for three.
        let count = unsafe { shim::poll_cq(application.cq, 3, into.as_mut_ptr()) };
        assert!(into.iter().all(|one| one.status == IBV_WC_SUCCESS));
        let names = into.iter().map(|one| one.wr_id);
        names.take(count as usize).collect::<Vec<_>>()
    };
    let first_key = windowed.bind(1, 7);
    let pair = application.create_pair(ptr::null_mut());
    // SAFETY: the pair and the window live.
    let (number, key) = unsafe {
        for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
            let mut to = ibv_qp_attr {
                qp_state: state,
                ..Default::default()
            };
            assert_eq!(shim::modify_qp(pair, &raw mut to, IBV_QP_STATE), 0);
        }
        let mut request = second.request(2, 8);
        assert_eq!(
            shim::post_send(pair, &raw mut request, &mut ptr::null_mut()),
            0
        );
        (*second.window).rkey = request.bind_mw.rkey;
        ((*pair).qp_num, request.bind_mw.rkey)
    };
    assert_eq!(polled(), [1, 2]);
    shim::suspend(None).unwrap();
    complete_sends();
    let sent = BTreeMap::from([(number, 0), (application.number(), 0)]);
    shim::drain(&sent, Duration::from_secs(1)).unwrap();
    shim::release().unwrap();
    let keys = RemoteKeys::new(&windowed.arrives().remote_keys);
    let to = |number| Connection {
        number,
        ..application.connection()
    };
    // The region of the first window is missing, and there is no third queue pair.
    let region = windowed.part(&keys).unwrap().region;
    with(|device| assert!(device.keys.remove(&region)));
    let connections = [application.number(), number, 77].map(to);
    let refused = shim::connect(&connections).unwrap_err();
    assert!(refused.contains("no queue pair 77"), "{refused}");
    with(|device| device.keys.insert(region));
    let pairs = shim::queue_pairs();
    let own = pairs.iter().find(|own| own.number == number).unwrap();
    let reached = || with(|device| device.windows.reach(own.physical, keys.physical(key)));
    assert_eq!(reached(), second.part(&keys));
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    assert_eq!(
        windowed.reach(keys.physical(first_key)),
        windowed.part(&keys)
    );
    assert_eq!(reached(), second.part(&keys));
    second.invalidate_by(pair, 3, key);
    assert_eq!(polled(), [3]);
    // SAFETY: nothing uses it any more.
    assert_eq!(unsafe { shim::destroy_qp(pair) }, 0);
}

#[test]
fn a_window_of_type_1_that_is_bound_while_the_process_moves_has_the_key_that_the_application_got() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_1);
    suspend_and_release(&application, 0);
    assert_eq!(
        [1, 2].map(|wr_id| windowed.bind_type_1(wr_id, LENGTH)),
        [0, 0]
    );
    let keys = RemoteKeys::new(&windowed.arrives().remote_keys);
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    assert_eq!(application.poll(), [1, 2]);
    // SAFETY: the window lives.
    let key = unsafe { (*windowed.window).rkey };
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
}

#[test]
fn a_window_that_was_made_before_what_it_uses_is_given_back_first() {
    let mut application = Application::start();
    let window = alloc(&application, IBV_MW_TYPE_2);
    // SAFETY: nothing uses the pair.
    assert_eq!(unsafe { shim::destroy_qp(application.pair) }, 0);
    application.pair = application.create_pair(ptr::null_mut());
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        assert_eq!(application.change(state), 0);
    }
    let windowed = Windowed {
        application: &application,
        region: application.register(),
        window,
    };
    let key = windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    let keys = windowed.moves();
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
}

#[test]
fn requests_about_windows_keep_their_place_in_a_list() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let keys = windowed.moves();
    let number = application.number();
    let sent = || {
        let pairs = shim::queue_pairs();
        let own = pairs.iter().find(|pair| pair.number == number);
        own.unwrap().sent
    };
    let before = sent();
    // SAFETY: integers, null pointers and a union of both; the requests live until the call returns.
    unsafe {
        let mut list: [ibv_send_wr; 5] = std::mem::zeroed();
        list[1] = windowed.request(1, 7);
        list[2].opcode = IBV_WR_LOCAL_INV;
        list[2].imm_data = list[1].bind_mw.rkey;
        for request in list.iter_mut().filter(|request| !request.is_local()) {
            request.opcode = IBV_WR_SEND;
        }
        chain(&mut list);
        // An extra entry beyond the granted capacity, for a marker.
        let mut bad = ptr::null_mut();
        let posted = shim::post_send(application.pair, &raw mut list[0], &raw mut bad);
        assert_eq!((posted, (*bad).wr_id), (libc::ENOMEM, 3));
        assert_eq!(sent(), before + 1);
        complete_sends();
        assert_eq!(application.poll(), [0, 1, 2]);
        (*windowed.window).rkey = list[1].bind_mw.rkey;
        list[2] = windowed.request(2, 8);
        (list[3].next, list[2].next) = (ptr::null_mut(), &raw mut list[3]);
        list[1].opcode = IBV_WR_SEND;
        let posted = shim::post_send(application.pair, &raw mut list[1], &raw mut bad);
        assert_eq!(posted, 0);
        assert_eq!(sent(), before + 3);
        complete_sends();
        assert_eq!(application.poll(), [1, 2, 3]);
        let key = list[2].bind_mw.rkey;
        assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
    }
}

#[test]
fn a_partner_reaches_windows_that_have_moved_by_all_of_their_keys() {
    let application = Application::start();
    let only = [application.number()];
    let asked = |opcode, key| {
        // SAFETY: integers, null pointers and a union of both.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        (request.opcode, request.imm_data) = (opcode, key);
        request.wr.rdma = ibv_rdma {
            remote_addr: 0,
            rkey: key,
        };
        assert_eq!(post(&application, &mut request), 0);
        complete_sends();
        application.poll();
        with(|device| device.remote_key)
    };
    shim::suspend(Some(&only)).unwrap();
    complete_sends();
    application.wait(0).unwrap();
    let mut connection = application.connection();
    let table = [
        RemoteKey::Region(0x5_0000, 0x6_0000),
        RemoteKey::Window {
            window: 0x70,
            physical: 0x90,
        },
    ];
    connection.remote_keys = Some(table.to_vec());
    shim::connect(&[connection]).unwrap();
    shim::resume(Some(&only)).unwrap();
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_INV] {
        for tag in 0..256 {
            assert_eq!(asked(opcode, 0x7000 | tag), 0x9000 | tag);
        }
        assert_eq!(asked(opcode, 0x5_0000), 0x6_0000);
        assert_eq!(asked(opcode, 0x5_0001), 0x5_0001);
    }
}

#[test]
fn the_partner_of_a_process_that_moved_keeps_its_windows() {
    let application = Application::start();
    let only = [application.number()];
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let key = windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    let wait = || {
        shim::suspend(Some(&only)).unwrap();
        complete_sends();
        application.wait(0).unwrap();
    };
    wait();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(Some(&only)).unwrap();
    assert_eq!(windowed.reach(key), windowed.part(&nobody_moved()));
    // With a prepared queue pair, which is another one of the device.
    let before = windowed.device_pair();
    shim::prepare(&[application.connection()]).unwrap();
    wait();
    shim::switch(&only, &[]).unwrap();
    shim::resume(Some(&only)).unwrap();
    shim::tidy().unwrap();
    assert_ne!(windowed.device_pair(), before);
    assert_eq!(windowed.reach(key), windowed.part(&nobody_moved()));
    assert!(
        application.poll().is_empty(),
        "the library's own requests show"
    );
    windowed.invalidate(2, key);
    assert_eq!(application.poll(), [2]);
    assert_eq!(windowed.reach(key), None);
}
