//! The names of libibverbs, for the dynamic linker.
//!
//! The names carry no version, so the linker accepts them for every version that an application requests.

#![allow(unreachable_pub)]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use super::objects;
use super::real::real;
use super::verbs::{
    completions, contexts, datagrams, extended, passed, queue_pairs, shared_receives,
};
use crate::abi::*;
use crate::shim::verbs::contexts::{behind, refuse};

macro_rules! export {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $body:expr;)*) => {
        $(
            #[allow(missing_docs)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? { $body }
        )*
    };
}

export! {
    ibv_open_device(device: *mut ibv_device) -> *mut ibv_context = contexts::open_device(device);
    ibv_close_device(context: *mut ibv_context) -> c_int = contexts::close_device(context);
    ibv_query_device(context: *mut ibv_context, into: *mut c_void) -> c_int = (real().query_device)(behind(context), into);
    ibv_query_port(context: *mut ibv_context, port: u8, into: *mut c_void) -> c_int = (real().query_port)(behind(context), port, into);
    ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, into: *mut ibv_gid) -> c_int = (real().query_gid)(behind(context), port, index, into);
    ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, into: *mut u16) -> c_int = (real().query_pkey)(behind(context), port, index, into);
    ibv_get_pkey_index(context: *mut ibv_context, port: u8, key: u16) -> c_int = (real().get_pkey_index)(behind(context), port, key);
    _ibv_query_gid_ex(context: *mut ibv_context, port: u32, index: u32, into: *mut c_void, flags: u32, size: usize) -> c_int = (real().query_gid_ex)(behind(context), port, index, into, flags, size);
    _ibv_query_gid_table(context: *mut ibv_context, into: *mut c_void, most: usize, flags: u32, size: usize) -> isize = (real().query_gid_table)(behind(context), into, most, flags, size);
    ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = contexts::alloc_pd(context);
    ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int = contexts::dealloc_pd(pd);
    ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr = contexts::reg_mr(pd, address, length, address as u64, access as u32);
    ibv_reg_mr_iova(pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr = contexts::reg_mr(pd, address, length, iova, access as u32);
    ibv_reg_mr_iova2(pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr = contexts::reg_mr(pd, address, length, iova, access);
    ibv_reg_dmabuf_mr(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr = contexts::reg_dmabuf_mr(pd, offset, length, iova, fd, access);
    ibv_rereg_mr(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int) -> c_int = contexts::rereg_mr(mr, flags, pd, address, length, access);
    ibv_dereg_mr(mr: *mut ibv_mr) -> c_int = contexts::dereg_mr(mr);
    ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel = completions::create_comp_channel(context);
    ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int = completions::destroy_comp_channel(channel);
    ibv_create_cq(context: *mut ibv_context, entries: c_int, cookie: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int) -> *mut ibv_cq = completions::create_cq(context, entries, cookie, channel, vector);
    ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int = completions::resize_cq(cq, entries);
    ibv_destroy_cq(cq: *mut ibv_cq) -> c_int = completions::destroy_cq(cq);
    ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cookie: *mut *mut c_void) -> c_int = completions::get_cq_event(channel, cq, cookie);
    ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) = completions::ack_cq_events(cq, count);
    ibv_create_srq(pd: *mut ibv_pd, attributes: *mut ibv_srq_init_attr) -> *mut ibv_srq = shared_receives::create_srq(pd, attributes);
    ibv_modify_srq(srq: *mut ibv_srq, attributes: *mut ibv_srq_attr, mask: c_int) -> c_int = shared_receives::modify_srq(srq, attributes, mask);
    ibv_query_srq(srq: *mut ibv_srq, attributes: *mut ibv_srq_attr) -> c_int = shared_receives::query_srq(srq, attributes);
    ibv_destroy_srq(srq: *mut ibv_srq) -> c_int = shared_receives::destroy_srq(srq);
    ibv_create_qp(pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp = queue_pairs::create_qp(pd, attributes);
    ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex = extended::qp_to_qp_ex(qp);
    ibv_query_qp(qp: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int = queue_pairs::query_qp(qp, attributes, mask, init);
    ibv_modify_qp(qp: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int = queue_pairs::modify_qp(qp, attributes, mask);
    ibv_destroy_qp(qp: *mut ibv_qp) -> c_int = queue_pairs::destroy_qp(qp);
    ibv_create_ah(pd: *mut ibv_pd, attributes: *mut ibv_ah_attr) -> *mut ibv_ah = datagrams::create_ah(pd, attributes);
    ibv_destroy_ah(ah: *mut ibv_ah) -> c_int = datagrams::destroy_ah(ah);
    ibv_init_ah_from_wc(context: *mut ibv_context, port: u8, completion: *mut ibv_wc, header: *mut c_void, into: *mut ibv_ah_attr) -> c_int = (real().init_ah_from_wc)(behind(context), port, completion, header, into);
}

/// `ibv_create_ah_from_wc`, in the two steps that libibverbs documents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    completion: *mut ibv_wc,
    header: *mut c_void,
    port: u8,
) -> *mut ibv_ah {
    let mut attributes = ibv_ah_attr::default();
    let result = (real().init_ah_from_wc)(
        behind((*pd).context),
        port,
        completion,
        header,
        &raw mut attributes,
    );
    if result != 0 {
        return refuse(libc::EINVAL);
    }
    datagrams::create_ah(pd, &raw mut attributes)
}

export! {
    ibv_attach_mcast(qp: *mut ibv_qp, group: *const ibv_gid, lid: u16) -> c_int = queue_pairs::attach_mcast(qp, group, lid);
    ibv_detach_mcast(qp: *mut ibv_qp, group: *const ibv_gid, lid: u16) -> c_int = (real().detach_mcast)(queue_pairs::behind(qp), group, lid);
    ibv_query_ece(qp: *mut ibv_qp, options: *mut c_void) -> c_int = queue_pairs::query_ece(qp, options);
    ibv_set_ece(qp: *mut ibv_qp, options: *mut c_void) -> c_int = queue_pairs::set_ece(qp, options);
    ibv_query_qp_data_in_order(qp: *mut ibv_qp, opcode: c_int, flags: u32) -> c_int = queue_pairs::query_data_in_order(qp, opcode, flags);
    ibv_resolve_eth_l2_from_gid(context: *mut ibv_context, attributes: *mut ibv_ah_attr, address: *mut u8, vlan: *mut u16) -> c_int = (real().resolve_eth_l2_from_gid)(behind(context), attributes, address, vlan);
    ibv_query_gid_type(context: *mut ibv_context, port: u8, index: c_uint, kind: *mut c_int) -> c_int = real().query_gid_type.map_or(-1, |query| query(behind(context), port, index, kind));
    ibv_import_device(cmd_fd: c_int) -> *mut ibv_context = contexts::import_device(cmd_fd);
    ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd = contexts::import_pd(context, handle);
    ibv_unimport_pd(pd: *mut ibv_pd) = contexts::unimport_pd(pd);
    ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = contexts::import_mr(pd, handle);
    ibv_unimport_mr(mr: *mut ibv_mr) = contexts::unimport_mr(mr);
    ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut c_void = contexts::import_dm(context, handle);
    verbs_open_device(device: *mut ibv_device, asks_for: *mut c_void) -> *mut ibv_context = contexts::open_by_library(device, asks_for);
}

/// Returns true for asynchronous events that name a queue pair: `IBV_EVENT_QP_FATAL` to `IBV_EVENT_PATH_MIG_ERR`, and
/// `IBV_EVENT_QP_LAST_WQE_REACHED`.
fn names_queue_pair(kind: c_int) -> bool {
    (1..=7).contains(&kind) || kind == 16
}

/// `IBV_EVENT_CQ_ERR`
const CQ_ERR: c_int = 0;
/// `IBV_EVENT_SRQ_ERR`
const SRQ_ERR: c_int = 14;
/// `IBV_EVENT_SRQ_LIMIT_REACHED`
const SRQ_LIMIT_REACHED: c_int = 15;

/// `ibv_get_async_event`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    let Some(shadow) = objects::context(context) else {
        return (real().get_async_event)(context, event);
    };
    loop {
        let mut ready = libc::pollfd {
            fd: shadow.face.async_fd,
            events: libc::POLLIN,
            revents: 0,
        };
        if libc::poll(
            &raw mut ready,
            1,
            if may_wait(shadow.face.async_fd) {
                100
            } else {
                0
            },
        ) == 1
        {
            break;
        }
        // The device behind the number may have been replaced meanwhile, which poll does not notice.
        if !may_wait(shadow.face.async_fd) {
            *libc::__errno_location() = libc::EAGAIN;
            return -1;
        }
    }
    let result = (real().get_async_event)(behind(context), event);
    if result == 0 {
        let cookie = (*event).element;
        let mut taken = ibv_async_event {
            element: cookie,
            event_type: (*event).event_type,
        };
        // The device's objects carry their shadows' addresses; an event of an object made ahead of this process names
        // the shadow already. The lane is not taken here: a thread that destroys the object holds the lane and waits
        // for this thread.
        if names_queue_pair((*event).event_type)
            && let Some(shadow) = objects::qp(cookie.cast())
        {
            taken.element = shadow.made_ahead.load(Ordering::Acquire).cast();
        } else if (*event).event_type == CQ_ERR
            && let Some(shadow) = objects::cq(cookie.cast())
        {
            taken.element = shadow.made_ahead.load(Ordering::Acquire).cast();
        } else if matches!((*event).event_type, SRQ_ERR | SRQ_LIMIT_REACHED)
            && let Some(shadow) = objects::srq(cookie.cast())
        {
            if (*event).event_type == SRQ_LIMIT_REACHED {
                shadow.limit.store(0, Ordering::Relaxed);
            }
            taken.element = shadow.made_ahead.load(Ordering::Acquire).cast();
        } else if names_queue_pair((*event).event_type) {
            (*event).element = (*cookie.cast::<ibv_qp>()).qp_context;
        } else if (*event).event_type == CQ_ERR && passed::queues().contains(&cookie.addr()) {
            // The application has the device's own queue here, and acknowledges the event.
            return result;
        } else if (*event).event_type == CQ_ERR {
            (*event).element = (*cookie.cast::<ibv_cq>()).cq_context;
        } else if matches!((*event).event_type, SRQ_ERR | SRQ_LIMIT_REACHED) {
            let limit_reached = (*event).event_type == SRQ_LIMIT_REACHED;
            (*event).element = shared_receives::of_event(cookie, limit_reached);
        }
        // Acknowledged at once, so that the device's object can be given back at any time: its end waits for this.
        if !taken.element.is_null() {
            (real().ack_async_event)(&raw mut taken);
        }
    }
    result
}

unsafe fn may_wait(fd: c_int) -> bool {
    libc::fcntl(fd, libc::F_GETFL) & libc::O_NONBLOCK == 0
}

/// `ibv_ack_async_event`. Events of shadows were acknowledged when taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    let element = (*event).element;
    let ours = match (*event).event_type {
        kind if names_queue_pair(kind) => objects::qp(element.cast()).is_some(),
        CQ_ERR => objects::cq(element.cast()).is_some(),
        SRQ_ERR | SRQ_LIMIT_REACHED => objects::srq(element.cast()).is_some(),
        _ => false,
    };
    if !ours {
        (real().ack_async_event)(event);
    }
}
