//! Lists: complete, with errors, of several threads, and longer than the remaining room.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_verbs::abi::*;
use godwit_verbs::shim;

use super::{ALL, Extended, INLINE, create, numbers_of, taken};
use crate::Application;
use crate::device::header::Calls;
use crate::device::{complete_sends, with};

#[test]
fn a_list_is_posted_when_it_is_complete_and_not_if_it_is_given_up() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let calls = extended.calls;
    // SAFETY: the pair lives.
    unsafe {
        calls.start();
        calls.send_empty(1);
        calls.send_empty(2);
        calls.abort();
        assert_eq!(extended.list(|_| {}), 0);
        assert_eq!(calls.complete(), 0);
        assert!(taken().is_empty());
        calls.start();
        (3..6).for_each(|wr_id| calls.send_empty(wr_id));
        assert!(taken().is_empty(), "it is not complete");
        assert_eq!(calls.complete(), 0);
    }
    assert_eq!(numbers_of(&taken()), [3, 4, 5]);
    complete_sends();
    assert_eq!(extended.poll(), [3, 4, 5]);
    // Two-sided requests are counted for the move.
    let pairs = shim::queue_pairs();
    let own = pairs.iter().find(|pair| pair.number == extended.number());
    assert_eq!(own.unwrap().sent, 3);
}

#[test]
fn a_list_with_an_error_is_not_posted_and_says_the_first_one() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let mut data = [0u8; INLINE as usize + 1];
    let bytes = data.as_mut_ptr().cast::<std::ffi::c_void>();
    let pieces = [ibv_sge::default(); 3];
    let parts = [ibv_data_buf {
        addr: bytes,
        length: INLINE as usize / 2 + 1,
    }; 2];
    let huge = [usize::MAX, 2].map(|length| ibv_data_buf {
        addr: bytes,
        length,
    });
    let wrong = |expected, put_together: &dyn Fn(Calls)| {
        // SAFETY: the pair lives.
        unsafe {
            let result = extended.list(|calls| {
                calls.send_empty(1);
                put_together(calls);
                calls.send_empty(2);
            });
            assert_eq!(result, expected);
            assert!(taken().is_empty());
            // The error is forgotten with the list.
            assert_eq!(extended.list(|calls| calls.send_empty(3)), 0);
        }
        assert_eq!(numbers_of(&taken()), [3]);
        complete_sends();
        assert_eq!(extended.poll(), [3]);
    };
    // SAFETY: the pair and the buffers live.
    unsafe {
        wrong(libc::ENOMEM, &|calls| {
            (4..6).for_each(|wr_id| calls.send_empty(wr_id));
        });
        wrong(libc::EINVAL, &|calls| {
            calls.set_sge_list(3, pieces.as_ptr());
        });
        wrong(libc::EINVAL, &|calls| {
            calls.set_inline_data(bytes, INLINE as usize + 1);
        });
        wrong(libc::EINVAL, &|calls| {
            calls.set_inline_data_list(2, parts.as_ptr());
        });
        wrong(libc::EINVAL, &|calls| {
            calls.set_inline_data_list(2, huge.as_ptr());
        });
        wrong(libc::EINVAL, &|calls| {
            calls.local_inv(5);
            calls.set_sge(0, 0, 8);
        });
        wrong(libc::EINVAL, &|calls| {
            calls.set_sge_list(3, pieces.as_ptr());
            (4..8).for_each(|wr_id| calls.send_empty(wr_id));
        });
        // The list has no request yet to attach data to.
        for attach in [&|calls: Calls| calls.set_sge(0, 0, 8), &|calls: Calls| {
            calls.set_inline_data(bytes, 1) as _
        }] as [&dyn Fn(Calls); 2]
        {
            let result = extended.list(|calls| {
                attach(calls);
                calls.send_empty(1);
            });
            assert_eq!((result, taken().len()), (libc::EINVAL, 0));
        }
    }
}

#[test]
fn as_much_as_was_asked_for_fits_into_a_list_however_often_it_is_attached() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    for round in 0..3u8 {
        let mut bytes = [round; INLINE as usize];
        let pieces = [2, 3].map(|addr| ibv_sge {
            addr: addr + u64::from(round),
            length: 1,
            lkey: 0,
        });
        // SAFETY: the pair and the buffers live.
        let result = extended.list(|calls| unsafe {
            for wr_id in 0..3 {
                calls.send_empty(wr_id);
                for _ in 0..5 {
                    calls.set_sge_list(2, pieces.as_ptr());
                    calls.set_inline_data(bytes.as_mut_ptr().cast(), bytes.len());
                }
                if wr_id == 1 {
                    calls.set_sge_list(2, pieces.as_ptr());
                }
            }
        });
        assert_eq!(result, 0);
        let sent = taken();
        for wr_id in [0, 2] {
            assert_eq!(sent[wr_id].data, [round; INLINE as usize]);
        }
        assert_eq!(sent[1].pieces, pieces);
        complete_sends();
        assert_eq!(extended.poll(), [0, 1, 2]);
    }
}

