//! Queue pairs that share a completion queue, as many as in a program of perftest, move together while all of them
//! work.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, Connection};
use godwit_verbs::tables::{Gid, RemoteKey};

use super::device::{complete_sends, with};
use super::{Application, make_ready};

const PAIRS: usize = 64;
/// Requests of each queue pair.
const EACH: u64 = 60;
/// Most requests of a queue pair in flight.
const DEPTH: u64 = 2;

struct One {
    pair: *mut ibv_qp,
    number: u32,
    posted: u64,
    completed: u64,
}

impl One {
    fn new(application: &Application) -> Self {
        let pair = application.create_pair(ptr::null_mut());
        make_ready(pair);
        Self {
            pair,
            // SAFETY: as above.
            number: unsafe { (*pair).qp_num },
            posted: 0,
            completed: 0,
        }
    }

    /// Posts until [`DEPTH`] requests are in flight.
    fn post(&mut self) {
        while self.posted < EACH && self.posted - self.completed < DEPTH {
            // SAFETY: integers, null pointers and a union of both.
            unsafe {
                let mut request: ibv_send_wr = std::mem::zeroed();
                (request.wr_id, request.opcode) = (self.posted, IBV_WR_RDMA_WRITE);
                let result = shim::post_send(self.pair, &raw mut request, &mut ptr::null_mut());
                assert_eq!(result, 0);
            }
            self.posted += 1;
        }
    }

    fn connection(&self) -> Connection {
        Connection {
            number: self.number,
            remote: Gid([0; 16]),
            remote_physical: 99,
            remote_keys: Some(vec![RemoteKey::Region(5, 6)]),
        }
    }
}

/// Polls like perftest, and checks that completions come in order.
fn poll(application: &Application, pairs: &mut [One]) {
    let mut into = [ibv_wc::default(); 16];
    loop {
        // SAFETY: there is room for as many as are asked for.
        let count =
            unsafe { shim::poll_cq(application.cq, into.len() as c_int, into.as_mut_ptr()) };
        if count == 0 {
            return;
        }
        for completion in &into[..count as usize] {
            let mut all = pairs.iter_mut();
            let one = all.find(|one| one.number == completion.qp_num).unwrap();
            assert_eq!(completion.wr_id, one.completed, "queue pair {}", one.number);
            one.completed += 1;
        }
    }
}

#[test]
fn every_request_of_many_queue_pairs_completes_once_and_in_order() {
    let application = Application::start();
    let mut pairs: Vec<One> = (0..PAIRS).map(|_| One::new(&application)).collect();
    let mut rounds = 0;
    while pairs.iter().any(|one| one.completed < EACH) {
        rounds += 1;
        assert!(rounds < 1000, "some queue pairs stand still");
        pairs.iter_mut().for_each(One::post);
        if rounds % 7 == 0 {
            shim::suspend(None).unwrap();
            complete_sends();
            // The application continues meanwhile: it polls completions and posts requests, which are kept.
            poll(&application, &mut pairs);
            pairs.iter_mut().for_each(One::post);
            let numbers = pairs.iter().map(|one| one.number);
            let sent: BTreeMap<u32, u32> = numbers
                .chain([application.number()])
                .map(|number| (number, 0))
                .collect();
            shim::drain(&sent, Duration::from_millis(50)).unwrap();
            shim::release().unwrap();
            poll(&application, &mut pairs);
            // As in a process that was restored from an image.
            with(|device| device.write_refused = true);
            shim::recreate(None).unwrap();
            let mut connections: Vec<_> = pairs.iter().map(One::connection).collect();
            connections.push(application.connection());
            shim::connect(&connections).unwrap();
            shim::resume(None).unwrap();
        }
        complete_sends();
        poll(&application, &mut pairs);
    }
    assert!(rounds > 14, "no move was made in the middle of it");
    with(|device| device.write_refused = false);
    for one in &pairs {
        // SAFETY: nothing uses it after this.
        assert_eq!(unsafe { shim::destroy_qp(one.pair) }, 0);
    }
}

#[test]
fn queue_pairs_in_any_number_move_to_a_device_that_is_one_number_behind() {
    let application = Application::start();
    let pairs: Vec<One> = (0..300).map(|_| One::new(&application)).collect();
    shim::suspend(None).unwrap();
    let mut connections: Vec<_> = pairs.iter().map(One::connection).collect();
    connections.push(application.connection());
    let sent = connections.iter().map(|to| (to.number, 0)).collect();
    complete_sends();
    shim::drain(&sent, Duration::from_secs(1)).unwrap();
    shim::release().unwrap();
    let number = application.number();
    with(|device| assert!(device.numbers.insert(number), "a free number"));
    shim::recreate(None).unwrap();
    shim::connect(&connections).unwrap();
    shim::resume(None).unwrap();
    for one in &pairs {
        // SAFETY: nothing uses it after this.
        assert_eq!(unsafe { shim::destroy_qp(one.pair) }, 0);
    }
}
