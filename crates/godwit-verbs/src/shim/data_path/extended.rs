//! The calls by which an application builds requests (`ibv_wr_*`). A complete list is posted like a list for
//! `ibv_post_send`.

use std::ffi::{c_int, c_void};
use std::hint::cold_path;
use std::ptr;

use super::lists::{self, RequestList};
use crate::abi::*;
use crate::shim::objects::{self, *};

/// The operations of a reliable connection.
const RELIABLE: u64 = send_ops_flag(IBV_WR_RDMA_WRITE)
    | send_ops_flag(IBV_WR_RDMA_WRITE_WITH_IMM)
    | send_ops_flag(IBV_WR_RDMA_READ)
    | send_ops_flag(IBV_WR_ATOMIC_CMP_AND_SWP)
    | send_ops_flag(IBV_WR_ATOMIC_FETCH_AND_ADD)
    | send_ops_flag(IBV_WR_LOCAL_INV)
    | send_ops_flag(IBV_WR_BIND_MW)
    | send_ops_flag(IBV_WR_SEND_WITH_INV)
    | DATAGRAMS;
/// The operations of a queue pair for datagrams.
const DATAGRAMS: u64 = send_ops_flag(IBV_WR_SEND) | send_ops_flag(IBV_WR_SEND_WITH_IMM);

/// Returns the calls of a queue pair of this type for the wanted operations; none if an operation is not offered.
pub(in crate::shim) fn calls(qp_type: c_int, wanted: u64) -> Option<ibv_qp_ex_wr> {
    let datagrams = qp_type == IBV_QPT_UD;
    let offered = match qp_type {
        IBV_QPT_RC => RELIABLE,
        IBV_QPT_UD => DATAGRAMS,
        _ => return None,
    };
    if wanted & !offered != 0 {
        return None;
    }
    let has = |opcode| wanted & send_ops_flag(opcode) != 0;
    Some(ibv_qp_ex_wr {
        wr_atomic_cmp_swp: has(IBV_WR_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp),
        wr_atomic_fetch_add: has(IBV_WR_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add),
        wr_bind_mw: has(IBV_WR_BIND_MW).then_some(wr_bind_mw),
        wr_local_inv: has(IBV_WR_LOCAL_INV).then_some(wr_local_inv),
        wr_rdma_read: has(IBV_WR_RDMA_READ).then_some(wr_rdma_read),
        wr_rdma_write: has(IBV_WR_RDMA_WRITE).then_some(wr_rdma_write),
        wr_rdma_write_imm: has(IBV_WR_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm),
        wr_send: has(IBV_WR_SEND).then_some(wr_send),
        wr_send_imm: has(IBV_WR_SEND_WITH_IMM).then_some(wr_send_imm),
        wr_send_inv: has(IBV_WR_SEND_WITH_INV).then_some(wr_send_inv),
        wr_set_ud_addr: datagrams.then_some(wr_set_ud_addr),
        wr_set_inline_data: Some(wr_set_inline_data),
        wr_set_inline_data_list: Some(wr_set_inline_data_list),
        wr_set_sge: Some(wr_set_sge),
        wr_set_sge_list: Some(wr_set_sge_list),
        wr_start: Some(wr_start),
        wr_complete: Some(wr_complete),
        wr_abort: Some(wr_abort),
        ..Default::default()
    })
}

