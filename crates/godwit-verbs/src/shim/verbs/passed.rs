//! Extended verbs that are passed on to the device, with the device's objects in place of shadows. Their results cannot
//! be made again elsewhere, so the process works as without this library and does not move.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::contexts::{behind, keep_domain, keep_region, refuse};
use super::{completions, extended, queue_pairs, shared_receives};
use crate::abi::*;
use crate::shim::objects;
use crate::shim::world::{KEYS, World, running_world};

/// Returns the extended verbs of a context of the device, if the structure reaches as far as `place`.
pub(super) unsafe fn device_verbs(
    context: *mut ibv_context,
    place: usize,
) -> Option<*const ExtendedVerbs> {
    if context.is_null() || (*context).abi_compat != VERBS_ABI_IS_EXTENDED {
        return None;
    }
    let whole = context
        .byte_sub(offset_of!(verbs_context, context))
        .cast::<verbs_context>();
    let reaches = (*whole).sz >= size_of::<verbs_context>() - place;
    reaches.then(|| &raw const (*whole).verbs)
}

/// Returns a verb of a context of the device, if present.
macro_rules! device_verb {
    ($context:expr, $verb:ident) => {
        device_verbs($context, offset_of!(ExtendedVerbs, $verb)).and_then(|verbs| (*verbs).$verb)
    };
}
pub(super) use device_verb;

/// Returns the verbs of a shadow context: the verbs that work on any device, and the others that this device's context
/// has.
pub(super) unsafe fn offered(device: *mut ibv_context) -> ExtendedVerbs {
    let mut verbs: ExtendedVerbs = std::mem::zeroed();
    verbs.create_qp_ex = Some(extended::create_qp_ex);
    verbs.create_cq_ex = Some(create_cq_ex);
    macro_rules! offer {
        ($($verb:ident)*) => {
            $(if device_verb!(device, $verb).is_some() {
                verbs.$verb = Some($verb);
            })*
        };
    }
    offer! {
        query_port query_device_ex query_rt_values get_srq_num advise_mr modify_cq modify_qp_rate_limit post_srq_ops
        alloc_null_mr reg_dm_mr alloc_parent_domain create_srq_ex open_qp create_wq create_flow
        create_counters alloc_dm create_flow_action_esp alloc_td create_rwq_ind_table open_xrcd
    }
    verbs
}

impl World {
    /// Records an object that a device gave to the application directly. The process does not move from then on.
    pub(super) fn handed_out<T>(&mut self, made: *mut T, what: &'static str) -> *mut T {
        if !made.is_null() {
            self.marks.insert(what);
        }
        made
    }

    /// As [`World::handed_out`], for a change with this errno value or 0 as the result.
    pub(super) fn changed(&mut self, result: c_int, what: &'static str) -> c_int {
        if result == 0 {
            self.marks.insert(what);
        }
        result
    }
}

/// Returns the device's domain behind the application's, which may be null.
pub(super) unsafe fn domain_behind(pd: *mut ibv_pd) -> *mut ibv_pd {
    objects::pd(pd).map_or(pd, |domain| domain.real.load(Ordering::Acquire))
}
unsafe fn queue_behind(cq: *mut ibv_cq) -> *mut ibv_cq {
    objects::cq(cq).map_or(cq, |queue| queue.lane.visit().real)
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    into: *mut c_void,
    size: usize,
) -> c_int {
    let device = behind(context);
    device_verb!(device, query_port).map_or(libc::EOPNOTSUPP, |verb| verb(device, port, into, size))
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const c_void,
    into: *mut c_void,
    size: usize,
) -> c_int {
    let device = behind(context);
    device_verb!(device, query_device_ex)
        .map_or(libc::EOPNOTSUPP, |verb| verb(device, input, into, size))
}

unsafe extern "C" fn query_rt_values(context: *mut ibv_context, values: *mut c_void) -> c_int {
    let device = behind(context);
    device_verb!(device, query_rt_values).map_or(libc::EOPNOTSUPP, |verb| verb(device, values))
}

unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, into: *mut u32) -> c_int {
    let device = behind((*srq).context);
    let queue = shared_receives::behind(srq);
    device_verb!(device, get_srq_num).map_or(libc::EOPNOTSUPP, |verb| verb(queue, into))
}

/// A move drops the advice, which may be dropped at any time.
unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: c_int,
    flags: u32,
    pieces: *mut ibv_sge,
    count: u32,
) -> c_int {
    let device = behind((*pd).context);
    let Some(verb) = device_verb!(device, advise_mr) else {
        return libc::EOPNOTSUPP;
    };
    let translates = running_world().translates;
    let mut known = Vec::new();
    if count > 0 {
        known.extend_from_slice(std::slice::from_raw_parts(pieces, count as usize));
    }
    for piece in known.iter_mut().filter(|_| translates) {
        piece.lkey = KEYS.physical(piece.lkey);
    }
    verb(domain_behind(pd), advice, flags, known.as_mut_ptr(), count)
}

unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attributes: *mut c_void) -> c_int {
    let mut world = running_world();
    let device_queue = queue_behind(cq);
    let result = device_verb!((*device_queue).context, modify_cq)
        .map_or(libc::EOPNOTSUPP, |verb| verb(device_queue, attributes));
    world.changed(result, "moderated completion queues (ibv_modify_cq)")
}

unsafe extern "C" fn modify_qp_rate_limit(qp: *mut ibv_qp, attributes: *mut c_void) -> c_int {
    let mut world = running_world();
    let device_pair = queue_pairs::behind(qp);
    let result = device_verb!((*device_pair).context, modify_qp_rate_limit)
        .map_or(libc::EOPNOTSUPP, |verb| verb(device_pair, attributes));
    world.changed(result, "limits of rates (ibv_modify_qp_rate_limit)")
}

unsafe extern "C" fn post_srq_ops(
    srq: *mut ibv_srq,
    first: *mut c_void,
    bad: *mut *mut c_void,
) -> c_int {
    let device_queue = shared_receives::behind(srq);
    device_verb!((*device_queue).context, post_srq_ops)
        .map_or(libc::EOPNOTSUPP, |verb| verb(device_queue, first, bad))
}

/// Returns a region made by `make` in the device's domain behind `pd`.
unsafe fn region_that_stays(
    pd: *mut ibv_pd,
    make: impl FnOnce(*mut ibv_context, *mut ibv_pd) -> *mut ibv_mr,
    stays: &'static str,
) -> *mut ibv_mr {
    let Some(parent) = objects::pd(pd) else {
        return refuse(libc::EINVAL);
    };
    let mut world = running_world();
    let domain = parent.real.load(Ordering::Acquire);
    let made = make((*domain).context, domain);
    keep_region(&mut world, parent, made, stays)
}

unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    let make = |device, domain| {
        device_verb!(device, alloc_null_mr)
            .map_or_else(|| refuse(libc::EOPNOTSUPP), |verb| verb(domain))
    };
    region_that_stays(pd, make, "has no memory (ibv_alloc_null_mr)")
}

unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    memory: *mut c_void,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let make = |device, domain| {
        device_verb!(device, reg_dm_mr).map_or_else(
            || refuse(libc::EOPNOTSUPP),
            |verb| verb(domain, memory, offset, length, access),
        )
    };
    region_that_stays(pd, make, "is memory of the device (ibv_reg_dm_mr)")
}

unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    wanted: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let Some(shadow) = objects::context(context) else {
        return refuse(libc::EINVAL);
    };
    let mut world = running_world();
    let device = shadow.real.load(Ordering::Acquire);
    let Some(verb) = device_verb!(device, alloc_parent_domain) else {
        return refuse(libc::EOPNOTSUPP);
    };
    let mut asked = *wanted;
    asked.pd = domain_behind(asked.pd);
    let made = verb(device, &raw mut asked);
    let parent = objects::pd((*wanted).pd).map(|parent| parent.id);
    let stays = "has a parent (ibv_alloc_parent_domain)";
    keep_domain(&mut world, shadow, made, parent, stays)
}

/// Queues that the application has as the device made them.
static QUEUES: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Returns the addresses of the queues that the application has as the device made them.
pub(in crate::shim) fn queues() -> MutexGuard<'static, BTreeSet<usize>> {
    QUEUES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `ibv_create_cq_ex`: a queue of this library if only standard fields are requested, otherwise the device's own.
unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    wanted: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let Some(shadow) = objects::context(context) else {
        return refuse(libc::EINVAL);
    };
    let mask = (*wanted).comp_mask;
    let flags = if mask & IBV_CQ_INIT_ATTR_MASK_FLAGS == 0 {
        0
    } else {
        (*wanted).flags
    };
    if (*wanted).wc_flags & !IBV_WC_STANDARD_FLAGS == 0
        && mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS == 0
        && flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED == 0
    {
        return completions::create_readable(context, &*wanted, flags == 0).cast();
    }
    let mut world = running_world();
    let device = shadow.real.load(Ordering::Acquire);
    let Some(verb) = device_verb!(device, create_cq_ex) else {
        return refuse(libc::EOPNOTSUPP);
    };
    let mut asked = *wanted;
    asked.channel = objects::channel(asked.channel).map_or(asked.channel, |channel| {
        channel.real.load(Ordering::Acquire)
    });
    if mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        asked.parent_domain = domain_behind(asked.parent_domain);
    }
    let made = verb(device, &raw mut asked);
    if !made.is_null() {
        queues().insert(made.addr());
    }
    world.handed_out(made, "extended completion queues (ibv_create_cq_ex)")
}

unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    wanted: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    let mask = (*wanted).comp_mask;
    let has = |bit| mask & bit != 0;
    let basic = !has(IBV_SRQ_INIT_ATTR_TYPE) || (*wanted).srq_type == IBV_SRQT_BASIC;
    if basic && mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) == 0 {
        return shared_receives::create_srq((*wanted).pd, wanted.cast());
    }
    if !has(IBV_SRQ_INIT_ATTR_PD) {
        return refuse(libc::EINVAL);
    }
    let (Some(shadow), Some(parent)) = (objects::context(context), objects::pd((*wanted).pd))
    else {
        return refuse(libc::EINVAL);
    };
    let mut world = running_world();
    let device = shadow.real.load(Ordering::Acquire);
    let Some(verb) = device_verb!(device, create_srq_ex) else {
        return refuse(libc::EOPNOTSUPP);
    };
    shared_receives::create_as_is(&mut world, parent, wanted.cast(), |cookie| {
        let mut asked = *wanted;
        asked.srq_context = cookie;
        asked.pd = parent.real.load(Ordering::Acquire);
        if has(IBV_SRQ_INIT_ATTR_CQ) {
            asked.cq = queue_behind(asked.cq);
        }
        let made = verb(device, &raw mut asked);
        (*wanted).attr = asked.attr;
        made
    })
}

unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    wanted: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    let mut init: ibv_qp_init_attr = std::mem::zeroed();
    (init.qp_context, init.qp_type) = ((*wanted).qp_context, (*wanted).qp_type);
    let make = |device: *mut ibv_context, cookie| {
        let mut asked = *wanted;
        asked.qp_context = cookie;
        let verb = device_verb!(device, open_qp);
        verb.map_or_else(
            || refuse(libc::EOPNOTSUPP),
            |verb| verb(device, &raw mut asked),
        )
    };
    queue_pairs::create_as_is(context, ptr::null_mut(), &mut init, make)
}

unsafe extern "C" fn create_wq(
    context: *mut ibv_context,
    wanted: *mut ibv_wq_init_attr,
) -> *mut c_void {
    let Some(shadow) = objects::context(context) else {
        return refuse(libc::EINVAL);
    };
    let mut world = running_world();
    let device = shadow.real.load(Ordering::Acquire);
    let Some(verb) = device_verb!(device, create_wq) else {
        return refuse(libc::EOPNOTSUPP);
    };
    let mut asked = *wanted;
    (asked.pd, asked.cq) = (domain_behind(asked.pd), queue_behind(asked.cq));
    let made = verb(device, &raw mut asked);
    (asked.pd, asked.cq) = ((*wanted).pd, (*wanted).cq);
    *wanted = asked;
    world.handed_out(made, "work queues (ibv_create_wq)")
}

unsafe extern "C" fn create_flow(qp: *mut ibv_qp, wanted: *mut c_void) -> *mut c_void {
    let mut world = running_world();
    let device_pair = queue_pairs::behind(qp);
    let made = match device_verb!((*device_pair).context, create_flow) {
        Some(verb) => verb(device_pair, wanted),
        None => refuse(libc::EOPNOTSUPP),
    };
    world.handed_out(made, "flows (ibv_create_flow)")
}

macro_rules! handed_out {
    ($($verb:ident = $what:literal;)*) => {
        $(unsafe extern "C" fn $verb(context: *mut ibv_context, wanted: *mut c_void) -> *mut c_void {
            let Some(shadow) = objects::context(context) else {
                return refuse(libc::EINVAL);
            };
            let mut world = running_world();
            let device = shadow.real.load(Ordering::Acquire);
            let made = match device_verb!(device, $verb) {
                Some(verb) => verb(device, wanted),
                None => refuse(libc::EOPNOTSUPP),
            };
            world.handed_out(made, $what)
        })*
    };
}

handed_out! {
    create_counters = "counters (ibv_create_counters)";
    alloc_dm = "memory of the device (ibv_alloc_dm)";
    create_flow_action_esp = "actions of flows (ibv_create_flow_action_esp)";
    alloc_td = "thread domains (ibv_alloc_td)";
    create_rwq_ind_table = "tables of work queues (ibv_create_rwq_ind_table)";
    open_xrcd = "XRC (ibv_open_xrcd)";
}
