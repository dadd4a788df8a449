//! Inline functions of `verbs.h`, which are applications' own code.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;
use std::ptr;

use godwit_verbs::abi::*;
use godwit_verbs::shim;

/// `verbs_get_ctx_op`: the extended verbs of the context, if there is a verb at this place.
pub(crate) unsafe fn extended(
    context: *mut ibv_context,
    place: usize,
) -> Option<*mut verbs_context> {
    if (*context).abi_compat != VERBS_ABI_IS_EXTENDED {
        return None;
    }
    let whole = context
        .byte_sub(offset_of!(verbs_context, context))
        .cast::<verbs_context>();
    let has = (*whole).sz >= size_of::<verbs_context>() - place;
    let operation = || whole.byte_add(place).cast::<*mut c_void>().read();
    (has && !operation().is_null()).then_some(whole)
}

/// `ibv_create_qp_ex`
pub(crate) unsafe fn create_qp_ex(
    context: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    if (*wanted).comp_mask == IBV_QP_INIT_ATTR_PD {
        return shim::create_qp((*wanted).pd, wanted.cast());
    }
    match extended(context, offset_of!(ExtendedVerbs, create_qp_ex)) {
        Some(whole) => (*whole).verbs.create_qp_ex.unwrap()(context, wanted),
        None => {
            *libc::__errno_location() = libc::EOPNOTSUPP;
            ptr::null_mut()
        }
    }
}

/// `ibv_wr_*`. Every function is for a queue pair that lives and has the operation.
#[derive(Clone, Copy)]
pub(crate) struct Calls(pub(crate) *mut ibv_qp_ex);

macro_rules! calls {
    ($($name:ident = $member:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl Calls {
            $(pub(crate) unsafe fn $name(self, $($argument: $type),*) $(-> $result)? {
                (*self.0).wr.$member.unwrap()(self.0, $($argument),*)
            })*
        }
    };
}

calls! {
    start = wr_start();
    complete = wr_complete() -> c_int;
    abort = wr_abort();
    send = wr_send();
    send_imm = wr_send_imm(data: u32);
    send_inv = wr_send_inv(key: u32);
    write = wr_rdma_write(key: u32, address: u64);
    write_imm = wr_rdma_write_imm(key: u32, address: u64, data: u32);
    read = wr_rdma_read(key: u32, address: u64);
    compare = wr_atomic_cmp_swp(key: u32, address: u64, compare: u64, swap: u64);
    fetch_add = wr_atomic_fetch_add(key: u32, address: u64, add: u64);
    local_inv = wr_local_inv(key: u32);
    bind_mw = wr_bind_mw(window: *mut ibv_mw, key: u32, info: *const ibv_mw_bind_info);
    set_ud_addr = wr_set_ud_addr(handle: *mut ibv_ah, number: u32, key: u32);
    set_sge = wr_set_sge(key: u32, address: u64, length: u32);
    set_sge_list = wr_set_sge_list(count: usize, pieces: *const ibv_sge);
    set_inline_data = wr_set_inline_data(data: *mut c_void, length: usize);
    set_inline_data_list = wr_set_inline_data_list(count: usize, parts: *const ibv_data_buf);
}

impl Calls {
    /// Sets the number and the flags of the next request.
    pub(crate) unsafe fn next(self, wr_id: u64, flags: c_uint) {
        ((*self.0).wr.wr_id, (*self.0).wr.wr_flags) = (wr_id, flags);
    }

    /// Adds a request to send without data.
    pub(crate) unsafe fn send_empty(self, wr_id: u64) {
        self.next(wr_id, 0);
        self.send();
    }
}
