//! Memory windows that peers invalidate.

use godwit_verbs::abi::*;
use godwit_verbs::shim;
use godwit_verbs::tables::RemoteKeys;

use super::Windowed;
use crate::Application;
use crate::device::{arrive_invalidating, complete_sends};

#[test]
fn a_window_that_a_peer_has_invalidated_is_not_bound_again() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let polled = || {
        let mut into = ibv_wc::default();
        // SAFETY: there is room for one.
        let count = unsafe { shim::poll_cq(application.cq, 1, &raw mut into) };
        assert_eq!(count, 1);
        (into.wr_id, into.imm_data)
    };
    let mut key = windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    assert_eq!([20, 21].map(|wr_id| application.receive(wr_id)), [0, 0]);
    arrive_invalidating(windowed.device_pair(), key, IBV_WC_WITH_INV);
    // The application has not polled the completion when the process moves.
    shim::suspend(None).unwrap();
    complete_sends();
    application.wait(1).unwrap();
    shim::release().unwrap();
    let keys = RemoteKeys::new(&windowed.arrives().remote_keys);
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    assert_eq!(polled(), (20, key));
    assert_eq!(windowed.reach(keys.physical(key)), None);
    // The device at the new place has another key for the window.
    key = windowed.bind(2, 8);
    assert_eq!(application.poll(), [2]);
    arrive_invalidating(windowed.device_pair(), keys.physical(key), IBV_WC_WITH_INV);
    assert_eq!(polled(), (21, key));
}

#[test]
fn a_window_that_soft_roce_says_a_peer_has_invalidated_is_not_bound_again() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let key = windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    let polled = |wr_id, flags, known, device_key| {
        assert_eq!(application.receive(wr_id), 0);
        arrive_invalidating(windowed.device_pair(), device_key, flags);
        let mut into = ibv_wc::default();
        // SAFETY: there is room for one.
        let count = unsafe { shim::poll_cq(application.cq, 1, &raw mut into) };
        assert_eq!(
            (count, into.wr_id, into.wc_flags, into.imm_data),
            (1, wr_id, flags, known)
        );
    };
    // The kernel's unchanged flags: bit 0 tells of a route header.
    let flags = IBV_WC_IP_CSUM_OK | 1;
    polled(20, flags, key, key);
    let keys = windowed.moves_after(1);
    assert_eq!(windowed.reach(keys.physical(key)), None);
    let key = windowed.bind(2, 8);
    assert_eq!(application.poll(), [2]);
    polled(21, flags, key, keys.physical(key));
    let key = windowed.bind(3, 9);
    assert_eq!(application.poll(), [3]);
    let keys = windowed.moves_after(2);
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
}
