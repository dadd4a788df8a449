//! Requests about memory windows that devices refuse, and windows that keep a process from moving.

use std::collections::BTreeMap;
use std::ptr;
use std::time::Duration;

use godwit_verbs::abi::*;
use godwit_verbs::shim;
use godwit_verbs::tables::RemoteKeys;

use super::{LENGTH, Windowed, alloc, dealloc, post};
use crate::device::{complete_sends, with};
use crate::{Application, suspend_and_release};

#[test]
fn wrong_use_is_refused_as_a_device_does() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let alloc_type = |window_type| {
        // SAFETY: the domain is the application's.
        let made = unsafe {
            let alloc = (*application.context).ops.alloc_mw.unwrap();
            alloc(application.pd, window_type)
        };
        made.is_null()
    };
    assert!(alloc_type(0) && alloc_type(3));
    // Foreign windows and regions, and requests with data, both at once and while requests are kept.
    let refused = || {
        let mut no_window = windowed.request(1, 7);
        no_window.bind_mw.mw = ptr::dangling_mut();
        let mut no_region = windowed.request(1, 7);
        no_region.bind_mw.bind_info.mr = ptr::null_mut();
        let mut with_data = windowed.request(1, 7);
        let mut piece = ibv_sge::default();
        (with_data.sg_list, with_data.num_sge) = (&raw mut piece, 1);
        [&mut no_window, &mut no_region, &mut with_data].map(|request| post(&application, request))
    };
    assert_eq!(refused(), [libc::EINVAL; 3]);
    assert_eq!(windowed.bind_type_1(1, LENGTH), libc::EINVAL);
    let first = Windowed::start(&application, IBV_MW_TYPE_1);
    let mut zero_based = ibv_mw_bind {
        wr_id: 1,
        send_flags: 0,
        bind_info: first.info(LENGTH),
    };
    zero_based.bind_info.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
    // SAFETY: the objects live.
    let bound = unsafe {
        let bind = (*application.context).ops.bind_mw.unwrap();
        bind(application.pair, first.window, &raw mut zero_based)
    };
    assert_eq!(bound, libc::EINVAL);
    windowed.bind(2, 7);
    assert_eq!(application.poll(), [2]);
    // SAFETY: the device refuses, and all objects stay.
    unsafe {
        assert_eq!(shim::dereg_mr(windowed.region), libc::EINVAL);
        assert_eq!(shim::dealloc_pd(application.pd), libc::EBUSY);
    }
    suspend_and_release(&application, 0);
    assert_eq!(refused(), [libc::EINVAL; 3]);
    let keys = RemoteKeys::new(&windowed.arrives().remote_keys);
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    // The device's key of the window means nothing to the application.
    // SAFETY: the window lives.
    let key = unsafe { (*windowed.window).rkey };
    windowed.invalidate(3, keys.physical(key));
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
    let mut into = ibv_wc::default();
    // SAFETY: there is room for one.
    unsafe { assert_eq!(shim::poll_cq(application.cq, 1, &raw mut into), 1) };
    assert_ne!(into.status, IBV_WC_SUCCESS);
    assert_eq!(windowed.reach(keys.physical(key)), windowed.part(&keys));
}

#[test]
fn no_key_of_a_window_means_another_object_after_a_move() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let gone = alloc(&application, IBV_MW_TYPE_2);
    // SAFETY: the windows live until here.
    let [known, freed] = [windowed.window, gone].map(|window| unsafe { (*window).rkey >> 8 });
    // SAFETY: as verbs demand.
    assert_eq!(unsafe { dealloc(gone) }, 0);
    let keys = windowed.moves();
    let physical = keys.physical(known << 8) >> 8;
    assert_ne!(
        physical, freed,
        "a partner that kept a key of nothing reaches the window"
    );
    // The names that partners translate are free at the device now, and are not given to others.
    // SAFETY: the region lives.
    let region = unsafe { (*windowed.region).rkey };
    with(|device| {
        (
            device.windows.names.remove(&known),
            device.keys.remove(&region),
        )
    });
    let name_of_later = || {
        let later = alloc(&application, IBV_MW_TYPE_2);
        // SAFETY: the window lives until its end here.
        unsafe {
            let name = (*later).rkey >> 8;
            assert_eq!(dealloc(later), 0);
            name
        }
    };
    assert!(![known, physical].contains(&name_of_later()));
    assert_eq!(keys.physical(name_of_later() << 8), name_of_later() << 8);
    // Nor after the window's end: partners still translate its keys.
    drop(windowed);
    assert_ne!(name_of_later(), known);
}

