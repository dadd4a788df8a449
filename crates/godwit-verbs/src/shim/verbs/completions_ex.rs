//! Completion queues with completions that are read by calls (`ibv_start_poll`). The calls work on any device, since
//! each reads one completion from an ordinary poll; so these queues move like others.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::hint::cold_path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::*;
use crate::shim::data_path::polling::poll_cq;
use crate::shim::objects::ShadowCq;

/// The completion that is being read.
pub(in crate::shim) struct Reading {
    /// True while a thread is between `start_poll` and `end_poll`.
    taken: AtomicBool,
    /// True if threads have to wait for each other.
    shared: bool,
    completion: UnsafeCell<ibv_wc>,
}

impl Reading {
    /// Returns the state before the first poll. With `shared`, the threads do not take turns by themselves.
    pub(super) const fn new(shared: bool) -> Self {
        Self {
            taken: AtomicBool::new(false),
            shared,
            completion: UnsafeCell::new(ibv_wc::NONE),
        }
    }

    fn take(&self) {
        while self.shared && self.taken.swap(true, Ordering::Acquire) {
            cold_path();
            while self.taken.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
    }

    fn let_go(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

/// Returns the calls of a queue that was requested with these `IBV_WC_EX_WITH_*`.
pub(super) fn calls(wanted: u64) -> ibv_cq_ex_polled {
    let has = |flag| wanted & flag != 0;
    ibv_cq_ex_polled {
        start_poll: Some(start_poll),
        next_poll: Some(next_poll),
        end_poll: Some(end_poll),
        read_opcode: Some(read_opcode),
        read_vendor_err: Some(read_vendor_err),
        read_wc_flags: Some(read_wc_flags),
        read_byte_len: has(IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len),
        read_imm_data: has(IBV_WC_EX_WITH_IMM).then_some(read_imm_data),
        read_qp_num: has(IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num),
        read_src_qp: has(IBV_WC_EX_WITH_SRC_QP).then_some(read_src_qp),
        read_slid: has(IBV_WC_EX_WITH_SLID).then_some(read_slid),
        read_sl: has(IBV_WC_EX_WITH_SL).then_some(read_sl),
        read_dlid_path_bits: has(IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_dlid_path_bits),
        ..Default::default()
    }
}

unsafe extern "C" fn start_poll(queue: *mut ibv_cq_ex, attributes: *mut c_void) -> c_int {
    // `struct ibv_poll_cq_attr` has only a mask, and no device knows a bit of the mask.
    if !attributes.is_null() && *attributes.cast::<u32>() != 0 {
        return libc::EINVAL;
    }
    let reading = &(*queue.cast::<ShadowCq>()).reading;
    reading.take();
    let result = next_poll(queue);
    if result != 0 {
        // The application does not call `end_poll` then.
        reading.let_go();
    }
    result
}

unsafe extern "C" fn next_poll(queue: *mut ibv_cq_ex) -> c_int {
    let shadow = &*queue.cast::<ShadowCq>();
    let completion = shadow.reading.completion.get();
    match poll_cq(queue.cast(), 1, completion) {
        0 => libc::ENOENT,
        1 => {
            let polled = shadow.polled.get();
            ((*polled).status, (*polled).wr_id) = ((*completion).status, (*completion).wr_id);
            0
        }
        _ => libc::EINVAL,
    }
}

unsafe extern "C" fn end_poll(queue: *mut ibv_cq_ex) {
    (*queue.cast::<ShadowCq>()).reading.let_go();
}

macro_rules! read {
    ($($name:ident = $member:ident: $type:ty;)*) => {
        $(unsafe extern "C" fn $name(queue: *mut ibv_cq_ex) -> $type {
            let completion = (*queue.cast::<ShadowCq>()).reading.completion.get();
            (*completion).$member.into()
        })*
    };
}

read! {
    read_opcode = opcode: c_int;
    read_vendor_err = vendor_err: u32;
    read_byte_len = byte_len: u32;
    read_imm_data = imm_data: u32;
    read_qp_num = qp_num: u32;
    read_src_qp = src_qp: u32;
    read_wc_flags = wc_flags: c_uint;
    read_slid = slid: u32;
    read_sl = sl: u8;
    read_dlid_path_bits = dlid_path_bits: u8;
}
