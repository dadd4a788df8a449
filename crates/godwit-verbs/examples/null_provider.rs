//! A libibverbs whose single device does nothing: requests are accepted and vanish, and each poll of a completion queue
//! returns one completion of its last queue pair. The cost of a call through the library beyond a call of this provider
//! is the library's own cost.

#![allow(
    unsafe_op_in_unsafe_fn,
    non_upper_case_globals,
    clippy::missing_safety_doc,
    missing_docs
)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

#[path = "../src/abi/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub)]
mod abi;
use abi::*;

/// The next number or key, each used once.
static NEXT: AtomicU32 = AtomicU32::new(0x100);

/// Completions of each queue at every poll: 0 or 1.
#[unsafe(no_mangle)]
pub static null_provider_completions: AtomicI32 = AtomicI32::new(1);

/// Opcode of the completions (`IBV_WC_*`).
#[unsafe(no_mangle)]
pub static null_provider_opcode: AtomicI32 = AtomicI32::new(0);

fn next() -> u32 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

unsafe fn zeroed<T>() -> *mut T {
    Box::into_raw(Box::new(std::mem::zeroed()))
}

unsafe fn free<T>(object: *mut T) -> c_int {
    drop(Box::from_raw(object));
    0
}

macro_rules! export {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? $body
        )*
    };
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    _: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    0
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    _: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    0
}

unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    let count = most.min(null_provider_completions.load(Ordering::Relaxed));
    if count == 1 {
        (*into).wr_id = 1;
        (*into).status = IBV_WC_SUCCESS;
        (*into).opcode = null_provider_opcode.load(Ordering::Relaxed);
        (*into).qp_num = (*queue).handle;
    }
    count
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

export! {
    ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
        if !count.is_null() {
            *count = 1;
        }
        let list: *mut [*mut ibv_device; 2] = zeroed();
        (*list)[0] = zeroed();
        list.cast()
    }
    ibv_free_device_list(list: *mut *mut ibv_device) {
        free(*list);
        free(list.cast::<[*mut ibv_device; 2]>());
    }
    ibv_get_device_name(_device: *mut ibv_device) -> *const c_char {
        c"null0".as_ptr()
    }
    ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
        let context: *mut ibv_context = zeroed();
        (*context).device = device;
        (*context).cmd_fd = -1;
        (*context).async_fd = libc::eventfd(0, libc::EFD_CLOEXEC);
        (*context).num_comp_vectors = 1;
        (*context).ops.poll_cq = Some(poll_cq);
        (*context).ops.req_notify_cq = Some(req_notify_cq);
        (*context).ops.post_send = Some(post_send);
        (*context).ops.post_recv = Some(post_recv);
        context
    }
    ibv_close_device(context: *mut ibv_context) -> c_int {
        libc::close((*context).async_fd);
        free(context)
    }
    ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
        let pd: *mut ibv_pd = zeroed();
        (*pd).context = context;
        pd
    }
    ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int { free(pd) }
    ibv_reg_mr_iova2(pd: *mut ibv_pd, address: *mut c_void, length: usize, _iova: u64, _access: c_uint) -> *mut ibv_mr {
        let region: *mut ibv_mr = zeroed();
        region.write(ibv_mr { context: (*pd).context, pd, addr: address, length, handle: 0, lkey: next(), rkey: next() });
        region
    }
    ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
        ibv_reg_mr_iova2(pd, address, length, address as u64, access as c_uint)
    }
    ibv_dereg_mr(region: *mut ibv_mr) -> c_int { free(region) }
    ibv_create_cq(context: *mut ibv_context, entries: c_int, cookie: *mut c_void, _channel: *mut ibv_comp_channel, _vector: c_int) -> *mut ibv_cq {
        let queue: *mut ibv_cq = zeroed();
        (*queue).context = context;
        (*queue).cq_context = cookie;
        (*queue).cqe = entries;
        queue
    }
    ibv_destroy_cq(queue: *mut ibv_cq) -> c_int { free(queue) }
    ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
        let pair: *mut ibv_qp = zeroed();
        (*pair).context = (*pd).context;
        (*pair).qp_num = next();
        (*(*init).send_cq).handle = (*pair).qp_num;
        pair
    }
    ibv_modify_qp(_pair: *mut ibv_qp, _to: *mut ibv_qp_attr, _mask: c_int) -> c_int { 0 }
    ibv_destroy_qp(pair: *mut ibv_qp) -> c_int { free(pair) }
}

/// The remaining functions must exist but are never called.
macro_rules! absent {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name() -> *mut c_void {
                ptr::null_mut()
            }
        )*
    };
}

absent! {
    ibv_query_device ibv_query_port ibv_query_gid ibv_query_pkey ibv_get_pkey_index _ibv_query_gid_ex _ibv_query_gid_table
    ibv_create_comp_channel ibv_destroy_comp_channel ibv_get_cq_event ibv_ack_cq_events ibv_query_qp
    ibv_create_ah ibv_init_ah_from_wc ibv_destroy_ah ibv_attach_mcast ibv_detach_mcast
    ibv_get_async_event ibv_ack_async_event
    ibv_create_srq ibv_modify_srq ibv_query_srq ibv_destroy_srq
    ibv_rereg_mr ibv_resize_cq ibv_qp_to_qp_ex ibv_resolve_eth_l2_from_gid
}