#[test]
fn windows_that_cannot_be_bound_again_are_named_before_a_move() {
    let mut application = Application::start();
    // SAFETY: as verbs demand.
    let first = unsafe {
        let first = {
            let windowed = Windowed::start(&application, IBV_MW_TYPE_1);
            assert_eq!(windowed.bind_type_1(1, LENGTH), 0);
            assert_eq!(application.poll(), [1]);
            std::mem::ManuallyDrop::new(windowed).window
        };
        assert_eq!(shim::needs()[0].windows, 1);
        assert_eq!(shim::destroy_qp(application.pair), 0);
        application.pair = application.create_pair(ptr::null_mut());
        first
    };
    let named = |what: &str| {
        let obstacles = shim::obstacles();
        let mut all = obstacles.iter();
        all.any(|obstacle| obstacle.what.contains("memory window") && obstacle.what.contains(what))
    };
    assert!(named("no connected queue pair is left"));
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        assert_eq!(application.change(state), 0);
    }
    assert!(!named(""));
    // SAFETY: as verbs demand; a request of the pair fails.
    unsafe {
        let windowed = Windowed {
            application: &application,
            region: application.register(),
            window: alloc(&application, IBV_MW_TYPE_1),
        };
        assert_eq!(windowed.bind_type_1(2, LENGTH), 0);
        windowed.invalidate(3, 0);
        let mut into = [ibv_wc::default(); 2];
        assert_eq!(shim::poll_cq(application.cq, 2, into.as_mut_ptr()), 2);
        assert_ne!(into[1].status, IBV_WC_SUCCESS);
        let second = std::mem::ManuallyDrop::new(windowed).window;
        assert_eq!(shim::destroy_qp(application.pair), 0);
        application.pair = application.create_pair(ptr::null_mut());
        assert!(named("failed and is gone"));
        assert_eq!([first, second].map(|window| dealloc(window)), [0, 0]);
    }
    assert!(!named(""));
}

#[test]
fn a_window_that_another_queue_pair_failed_to_unbind_is_named_before_a_move() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_1);
    assert_eq!(windowed.bind_type_1(1, LENGTH), 0);
    assert_eq!(application.poll(), [1]);
    // SAFETY: as verbs demand; requests of the second pair fail.
    unsafe {
        let key = (*windowed.window).rkey;
        let second = application.create_pair(ptr::null_mut());
        windowed.invalidate_by(second, 2, 0);
        let mut nothing = ibv_mw_bind {
            wr_id: 3,
            send_flags: 0,
            bind_info: windowed.info(0),
        };
        let bind = (*application.context).ops.bind_mw.unwrap();
        assert_eq!(bind(second, windowed.window, &raw mut nothing), 0);
        let mut into = [ibv_wc::default(); 2];
        assert_eq!(shim::poll_cq(application.cq, 2, into.as_mut_ptr()), 2);
        assert!(into.iter().all(|one| one.status != IBV_WC_SUCCESS));
        assert_eq!(windowed.reach(key), windowed.part(&RemoteKeys::default()));
        assert_eq!(shim::destroy_qp(second), 0);
    }
    let obstacles = shim::obstacles();
    let mut all = obstacles.iter();
    assert!(all.any(|obstacle| obstacle.what.contains("whether it is bound is not known")));
}

#[test]
fn windows_that_were_bound_before_one_was_refused_are_bound_at_the_next_attempt() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    let second = Windowed::start(&application, IBV_MW_TYPE_2);
    let known = [windowed.bind(1, 7), second.bind(2, 8)];
    assert_eq!(application.poll(), [1, 2]);
    suspend_and_release(&application, 0);
    let keys = RemoteKeys::new(&windowed.arrives().remote_keys);
    let reached = || known.map(|key| windowed.reach(keys.physical(key)));
    let parts = [windowed.part(&keys), second.part(&keys)];
    let region = parts[1].unwrap().region;
    with(|device| assert!(device.keys.remove(&region)));
    for _ in 0..2 {
        let refused = shim::connect(&[application.connection()]).unwrap_err();
        assert!(refused.contains("was not bound again"), "{refused}");
        assert_eq!(reached(), [parts[0], None]);
    }
    with(|device| device.keys.insert(region));
    shim::connect(&[application.connection()]).unwrap();
    assert_eq!(reached(), parts);
    shim::resume(None).unwrap();
    assert!(application.poll().is_empty());
}

#[test]
fn a_binding_that_a_device_refuses_at_the_new_place_fails_the_move_in_words() {
    let application = Application::start();
    let windowed = Windowed::start(&application, IBV_MW_TYPE_2);
    windowed.bind(1, 7);
    assert_eq!(application.poll(), [1]);
    suspend_and_release(&application, 0);
    windowed.arrives();
    let keys = with(|device| std::mem::take(&mut device.keys));
    let refused = shim::connect(&[application.connection()]).unwrap_err();
    assert!(refused.contains("was not bound again"), "{refused}");
    with(|device| device.keys = keys);
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    assert!(application.poll().is_empty());
    let number = application.number();
    let peer_sent = BTreeMap::from([(number, 0)]);
    shim::suspend(None).unwrap();
    complete_sends();
    shim::drain(&peer_sent, Duration::from_secs(1)).unwrap();
    shim::resume(None).unwrap();
}
