//! Moves: the queue pair at the same address, its lists while the process is stopped, and the keys in the lists.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, Connection};
use godwit_verbs::tables::{Gid, RemoteKey, RemoteKeys};

use super::{ALL, Extended, numbers_of, taken};
use crate::device::{Reach, complete_sends, with};
use crate::{Application, keys_of_regions};

impl Extended<'_> {
    fn stops(&self) {
        shim::suspend(None).unwrap();
        complete_sends();
        let peers = BTreeMap::from([(self.application.number(), 0), (self.number(), 0)]);
        shim::drain(&peers, Duration::from_millis(50)).unwrap();
    }

    /// Resumes at another place. Returns the process's keys there.
    fn goes_on(&self, remote_keys: Option<Vec<RemoteKey>>) -> Vec<RemoteKey> {
        let made = shim::recreate(None).unwrap();
        let own = Connection {
            number: self.number(),
            remote: Gid([0; 16]),
            remote_physical: 99,
            remote_keys,
        };
        shim::connect(&[self.application.connection(), own]).unwrap();
        taken();
        shim::resume(None).unwrap();
        made.remote_keys
    }

    fn device_pair(&self) -> u32 {
        let pairs = shim::queue_pairs();
        let own = pairs.iter().find(|pair| pair.number == self.number());
        own.unwrap().physical
    }
}

#[test]
fn lists_go_on_after_a_move_with_the_keys_of_the_new_place() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    // SAFETY: the region lives.
    let lkey = unsafe { (*application.register()).lkey };
    let list = || {
        // SAFETY: the pair lives.
        let result = extended.list(|calls| unsafe {
            calls.write(5, 0x70);
            calls.set_sge(lkey, 16, 8);
            calls.fetch_add(5, 0x78, 1);
            calls.set_sge(lkey, 24, 8);
            calls.send_inv(5);
            calls.set_sge(lkey, 32, 8);
        });
        assert_eq!(result, 0);
        let sent = taken();
        let local = sent.iter().map(|one| one.pieces[0].lkey).collect();
        (
            local,
            [sent[0].remote.1, sent[1].remote.1, sent[2].imm_data],
        )
    };
    assert_eq!(list(), (vec![lkey; 3], [5; 3]));
    complete_sends();
    assert_eq!(extended.poll(), [7; 3]);
    let found = extended.calls.0;
    extended.stops();
    shim::release().unwrap();
    // Other processes have these at the new place.
    with(|device| {
        (
            device.keys.insert(lkey),
            device.numbers.insert(extended.number()),
        )
    });
    let keys = extended.goes_on(Some(vec![RemoteKey::Region(5, 6)]));
    // This device's local and remote keys of a region are equal.
    let moved = keys_of_regions(&keys)[&lkey];
    assert_ne!(moved, lkey);
    assert_eq!(list(), (vec![moved; 3], [6; 3]));
    // SAFETY: the pair lives.
    assert_eq!(unsafe { shim::qp_to_qp_ex(extended.pair) }, found);
    complete_sends();
    assert_eq!(extended.poll(), [7; 3]);
    // Lists of one request.
    // SAFETY: as above.
    let result = extended.list(|calls| unsafe {
        calls.read(5, 0x70);
        calls.set_sge(lkey, 16, 8);
    });
    let sent = taken();
    assert_eq!((result, sent[0].remote.1), (0, 6));
    assert_eq!(sent[0].pieces[0].lkey, moved);
    complete_sends();
    assert_eq!(extended.poll(), [7]);
}

#[test]
fn lists_are_kept_whole_while_the_process_is_stopped() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let calls = extended.calls;
    let mut data = *b"at once.";
    let list = |numbers| extended.send_empty(numbers);
    // A list begun before the stop does not delay it.
    // SAFETY: the pair and the data live.
    unsafe {
        calls.start();
        calls.send_empty(1);
        calls.set_inline_data(data.as_mut_ptr().cast(), data.len());
    }
    extended.stops();
    taken();
    // SAFETY: as above.
    unsafe {
        calls.send_empty(2);
        assert_eq!(calls.complete(), 0);
    }
    data.fill(0);
    // Only the first request would fit.
    assert_eq!(list(3..5), libc::ENOMEM);
    shim::release().unwrap();
    assert_eq!(list(3..5), libc::ENOMEM);
    assert_eq!(list(5..6), 0);
    assert_eq!(list(6..7), libc::ENOMEM);
    assert!(taken().is_empty());
    assert!(extended.poll().is_empty());
    extended.goes_on(None);
    let sent = taken();
    assert_eq!(numbers_of(&sent), [1, 2, 5]);
    assert_eq!(sent[0].data, b"at once.");
    complete_sends();
    assert_eq!(extended.poll(), [1, 2, 5]);
}

