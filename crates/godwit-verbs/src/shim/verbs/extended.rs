//! Queue pairs whose requests are put together by calls: made, and found again. The calls are in
//! [`crate::shim::data_path::extended`].

use std::ptr;

use super::contexts::refuse;
use super::queue_pairs;
use crate::abi::*;
use crate::shim::data_path::extended::calls;
use crate::shim::objects;

/// `ibv_create_qp_ex`, for what `verbs.h` does not make of `ibv_create_qp` by itself.
pub(super) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let mask = (*wanted).comp_mask;
    if mask & !KNOWN != 0 || mask & IBV_QP_INIT_ATTR_PD == 0 {
        return refuse(libc::EOPNOTSUPP);
    }
    // What it knows beyond this is behind it.
    let basic = wanted.cast::<ibv_qp_init_attr>();
    if mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS == 0 {
        return queue_pairs::create((*wanted).pd, basic, None);
    }
    if objects::pd((*wanted).pd).is_none() {
        return refuse(libc::EINVAL);
    }
    match calls((*wanted).qp_type, (*wanted).send_ops_flags) {
        Some(calls) => queue_pairs::create((*wanted).pd, basic, Some(calls)),
        None => refuse(libc::EOPNOTSUPP),
    }
}

/// `ibv_qp_to_qp_ex`: null if the queue pair was not made with operations to put requests together.
pub unsafe fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    match objects::qp(qp) {
        Some(shadow) if shadow.list.is_some() => qp.cast(),
        _ => ptr::null_mut(),
    }
}
