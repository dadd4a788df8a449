//! A process that has not moved and whose peers have not, which the tests of moves are not after the first one.

#![allow(unsafe_op_in_unsafe_fn)]

#[path = "moving/device/mod.rs"]
#[allow(dead_code, unused_imports)]
mod device;

use std::ptr;

use device::with;
use godwit_verbs::abi::*;
use godwit_verbs::shim;

#[test]
fn datagrams_leave_with_the_keys_that_the_device_gave() {
    shim::install(device::functions());
    with(|device| device.first_key = 0x100);
    // SAFETY: the calls are in the order that verbs demand; the device touches no memory.
    unsafe {
        let context = shim::open_device(ptr::null_mut());
        assert!(
            (*context).abi_compat.is_null(),
            "programs would look for extended verbs in front of the context"
        );
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