#[test]
fn what_does_not_fit_of_a_list_follows_and_nothing_is_taken_if_nothing_fits() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let list = |numbers| extended.send_empty(numbers);
    // The device has room for one more, for a marker.
    assert_eq!(list(1..4), 0);
    assert_eq!(list(4..7), 0);
    assert_eq!(numbers_of(&taken()), [1, 2, 3, 4]);
    // Later requests wait behind the kept ones, as many as fit there.
    assert_eq!(list(7..9), libc::ENOMEM);
    assert_eq!(list(7..8), 0);
    assert_eq!(list(8..9), libc::ENOMEM);
    assert_eq!(extended.post(IBV_WR_SEND, |_| {}), libc::ENOMEM);
    assert!(taken().is_empty());
    complete_sends();
    assert_eq!(extended.poll(), [1, 2, 3, 4]);
    assert_eq!(numbers_of(&taken()), [5, 6, 7]);
    complete_sends();
    assert_eq!(extended.poll(), [5, 6, 7]);
    // The device is full, and no request is kept.
    assert_eq!([list(1..4), list(4..5)], [0, 0]);
    assert_eq!(list(5..7), libc::ENOMEM);
    complete_sends();
    assert_eq!(extended.poll(), [1, 2, 3, 4]);
    assert_eq!(list(8..9), 0);
    complete_sends();
    assert_eq!(extended.poll(), [8]);
    assert_eq!(numbers_of(&taken()), [1, 2, 3, 4, 8]);
}

#[test]
fn the_rest_of_a_list_is_posted_after_what_completed_in_the_meantime() {
    let application = Application::start();
    let extended = Extended::start(&application, IBV_QPT_RC, ALL);
    let list = |numbers| extended.send_empty(numbers);
    assert_eq!(list(1..4), 0);
    // All requests complete just after the device has refused the next one.
    with(|device| device.completes_when_full = true);
    assert_eq!(list(4..7), 0);
    assert_eq!(numbers_of(&taken()), [1, 2, 3, 4, 5, 6]);
    with(|device| device.completes_when_full = false);
    complete_sends();
    assert_eq!(extended.poll(), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn lists_of_several_threads_do_not_mix() {
    const LISTS: u64 = 300;
    struct Shared(Calls);
    // SAFETY: the calls let one thread in at a time.
    unsafe impl Sync for Shared {}
    let application = Application::start();
    let pair = create(&application, IBV_QPT_RC, |wanted| {
        (wanted.send_ops_flags, wanted.cap.max_send_wr) = (ALL, 8 * LISTS as u32);
    });
    // SAFETY: the pair lives.
    let shared = Shared(Calls(unsafe { shim::qp_to_qp_ex(pair) }));
    let mixed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (shared, mixed) = (&shared, &mixed);
            scope.spawn(move || {
                for number in 0..LISTS {
                    let wr_id = thread << 32 | number;
                    let mut data = wr_id.to_ne_bytes();
                    // SAFETY: the pair and the data live.
                    unsafe {
                        shared.0.start();
                        for _ in 0..3 {
                            shared.0.send_empty(wr_id);
                            shared.0.set_inline_data(data.as_mut_ptr().cast(), 8);
                            std::thread::yield_now();
                        }
                        match number % 4 {
                            0 => shared.0.abort(),
                            _ if shared.0.complete() == 0 => {}
                            _ => mixed.store(true, Ordering::Relaxed),
                        }
                    }
                }
            });
        }
    });
    assert!(!mixed.load(Ordering::Relaxed));
    let sent = taken();
    assert_eq!(sent.len() as u64, 2 * 3 * LISTS * 3 / 4);
    for list in sent.chunks(3) {
        let own = |one: &super::Taken| one.data == list[0].wr_id.to_ne_bytes();
        assert!(list.iter().all(own), "{list:?}");
        assert!(list.iter().all(|one| one.wr_id == list[0].wr_id));
    }
    complete_sends();
    // SAFETY: nothing uses the pair any more.
    assert_eq!(unsafe { shim::destroy_qp(pair) }, 0);
    let mut rest = ibv_wc::default();
    // SAFETY: there is room for one.
    while unsafe { shim::poll_cq(application.cq, 1, ptr::from_mut(&mut rest)) } == 1 {}
}
