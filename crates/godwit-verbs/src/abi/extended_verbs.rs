//! The extended verbs in front of a context, and their arguments.

use std::ffi::{c_int, c_uint, c_void};

use super::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_mr, ibv_pd, ibv_qp, ibv_qp_init_attr_ex, ibv_sge,
    ibv_srq, ibv_srq_attr, ibv_wc,
};

/// A verb that programs call only with an object of the device's own library, or a verb private to libibverbs.
type NotOurs = *mut c_void;

macro_rules! extended_verbs {
    ($($name:ident: $type:ty,)*) => {
        /// The verbs in front of a context, in the header's order.
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct ExtendedVerbs {
            $(pub $name: $type,)*
        }

        impl ExtendedVerbs {
            /// The header's names of the verbs.
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        }
    };
}

extended_verbs! {
    query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut c_void, usize) -> c_int>,
    advise_mr: Option<unsafe extern "C" fn(*mut ibv_pd, c_int, u32, *mut ibv_sge, u32) -> c_int>,
    alloc_null_mr: Option<unsafe extern "C" fn(*mut ibv_pd) -> *mut ibv_mr>,
    read_counters: NotOurs,
    attach_counters_point_flow: NotOurs,
    create_counters: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> *mut c_void>,
    destroy_counters: NotOurs,
    reg_dm_mr: Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, u64, usize, c_uint) -> *mut ibv_mr>,
    alloc_dm: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> *mut c_void>,
    free_dm: NotOurs,
    modify_flow_action_esp: NotOurs,
    destroy_flow_action: NotOurs,
    create_flow_action_esp: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> *mut c_void>,
    modify_qp_rate_limit: Option<unsafe extern "C" fn(*mut ibv_qp, *mut c_void) -> c_int>,
    alloc_parent_domain: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
    dealloc_td: NotOurs,
    alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> *mut c_void>,
    modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut c_void) -> c_int>,
    post_srq_ops: Option<unsafe extern "C" fn(*mut ibv_srq, *mut c_void, *mut *mut c_void) -> c_int>,
    destroy_rwq_ind_table: NotOurs,
    create_rwq_ind_table: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> *mut c_void>,
    destroy_wq: NotOurs,
    modify_wq: NotOurs,
    create_wq: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut c_void>,
    query_rt_values: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> c_int>,
    create_cq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
    private: NotOurs,
    query_device_ex: Option<unsafe extern "C" fn(*mut ibv_context, *const c_void, *mut c_void, usize) -> c_int>,
    destroy_flow: NotOurs,
    abi_placeholder2: NotOurs,
    create_flow: Option<unsafe extern "C" fn(*mut ibv_qp, *mut c_void) -> *mut c_void>,
    abi_placeholder1: NotOurs,
    open_qp: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp>,
    create_qp_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
    get_srq_num: Option<unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int>,
    create_srq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq>,
    open_xrcd: Option<unsafe extern "C" fn(*mut ibv_context, *mut c_void) -> *mut c_void>,
    close_xrcd: NotOurs,
}

/// The structure around a context with extended verbs. The structure grows at its beginning, so `sz` tells the size of
/// the present one. The context is the last member, followed by private data of the library.
#[repr(C)]
pub struct verbs_context<Context = ibv_context> {
    pub verbs: ExtendedVerbs,
    pub abi_placeholder3: u64,
    /// The size of the whole, with the header's context.
    pub sz: usize,
    pub context: Context,
}

/// `__VERBS_ABI_IS_EXTENDED`: the value of `abi_compat` in a context inside a [`verbs_context`].
pub const VERBS_ABI_IS_EXTENDED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_cq_init_attr_ex {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *mut ibv_comp_channel,
    pub comp_vector: u32,
    /// `IBV_WC_EX_WITH_*`
    pub wc_flags: u64,
    /// `IBV_CQ_INIT_ATTR_MASK_*`: the valid fields among the following.
    pub comp_mask: u32,
    pub flags: u32,
    pub parent_domain: *mut ibv_pd,
}

pub const IBV_CQ_INIT_ATTR_MASK_FLAGS: u32 = 1 << 0;
pub const IBV_CQ_INIT_ATTR_MASK_PD: u32 = 1 << 1;
pub const IBV_CREATE_CQ_ATTR_SINGLE_THREADED: u32 = 1 << 0;

