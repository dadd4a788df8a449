//! A process without moves, of its own or of its peers. After their first test, the tests of moves have no such
//! process.

#![allow(unsafe_op_in_unsafe_fn)]

#[path = "moving/device/mod.rs"]
#[allow(dead_code, unused_imports)]
mod device;

use std::mem::offset_of;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device::header::{self, Calls};
use device::{Device, complete_sends, with};
use godwit_verbs::abi::*;
use godwit_verbs::shim;

/// Resets the single device for a test, and excludes other tests.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    shim::install(device::functions());
    with(|device| *device = Device::default());
    alone
}

#[test]
fn datagrams_leave_with_the_keys_that_the_device_gave() {
    let _alone = alone();
    with(|device| device.first_key = 0x100);
    // SAFETY: the calls are in the order that verbs demand; the device touches no memory.
    unsafe {
        let context = shim::open_device(ptr::null_mut());
        let pd = shim::alloc_pd(context);
        let cq = shim::create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
        let register = || shim::reg_mr(pd, ptr::null_mut(), 8, 0, 0);
        let before = register();
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, IBV_QPT_UD);
        (init.cap.max_send_wr, init.cap.max_recv_wr) = (4, 4);
        let pair = shim::create_qp(pd, &raw mut init);
        let mut attributes = ibv_ah_attr::default();
        let ah = shim::create_ah(pd, &raw mut attributes);
        for region in [before, register()] {
            let mut piece = ibv_sge {
                lkey: (*region).lkey,
                ..Default::default()
            };
            let mut request: ibv_send_wr = std::mem::zeroed();
            request.opcode = IBV_WR_SEND;
            (request.sg_list, request.num_sge) = (&raw mut piece, 1);
            request.wr.ud.ah = ah;
            let posted = shim::post_send(pair, &raw mut request, &mut ptr::null_mut());
            assert_eq!(posted, 0);
            assert_eq!(with(|device| device.local_keys.clone()), [piece.lkey]);
            assert_eq!(shim::dereg_mr(region), 0);
        }
        assert_eq!(shim::destroy_ah(ah), 0);
        assert_eq!(shim::destroy_qp(pair), 0);
        assert_eq!(shim::destroy_cq(cq), 0);
        assert_eq!(shim::close_device(context), 0);
    }
}

#[test]
fn lists_reach_the_device_as_they_are() {
    let _alone = alone();
    // SAFETY: the calls are in the order that verbs demand; the device touches no memory.
    unsafe {
        let context = shim::open_device(ptr::null_mut());
        let pd = shim::alloc_pd(context);
        let cq = shim::create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, IBV_QPT_RC);
        (init.cap.max_send_wr, init.cap.max_send_sge) = (3, 1);
        (init.comp_mask, init.pd) = (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, pd);
        init.send_ops_flags = send_ops_flag(IBV_WR_SEND) | send_ops_flag(IBV_WR_RDMA_WRITE);
        let pair = header::create_qp_ex(context, &raw mut init);
        assert_eq!(init.cap.max_send_wr, 3);
        let calls = Calls(shim::qp_to_qp_ex(pair));
        let list = |numbers: std::ops::Range<u64>| {
            calls.start();
            for wr_id in numbers {
                calls.next(wr_id, 0);
                calls.write(5, 0x70);
                calls.set_sge(6, 16, 8);
            }
            calls.complete()
        };
        let numbers = || {
            let taken = with(|device| std::mem::take(&mut device.taken));
            assert!(taken.iter().all(|one| one.remote == (0x70, 5, 0, 0)));
            assert!(taken.iter().all(|one| one.pieces[0].lkey == 6));
            taken.iter().map(|one| one.wr_id).collect::<Vec<_>>()
        };
        // With and without this thread's ownership of the queue pair.
        for _ in 0..2 {
            assert_eq!([list(1..2), list(2..4), list(4..7)], [0; 3]);
            assert_eq!(numbers(), [1, 2, 3, 4], "the device has room for four");
            let mut into = [ibv_wc::default(); 16];
            for expected in [4, 2] {
                complete_sends();
                let polled = shim::poll_cq(cq, 16, into.as_mut_ptr());
                assert_eq!(polled, expected);
            }
            assert_eq!(numbers(), [5, 6]);
        }
        assert_eq!(shim::destroy_qp(pair), 0);
        assert_eq!(shim::destroy_cq(cq), 0);
        assert_eq!(shim::close_device(context), 0);
    }
}

#[test]
fn a_context_carries_what_works_over_any_device() {
    let _alone = alone();
    // SAFETY: the calls are in the order that verbs demand.
    unsafe {
        let context = shim::open_device(ptr::null_mut());
        let offered: Vec<&str> = (0..offset_of!(verbs_context, abi_placeholder3))
            .step_by(size_of::<usize>())
            .filter(|place| header::extended(context, *place).is_some())
            .map(|place| ExtendedVerbs::NAMES[place / size_of::<usize>()])
            .collect();
        assert_eq!(offered, ["create_cq_ex", "create_qp_ex"]);
        assert_eq!(shim::close_device(context), 0);
    }
}