/// A window of type 2 of a region.
struct Window {
    region: *mut ibv_mr,
    window: *mut ibv_mw,
}

impl Window {
    fn of(application: &Application) -> Self {
        let region = application.register();
        // SAFETY: the domain is the application's.
        let window = unsafe {
            let alloc = (*application.context).ops.alloc_mw.unwrap();
            alloc(application.pd, IBV_MW_TYPE_2)
        };
        assert!(!window.is_null());
        Self { region, window }
    }

    fn info(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.region,
            addr: 0x1000,
            length: 64,
            mw_access_flags: 2,
        }
    }

    /// Returns the window's key with this tag.
    fn key(&self, tag: u32) -> u32 {
        // SAFETY: the window lives.
        unsafe { (*self.window).rkey & !0xff | tag }
    }

    fn end(self) {
        // SAFETY: as verbs demand.
        unsafe {
            let end = (*(*self.window).context).ops.dealloc_mw.unwrap();
            assert_eq!((end(self.window), shim::dereg_mr(self.region)), (0, 0));
        }
    }
}

#[test]
fn windows_are_bound_and_invalidated_by_lists_before_during_and_after_a_move() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let window = Window::of(&application);
    // The application may store the new key in its structure at once.
    let bind = |wr_id, tag| {
        let key = window.key(tag);
        // SAFETY: the objects live.
        let result = extended.list(|calls| unsafe {
            calls.next(wr_id, 0);
            calls.bind_mw(window.window, key, &window.info());
            (*window.window).rkey = key;
            calls.send_empty(wr_id + 1);
        });
        assert_eq!(result, 0);
        key
    };
    let reach = |keys: &RemoteKeys, key| {
        let pair = extended.device_pair();
        with(|device| device.windows.reach(pair, keys.physical(key)))
    };
    let part = |keys: &RemoteKeys| {
        Some(Reach {
            // SAFETY: the region lives.
            region: keys.physical(unsafe { (*window.region).rkey }),
            address: 0x1000,
            length: 64,
        })
    };
    let invalidate = |wr_id, key| {
        // SAFETY: the pair lives.
        let result = extended.list(|calls| unsafe {
            calls.next(wr_id, 0);
            calls.local_inv(key);
        });
        assert_eq!(result, 0);
    };
    let nobody_moved = RemoteKeys::default();
    let first = bind(1, 7);
    complete_sends();
    assert_eq!(extended.poll(), [1, 2]);
    assert_eq!(reach(&nobody_moved, first), part(&nobody_moved));
    extended.stops();
    invalidate(3, first);
    let second = bind(4, 8);
    shim::release().unwrap();
    // SAFETY: the objects live.
    let (name, key) = unsafe { ((*window.window).rkey >> 8, (*window.region).rkey) };
    with(|device| (device.windows.names.insert(name), device.keys.insert(key)));
    let keys = RemoteKeys::new(&extended.goes_on(None));
    complete_sends();
    assert_eq!(extended.poll(), [3, 4, 5]);
    assert_ne!(keys.physical(second), second);
    assert_eq!(reach(&keys, second), part(&keys));
    invalidate(6, second);
    complete_sends();
    assert_eq!(extended.poll(), [6]);
    assert_eq!(reach(&keys, second), None);
    let third = bind(7, 9);
    complete_sends();
    assert_eq!(extended.poll(), [7, 8]);
    assert_eq!(reach(&keys, third), part(&keys));
    invalidate(9, third);
    complete_sends();
    assert_eq!(extended.poll(), [9]);
    window.end();
}

#[test]
fn what_precedes_a_request_that_is_refused_for_another_reason_is_posted() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let window = Window::of(&application);
    let list = || -> c_int {
        // SAFETY: the objects live.
        extended.list(|calls| unsafe {
            calls.send_empty(1);
            let info = ibv_mw_bind_info {
                mr: ptr::null_mut(),
                ..window.info()
            };
            calls.bind_mw(window.window, window.key(7), &info);
            calls.send_empty(2);
        })
    };
    assert_eq!(list(), libc::EINVAL);
    assert_eq!(numbers_of(&taken()), [1]);
    complete_sends();
    assert_eq!(extended.poll(), [1]);
    // Kept lists are different.
    shim::suspend(None).unwrap();
    taken();
    assert_eq!(list(), libc::EINVAL);
    complete_sends();
    shim::resume(None).unwrap();
    assert!(taken().is_empty());
    complete_sends();
    assert!(extended.poll().is_empty());
    window.end();
}
