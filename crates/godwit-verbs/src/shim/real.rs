//! The functions of libibverbs itself.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::abi::*;

macro_rules! table {
    (
        $($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
        @newer
        $($newer:ident = $newer_symbol:literal: fn($($newer_argument:ty),*) $(-> $newer_result:ty)?;)*
    ) => {
        /// The targets of the shim's calls: libibverbs, or a provider of the tests.
        #[derive(Clone, Copy)]
        pub struct Real {
            $(#[doc = $symbol] pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(#[doc = $newer_symbol] pub $newer: Option<unsafe extern "C" fn($($newer_argument),*) $(-> $newer_result)?>,)*
        }

        impl Real {
            /// Finds every function in the library behind `handle`; fails with the name of a missing function.
            unsafe fn find(handle: *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        let name = concat!($symbol, "\0");
                        let found = libc::dlsym(handle, name.as_ptr().cast());
                        if found.is_null() {
                            return Err($symbol);
                        }
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found)
                    },)*
                    $($newer: {
                        let found = libc::dlsym(handle, concat!($newer_symbol, "\0").as_ptr().cast());
                        std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($newer_argument),*) $(-> $newer_result)?>>(found)
                    },)*
                })
            }
        }
    };
}

table! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list = "ibv_free_device_list": fn(*mut *mut ibv_device);
    open_device = "ibv_open_device": fn(*mut ibv_device) -> *mut ibv_context;
    close_device = "ibv_close_device": fn(*mut ibv_context) -> c_int;
    query_device = "ibv_query_device": fn(*mut ibv_context, *mut c_void) -> c_int;
    query_port = "ibv_query_port": fn(*mut ibv_context, u8, *mut c_void) -> c_int;
    query_gid = "ibv_query_gid": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    query_pkey = "ibv_query_pkey": fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
    get_pkey_index = "ibv_get_pkey_index": fn(*mut ibv_context, u8, u16) -> c_int;
    query_gid_ex = "_ibv_query_gid_ex": fn(*mut ibv_context, u32, u32, *mut c_void, u32, usize) -> c_int;
    query_gid_table = "_ibv_query_gid_table": fn(*mut ibv_context, *mut c_void, usize, u32, usize) -> isize;
    alloc_pd = "ibv_alloc_pd": fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut ibv_pd) -> c_int;
    reg_mr_iova2 = "ibv_reg_mr_iova2": fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
    dereg_mr = "ibv_dereg_mr": fn(*mut ibv_mr) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel = "ibv_destroy_comp_channel": fn(*mut ibv_comp_channel) -> c_int;
    create_cq = "ibv_create_cq": fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq = "ibv_destroy_cq": fn(*mut ibv_cq) -> c_int;
    get_cq_event = "ibv_get_cq_event": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": fn(*mut ibv_cq, c_uint);
    create_srq = "ibv_create_srq": fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    modify_srq = "ibv_modify_srq": fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    query_srq = "ibv_query_srq": fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    destroy_srq = "ibv_destroy_srq": fn(*mut ibv_srq) -> c_int;
    create_qp = "ibv_create_qp": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    query_qp = "ibv_query_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    modify_qp = "ibv_modify_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut ibv_qp) -> c_int;
    create_ah = "ibv_create_ah": fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    init_ah_from_wc = "ibv_init_ah_from_wc": fn(*mut ibv_context, u8, *mut ibv_wc, *mut c_void, *mut ibv_ah_attr) -> c_int;
    destroy_ah = "ibv_destroy_ah": fn(*mut ibv_ah) -> c_int;
    attach_mcast = "ibv_attach_mcast": fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    detach_mcast = "ibv_detach_mcast": fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    get_async_event = "ibv_get_async_event": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event = "ibv_ack_async_event": fn(*mut ibv_async_event);
    get_device_name = "ibv_get_device_name": fn(*mut ibv_device) -> *const c_char;
    rereg_mr = "ibv_rereg_mr": fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    resize_cq = "ibv_resize_cq": fn(*mut ibv_cq, c_int) -> c_int;
    qp_to_qp_ex = "ibv_qp_to_qp_ex": fn(*mut ibv_qp) -> *mut ibv_qp_ex;
    resolve_eth_l2_from_gid = "ibv_resolve_eth_l2_from_gid": fn(*mut ibv_context, *mut ibv_ah_attr, *mut u8, *mut u16) -> c_int;

    // A program that was linked to a libibverbs without these functions does not call them.
    @newer
    query_ece = "ibv_query_ece": fn(*mut ibv_qp, *mut c_void) -> c_int;
    set_ece = "ibv_set_ece": fn(*mut ibv_qp, *mut c_void) -> c_int;
    query_qp_data_in_order = "ibv_query_qp_data_in_order": fn(*mut ibv_qp, c_int, u32) -> c_int;
    reg_dmabuf_mr = "ibv_reg_dmabuf_mr": fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    import_device = "ibv_import_device": fn(c_int) -> *mut ibv_context;
    import_pd = "ibv_import_pd": fn(*mut ibv_context, u32) -> *mut ibv_pd;
    unimport_pd = "ibv_unimport_pd": fn(*mut ibv_pd);
    import_mr = "ibv_import_mr": fn(*mut ibv_pd, u32) -> *mut ibv_mr;
    unimport_mr = "ibv_unimport_mr": fn(*mut ibv_mr);
    import_dm = "ibv_import_dm": fn(*mut ibv_context, u32) -> *mut c_void;
    query_gid_type = "ibv_query_gid_type": fn(*mut ibv_context, u8, c_uint, *mut c_int) -> c_int;
    verbs_open_device = "verbs_open_device": fn(*mut ibv_device, *mut c_void) -> *mut ibv_context;
}

static REAL: OnceLock<Real> = OnceLock::new();

/// Puts another provider behind the shim. Returns true if the shim was not used before.
pub fn install(real: Real) -> bool {
    REAL.set(real).is_ok()
}

/// Returns the functions behind the shim. Ends the process if the system has no suitable libibverbs: without its verbs
/// the application could not continue either.
pub(super) fn real() -> &'static Real {
    REAL.get_or_init(|| {
        const LIBRARY: &CStr = c"libibverbs.so.1";
        // SAFETY: a constant name; libibverbs' constructors are those that the application runs anyway.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            eprintln!("godwit-verbs: libibverbs.so.1 cannot be loaded; install libibverbs1");
            std::process::abort();
        }
        // SAFETY: the types are those of the library's header.
        match unsafe { Real::find(handle) } {
            Ok(real) => real,
            Err(symbol) => {
                eprintln!(
                    "godwit-verbs: libibverbs.so.1 has no {symbol}; rdma-core 32 or newer is needed"
                );
                std::process::abort();
            }
        }
    })
}
