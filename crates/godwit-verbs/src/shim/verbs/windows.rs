//! Memory windows: made, bound with `ibv_bind_mw`, destroyed. Requests that bind a window are posted like others
//! ([`crate::shim::data_path::windows`]).

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::contexts::refuse;
use crate::abi::*;
use crate::shim::data_path::posting::post_send;
use crate::shim::objects::{self, *};
use crate::shim::world::{Object, World, running_world, windows};
use crate::tables::{Call, TAG_BITS, WindowType, make_allowed};

/// `ibv_alloc_mw`
pub(in crate::shim) unsafe extern "C" fn alloc_mw(
    pd: *mut ibv_pd,
    window_type: c_int,
) -> *mut ibv_mw {
    let kind = match window_type {
        IBV_MW_TYPE_1 => WindowType::One,
        IBV_MW_TYPE_2 => WindowType::Two,
        _ => return refuse(libc::EINVAL),
    };
    let Some(parent) = objects::pd(pd) else {
        return refuse(libc::EINVAL);
    };
    let mut world = running_world();
    let domain = parent.real.load(Ordering::Acquire);
    let taken = world.taken_names();
    let made = make_window(parent.face.context, domain, window_type, taken, |name| {
        !world.is_spoken_window(name) && !windows().has_name(name)
    });
    let Some(made) = made else {
        return ptr::null_mut();
    };
    let call = Call::MemoryWindow {
        pd: parent.id,
        window_type,
    };
    let Some(id) = world.add(call) else {
        end_window(parent.face.context, made);
        return refuse(libc::EINVAL);
    };
    let face = ibv_mw {
        context: parent.face.context,
        pd,
        rkey: (*made).rkey,
        handle: (*made).handle,
        type_: window_type,
    };
    let shadow = Box::into_raw(Box::new(ShadowMw {
        face,
        id,
        real: AtomicPtr::new(made),
    }));
    windows().add(shadow.addr(), kind, (*made).rkey);
    world.objects.insert(id, Object::Mw(shadow));
    translate_all(&mut world);
    shadow.cast()
}

/// Translates all requests from now on: requests that bind a window name objects of this library.
unsafe fn translate_all(world: &mut World) {
    if world.all_translate {
        return;
    }
    world.translate();
    world.all_translate = true;
    for pair in world.queue_pairs() {
        (*pair).lane.visit().plain = false;
    }
}

/// Makes a window of the device with an `allowed` name. At most `taken` names are not allowed. Returns none and sets
/// `errno` on failure.
pub(in crate::shim) unsafe fn make_window(
    context: *mut ibv_context,
    domain: *mut ibv_pd,
    window_type: c_int,
    taken: usize,
    allowed: impl Fn(u32) -> bool,
) -> Option<*mut ibv_mw> {
    let Some(alloc) = device_context(context).and_then(|context| (*context).ops.alloc_mw) else {
        let _null: *mut ibv_mw = refuse(libc::EOPNOTSUPP);
        return None;
    };
    make_allowed(
        taken,
        || {
            let made = alloc(domain, window_type);
            (!made.is_null()).then_some(made)
        },
        |made| allowed((**made).rkey >> TAG_BITS),
        |refused| {
            end_window(context, refused);
        },
    )
}

/// Gives a window of the device back. Returns an errno value or 0.
pub(in crate::shim) unsafe fn end_window(context: *mut ibv_context, window: *mut ibv_mw) -> c_int {
    match device_context(context).and_then(|context| (*context).ops.dealloc_mw) {
        Some(dealloc) => dealloc(window),
        None => libc::EOPNOTSUPP,
    }
}

unsafe fn device_context(context: *mut ibv_context) -> Option<*mut ibv_context> {
    let shadow = objects::context(context)?;
    let device = shadow.real.load(Ordering::Acquire);
    (!device.is_null()).then_some(device)
}

/// `ibv_dealloc_mw`
pub(in crate::shim) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let Some(shadow) = objects::mw(mw) else {
        return libc::EINVAL;
    };
    let mut world = running_world();
    let result = end_window(shadow.face.context, shadow.real.load(Ordering::Acquire));
    if result == 0 {
        world.remove(shadow.id);
        forget(&mut world, mw.cast());
        drop(Box::from_raw(mw.cast::<ShadowMw>()));
    }
    result
}

/// Forgets a window that is gone, except that a partner may have its keys.
pub(in crate::shim) fn forget(world: &mut World, window: *mut ShadowMw) {
    if let Some(name) = windows().remove(window.addr()) {
        world.freed_windows.push(name);
    }
}

/// `ibv_bind_mw`, which providers also turn into a request. The window has its new key when the call returns.
pub(in crate::shim) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    wanted: *mut ibv_mw_bind,
) -> c_int {
    let refused = objects::qp(qp).is_none()
        || objects::mw(mw).is_none()
        || (*mw).type_ != IBV_MW_TYPE_1
        || (*wanted).bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0;
    if refused {
        return libc::EINVAL;
    }
    let mut request: ibv_send_wr = std::mem::zeroed();
    request.wr_id = (*wanted).wr_id;
    request.opcode = IBV_WR_BIND_MW;
    request.send_flags = (*wanted).send_flags;
    request.bind_mw = ibv_send_bind_mw {
        mw,
        rkey: next_key((*mw).rkey),
        bind_info: (*wanted).bind_info,
    };
    let result = post_send(qp, &raw mut request, &mut ptr::null_mut());
    if result == 0 {
        (*mw).rkey = request.bind_mw.rkey;
    }
    result
}

/// `ibv_inc_rkey`: the next tag.
fn next_key(key: u32) -> u32 {
    let tag = (1 << TAG_BITS) - 1;
    key & !tag | key.wrapping_add(1) & tag
}
