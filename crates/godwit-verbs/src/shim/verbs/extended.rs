//! Queue pairs with requests that are built by calls: creation and lookup. The calls are in
//! [`crate::shim::data_path::extended`].

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::contexts::refuse;
use super::passed::{device_verb, device_verbs, domain_behind};
use super::{datagrams, queue_pairs};
use crate::abi::*;
use crate::shim::data_path::extended::calls;
use crate::shim::objects::{self, ShadowQp};
use crate::shim::real::real;
use std::sync::atomic::Ordering;

/// Returns the mask bits of attributes that are present and request nothing.
fn asks_for_nothing(wanted: &ibv_qp_init_attr_ex) -> u32 {
    let mut bits = 0;
    if wanted.create_flags == 0 {
        bits |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
    }
    if wanted.max_tso_header == 0 {
        bits |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER;
    }
    bits
}

/// `ibv_create_qp_ex`, except the cases that `verbs.h` turns into `ibv_create_qp`.
pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let mask = (*wanted).comp_mask & !asks_for_nothing(&*wanted);
    let has_domain = mask & IBV_QP_INIT_ATTR_PD != 0;
    // The extended structure begins with the basic one.
    let basic = wanted.cast::<ibv_qp_init_attr>();
    let pd = if has_domain {
        (*wanted).pd
    } else {
        ptr::null_mut()
    };
    if objects::pd(pd).is_some() && queue_pairs::all_are_shadows(basic) {
        const WITH_CALLS: u32 = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if mask == IBV_QP_INIT_ATTR_PD {
            return queue_pairs::create(pd, basic, None);
        }
        if mask == WITH_CALLS
            && let Some(calls) = calls((*wanted).qp_type, (*wanted).send_ops_flags)
        {
            return queue_pairs::create(pd, basic, Some(calls));
        }
    }
    queue_pairs::create_as_is(context, pd, basic, |device, cookie| {
        let Some(verb) = device_verb!(device, create_qp_ex) else {
            return refuse(libc::EOPNOTSUPP);
        };
        let mut asked = *wanted;
        (&raw mut asked)
            .cast::<ibv_qp_init_attr>()
            .write(queue_pairs::device_attributes(cookie, &*basic));
        if has_domain {
            asked.pd = domain_behind(pd);
        }
        let made = verb(device, &raw mut asked);
        (*wanted).cap = asked.cap;
        made
    })
}

/// The device's own calls with object arguments, for a queue pair of the device.
#[derive(Clone, Copy)]
struct Named {
    wr_set_ud_addr: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32)>,
    wr_bind_mw:
        Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info)>,
}

/// The calls by the device's queue pair, for queue pairs in use by the application.
static NAMED: Mutex<BTreeMap<usize, Named>> = Mutex::new(BTreeMap::new());

fn named() -> MutexGuard<'static, BTreeMap<usize, Named>> {
    NAMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets a queue pair that is gone.
pub(super) unsafe fn forget(pair: &ShadowQp) {
    if pair.stays.get().is_some() {
        named().remove(&pair.with_calls.swap(0, Ordering::AcqRel));
    }
}

/// `ibv_qp_to_qp_ex`: null if the queue pair was made without operations to build requests. A queue pair that does not
/// move has the device's operations, which get the device's objects.
pub unsafe fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let Some(shadow) = objects::qp(qp) else {
        return (real().qp_to_qp_ex)(qp);
    };
    if shadow.list.is_some() {
        return qp.cast();
    }
    if shadow.stays.get().is_none() {
        return ptr::null_mut();
    }
    let pair = (real().qp_to_qp_ex)(queue_pairs::behind(qp));
    if pair.is_null() {
        return pair;
    }
    let mut all = named();
    if shadow.with_calls.swap(pair.addr(), Ordering::AcqRel) == 0 {
        let wr = &raw mut (*pair).wr;
        let own = Named {
            wr_set_ud_addr: (*wr).wr_set_ud_addr,
            wr_bind_mw: (*wr).wr_bind_mw,
        };
        all.insert(pair.addr(), own);
        (*wr).wr_set_ud_addr = own.wr_set_ud_addr.map(|_| wr_set_ud_addr as _);
        (*wr).wr_bind_mw = own.wr_bind_mw.map(|_| wr_bind_mw as _);
    }
    pair
}

unsafe extern "C" fn wr_set_ud_addr(
    pair: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    let own = named().get(&pair.addr()).and_then(|own| own.wr_set_ud_addr);
    let mut to = ibv_ud {
        ah,
        remote_qpn,
        remote_qkey,
    };
    datagrams::address(&mut to);
    if let Some(own) = own {
        own(pair, to.ah, to.remote_qpn, to.remote_qkey);
    }
}

unsafe extern "C" fn wr_bind_mw(
    pair: *mut ibv_qp_ex,
    window: *mut ibv_mw,
    key: u32,
    info: *const ibv_mw_bind_info,
) {
    let own = named().get(&pair.addr()).and_then(|own| own.wr_bind_mw);
    let mut info = *info;
    info.mr = objects::mr(info.mr).map_or(info.mr, |region| region.real.load(Ordering::Acquire));
    let window = objects::mw(window).map_or(window, |window| window.real.load(Ordering::Acquire));
    if let Some(own) = own {
        own(pair, window, key, &raw const info);
    }
}