#[inline]
unsafe fn list_of<'a>(qp: *mut ibv_qp_ex) -> Option<&'a RequestList> {
    let shadow = &*qp.cast::<ShadowQp>();
    shadow.list.as_ref()
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    if let Some(list) = list_of(qp) {
        list.take();
    }
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    if let Some(list) = list_of(qp) {
        list.let_go();
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    let Some(list) = list_of(qp) else {
        return libc::EINVAL;
    };
    let whole = (*list.requests()).whole();
    let result = match whole {
        Ok(Some(first)) => post_list(&*qp.cast::<ShadowQp>(), first),
        Ok(None) => 0,
        Err(errno) => errno,
    };
    list.let_go();
    result
}

/// Posts a list that was built by calls. If the device's queue has room for only a part, the rest is kept back.
#[inline]
unsafe fn post_list(shadow: &ShadowQp, first: *mut ibv_send_wr) -> c_int {
    let mut refused = ptr::null_mut();
    let result = match shadow.lane.enter() {
        Some(mut lane) => lane.post(first, &raw mut refused, lists::key_of),
        None => post_list_slowly(shadow, first, &raw mut refused),
    };
    if result == 0 {
        return 0;
    }
    cold_path();
    // Some providers return a negative errno.
    let errno = result.abs();
    let in_part = !refused.is_null() && !ptr::eq(refused, first);
    if errno == libc::ENOMEM && in_part {
        keep_rest(shadow, refused)
    } else {
        errno
    }
}

#[cold]
unsafe fn post_list_slowly(
    shadow: &ShadowQp,
    first: *mut ibv_send_wr,
    refused: *mut *mut ibv_send_wr,
) -> c_int {
    let mut lane = shadow.lane.lock();
    if lane.is_behind() {
        return lane.keep_whole(&shadow.init.cap, first, lists::key_of);
    }
    let result = lane.post(first, refused, lists::key_of);
    lane.own();
    result
}

/// Keeps the rest of a list whose beginning the device has taken, until completions make room. After an error, the
/// application would post the beginning again.
#[cold]
unsafe fn keep_rest(shadow: &ShadowQp, rest: *mut ibv_send_wr) -> c_int {
    let any_number = ibv_qp_cap {
        max_send_wr: u32::MAX,
        ..shadow.init.cap
    };
    // Locking takes the queue pair from its thread, whose next request would overtake the kept ones.
    let kept = shadow
        .lane
        .lock()
        .keep_whole(&any_number, rest, lists::key_of);
    if kept != 0 {
        return kept;
    }
    if let Some(queue) = objects::cq(shadow.face.send_cq) {
        queue.lane.visit().backlog = true;
    }
    // Completions from before the flag was set made room without notice.
    let mut lane = shadow.lane.visit();
    let _still_full = lane.is_behind();
    0
}

/// Adds a request with the number and the flags that the application has set.
#[inline]
unsafe fn add(qp: *mut ibv_qp_ex, opcode: c_int, fill: impl FnOnce(&mut ibv_send_wr)) {
    let next = &raw const (*qp).wr;
    if let Some(list) = list_of(qp) {
        (*list.requests()).add((*next).wr_id, (*next).wr_flags, opcode, fill);
    }
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    add(qp, IBV_WR_RDMA_WRITE, |request| {
        request.wr.rdma = ibv_rdma { remote_addr, rkey };
    });
}

unsafe extern "C" fn wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    imm_data: u32,
) {
    add(qp, IBV_WR_RDMA_WRITE_WITH_IMM, |request| {
        request.wr.rdma = ibv_rdma { remote_addr, rkey };
        request.imm_data = imm_data;
    });
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    add(qp, IBV_WR_RDMA_READ, |request| {
        request.wr.rdma = ibv_rdma { remote_addr, rkey };
    });
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    add(qp, IBV_WR_ATOMIC_CMP_AND_SWP, |request| {
        request.wr.atomic = ibv_atomic {
            remote_addr,
            compare_add: compare,
            swap,
            rkey,
        };
    });
}

unsafe extern "C" fn wr_atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare_add: u64,
) {
    add(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, |request| {
        request.wr.atomic = ibv_atomic {
            remote_addr,
            compare_add,
            swap: 0,
            rkey,
        };
    });
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    add(qp, IBV_WR_SEND, |_| {});
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: u32) {
    add(qp, IBV_WR_SEND_WITH_IMM, |request| {
        request.imm_data = imm_data;
    });
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    add(qp, IBV_WR_SEND_WITH_INV, |request| {
        request.imm_data = invalidate_rkey;
    });
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    add(qp, IBV_WR_LOCAL_INV, |request| {
        request.imm_data = invalidate_rkey;
    });
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    bind_info: *const ibv_mw_bind_info,
) {
    add(qp, IBV_WR_BIND_MW, |request| {
        request.bind_mw = ibv_send_bind_mw {
            mw,
            rkey,
            bind_info: *bind_info,
        };
    });
}

unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    if let Some(list) = list_of(qp) {
        (*list.requests()).change(|request| {
            request.wr.ud = ibv_ud {
                ah,
                remote_qpn,
                remote_qkey,
            };
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let piece = ibv_sge { addr, length, lkey };
    wr_set_sge_list(qp, 1, &raw const piece);
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, pieces: *const ibv_sge) {
    if let Some(list) = list_of(qp) {
        (*list.requests()).attach(several(pieces, count));
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let part = ibv_data_buf { addr, length };
    wr_set_inline_data_list(qp, 1, &raw const part);
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    parts: *const ibv_data_buf,
) {
    if let Some(list) = list_of(qp) {
        (*list.requests()).attach_copy(several(parts, count));
    }
}

/// Returns the elements of an application's array, whose pointer may be null if the array is empty.
unsafe fn several<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(first, count)
    }
}