pub const IBV_WC_EX_WITH_BYTE_LEN: u64 = 1 << 0;
pub const IBV_WC_EX_WITH_IMM: u64 = 1 << 1;
pub const IBV_WC_EX_WITH_QP_NUM: u64 = 1 << 2;
pub const IBV_WC_EX_WITH_SRC_QP: u64 = 1 << 3;
pub const IBV_WC_EX_WITH_SLID: u64 = 1 << 4;
pub const IBV_WC_EX_WITH_SL: u64 = 1 << 5;
pub const IBV_WC_EX_WITH_DLID_PATH_BITS: u64 = 1 << 6;
/// The fields of an [`ibv_wc`].
pub const IBV_WC_STANDARD_FLAGS: u64 = (1 << 7) - 1;

/// A completion queue with completions that are read by calls.
#[repr(C)]
pub struct ibv_cq_ex {
    pub cq_base: ibv_cq,
    /// The header has these members inline.
    pub polled: ibv_cq_ex_polled,
}

/// Status and number of the completion that was polled last, and the calls. Calls that the queue was made without are
/// absent.
#[repr(C)]
#[derive(Default)]
pub struct ibv_cq_ex_polled {
    pub comp_mask: u32,
    pub status: c_int,
    pub wr_id: u64,
    pub start_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex, *mut c_void) -> c_int>,
    pub next_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int>,
    pub end_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex)>,
    pub read_opcode: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int>,
    pub read_vendor_err: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    pub read_byte_len: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    pub read_imm_data: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    pub read_qp_num: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    pub read_src_qp: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    pub read_wc_flags: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint>,
    pub read_slid: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    pub read_sl: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u8>,
    pub read_dlid_path_bits: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u8>,
    /// `read_completion_ts`, `read_cvlan`, `read_flow_tag`, `read_tm_info`, `read_completion_wallclock_ns`
    pub read_others: [Option<unsafe extern "C" fn()>; 5],
}

pub const IBV_SRQ_INIT_ATTR_TYPE: u32 = 1 << 0;
pub const IBV_SRQ_INIT_ATTR_PD: u32 = 1 << 1;
pub const IBV_SRQ_INIT_ATTR_CQ: u32 = 1 << 3;
pub const IBV_SRQT_BASIC: c_int = 0;

/// Begins like `ibv_srq_init_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_srq_init_attr_ex {
    pub srq_context: *mut c_void,
    pub attr: ibv_srq_attr,
    /// `IBV_SRQ_INIT_ATTR_*`: the valid fields among the following.
    pub comp_mask: u32,
    pub srq_type: c_int,
    pub pd: *mut ibv_pd,
    pub xrcd: *mut c_void,
    pub cq: *mut ibv_cq,
    pub tm_cap: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wq_init_attr {
    pub wq_context: *mut c_void,
    pub wq_type: c_int,
    pub max_wr: u32,
    pub max_sge: u32,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub comp_mask: u32,
    pub create_flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_parent_domain_init_attr {
    pub pd: *mut ibv_pd,
    pub td: *mut c_void,
    pub comp_mask: u32,
    /// `alloc`, `free`, `pd_context`
    pub memory: [*mut c_void; 3],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_open_attr {
    pub comp_mask: u32,
    pub qp_num: u32,
    pub xrcd: *mut c_void,
    pub qp_context: *mut c_void,
    pub qp_type: c_int,
}

impl ibv_wc {
    /// An empty completion.
    pub const NONE: Self = Self {
        wr_id: 0,
        status: 0,
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        imm_data: 0,
        qp_num: 0,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    };
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<ExtendedVerbs>() == ExtendedVerbs::NAMES.len() * size_of::<usize>());
    assert!(size_of::<verbs_context>() == 648);
    assert!(offset_of!(verbs_context, verbs.create_qp_ex) == 264);
    assert!(offset_of!(verbs_context, sz) == 312);
    assert!(offset_of!(verbs_context, context) == 320);
    assert!(size_of::<ibv_cq_init_attr_ex>() == 56);
    assert!(offset_of!(ibv_cq_init_attr_ex, parent_domain) == 48);
    assert!(offset_of!(ibv_cq_ex, polled) == 128);
    assert!(offset_of!(ibv_cq_ex, polled.wr_id) == 136);
    assert!(offset_of!(ibv_cq_ex, polled.read_dlid_path_bits) == 240);
    assert!(size_of::<ibv_cq_ex>() == 288);
    assert!(offset_of!(ibv_srq_init_attr_ex, comp_mask) == 20);
    assert!(offset_of!(ibv_srq_init_attr_ex, pd) == 32);
    assert!(size_of::<ibv_srq_init_attr_ex>() == 64);
    assert!(size_of::<ibv_wq_init_attr>() == 48);
    assert!(size_of::<ibv_parent_domain_init_attr>() == 48);
    assert!(size_of::<ibv_qp_open_attr>() == 32);
};
