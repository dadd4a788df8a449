//! Devices, protection domains and memory regions.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::{extended, shared_receives, windows};
use crate::abi::*;
use crate::shim::data_path::{polling, posting};
use crate::shim::descriptors;
use crate::shim::moving::written;
use crate::shim::objects::context_is_ours;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{KEYS, Object, running_world, windows as all_windows};
use crate::tables::{Call, make_allowed};

/// Sets `errno` and returns a null pointer, as libibverbs does when it cannot make an object.
pub(in crate::shim) fn refuse<T>(errno: c_int) -> *mut T {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    ptr::null_mut()
}

/// The operations of a shadow context.
fn operations() -> ibv_context_ops {
    ibv_context_ops {
        compat_control: [ptr::null_mut(); 7],
        alloc_mw: Some(windows::alloc_mw),
        bind_mw: Some(windows::bind_mw),
        dealloc_mw: Some(windows::dealloc_mw),
        compat_create_cq: ptr::null_mut(),
        poll_cq: Some(polling::poll_cq),
        req_notify_cq: Some(polling::req_notify_cq),
        compat_cq: [ptr::null_mut(); 7],
        post_srq_recv: Some(shared_receives::post_srq_recv),
        compat_qp: [ptr::null_mut(); 4],
        post_send: Some(posting::post_send),
        post_recv: Some(posting::post_recv),
        compat_rest: [ptr::null_mut(); 5],
    }
}

/// A shadow with the extended verbs before it. Of those it carries one alone: for the absent others the functions of
/// `verbs.h` fall back to what they are without them, or give `EOPNOTSUPP`.
fn with_extended_verbs(context: ShadowContext) -> verbs_context<ShadowContext> {
    verbs_context {
        before_create_qp_ex: [ptr::null_mut(); 33],
        create_qp_ex: Some(extended::create_qp_ex),
        after_create_qp_ex: [ptr::null_mut(); 4],
        abi_placeholder3: 0,
        sz: size_of::<verbs_context>(),
        context,
    }
}

/// `ibv_open_device`
pub unsafe fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut world = running_world();
    let opened = (real().open_device)(device);
    if opened.is_null() {
        return opened;
    }
    crate::control::start();
    // The application may wait on this number, so it has to stay when the device's goes.
    let async_fd = match descriptors::duplicate((*opened).async_fd) {
        Ok(number) => number,
        Err(error) => {
            (real().close_device)(opened);
            return refuse(error.raw_os_error().unwrap_or(libc::EMFILE));
        }
    };
    let Some(id) = world.add(Call::Context) else {
        libc::close(async_fd);
        (real().close_device)(opened);
        return refuse(libc::ENOMEM);
    };
    // libibverbs frees a device's description with the last context and list that name it. The shadow
    // names this one for as long as it lives, on whatever device; so it has a list of its own.
    let mut count = 0;
    let devices = (real().get_device_list)(&raw mut count);
    let whole = Box::into_raw(Box::new(with_extended_verbs(ShadowContext {
        face: ibv_context {
            device,
            ops: operations(),
            cmd_fd: (*opened).cmd_fd,
            async_fd,
            num_comp_vectors: (*opened).num_comp_vectors,
            mutex: [0; 5],
            abi_compat: VERBS_ABI_IS_EXTENDED,
        },
        id,
        real: AtomicPtr::new(opened),
        devices,
        device_name: CStr::from_ptr((real().get_device_name)(device))
            .to_string_lossy()
            .into_owned(),
    })));
    let shadow = &raw mut (*whole).context;
    world.objects.insert(id, Object::Context(shadow));
    shadow.cast()
}

/// `ibv_close_device`
pub unsafe fn close_device(context: *mut ibv_context) -> c_int {
    let Some(shadow) = objects::context(context) else {
        return (real().close_device)(context);
    };
    let mut world = running_world();
    let result = (real().close_device)(shadow.real.load(Ordering::Acquire));
    if result == 0 {
        libc::close(shadow.face.async_fd);
        // The kernel gives back what the application left in it, and libibverbs allows that. The shadows
        // stay in memory, since the application may still name them.
        for gone in world.roadmap.remove_with_users(shadow.id) {
            if let Some(Object::Mw(window)) = world.objects.remove(&gone) {
                windows::forget(&mut world, window);
            }
        }
        if !shadow.devices.is_null() {
            (real().free_device_list)(shadow.devices);
        }
        let before = std::mem::offset_of!(verbs_context<ShadowContext>, context);
        let whole = context
            .byte_sub(before)
            .cast::<verbs_context<ShadowContext>>();
        drop(Box::from_raw(whole));
    }
    result
}

/// `ibv_alloc_pd`
pub unsafe fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let Some(parent) = objects::context(context) else {
        return (real().alloc_pd)(context);
    };
    let mut world = running_world();
    let made = (real().alloc_pd)(parent.real.load(Ordering::Acquire));
    if made.is_null() {
        return made;
    }
    let Some(id) = world.add(Call::ProtectionDomain { context: parent.id }) else {
        (real().dealloc_pd)(made);
        return refuse(libc::EINVAL);
    };
    let face = ibv_pd {
        context,
        handle: (*made).handle,
    };
    let shadow = Box::into_raw(Box::new(ShadowPd {
        face,
        id,
        real: AtomicPtr::new(made),
        last_route: Mutex::new(None),
    }));
    world.objects.insert(id, Object::Pd(shadow));
    shadow.cast()
}

/// `ibv_dealloc_pd`
pub unsafe fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let Some(shadow) = objects::pd(pd) else {
        return (real().dealloc_pd)(pd);
    };
    let mut world = running_world();
    if world.roadmap.user_of(shadow.id).is_some() {
        return libc::EBUSY;
    }
    let result = (real().dealloc_pd)(shadow.real.load(Ordering::Acquire));
    if result == 0 {
        world.remove(shadow.id);
        drop(Box::from_raw(pd.cast::<ShadowPd>()));
    }
    result
}

/// Bits of `access` that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL_ACCESS: u32 = 0x3ff0_0000;

/// `ibv_reg_mr_iova2`, which all ways to register memory of the process come down to.
pub unsafe fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    let Some(parent) = objects::pd(pd) else {
        return (real().reg_mr_iova2)(pd, address, length, iova, access);
    };
    let mut world = running_world();
    let access = access & !OPTIONAL_ACCESS;
    let domain = parent.real.load(Ordering::Acquire);
    let taken = world.taken_keys();
    let Some(made) = register(domain, address, length, iova, access, taken, |made| {
        !world.is_spoken(made.rkey) && !world.known_local_keys.contains(&made.lkey)
    }) else {
        return ptr::null_mut();
    };
    let Some(id) = world.add(Call::MemoryRegion {
        pd: parent.id,
        address: address as u64,
        length: length as u64,
        iova,
        access: access as i32,
    }) else {
        (real().dereg_mr)(made);
        return refuse(libc::ENOMEM);
    };
    let lkey = (*made).lkey;
    if world.translates {
        KEYS.set(lkey, lkey);
    }
    let face = ibv_mr {
        context: parent.face.context,
        pd,
        addr: address,
        length,
        handle: (*made).handle,
        lkey,
        rkey: (*made).rkey,
    };
    let physical_rkey = AtomicU32::new((*made).rkey);
    let shadow = Box::into_raw(Box::new(ShadowMr {
        face,
        id,
        real: AtomicPtr::new(made),
        physical_rkey,
    }));
    world.objects.insert(id, Object::Mr(shadow));
    shadow.cast()
}

/// A region of the device whose keys are `allowed`, which `taken` keys are not at most.
pub(in crate::shim) unsafe fn register(
    domain: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
    taken: usize,
    allowed: impl Fn(&ibv_mr) -> bool,
) -> Option<*mut ibv_mr> {
    make_allowed(
        taken,
        || {
            let made = (real().reg_mr_iova2)(domain, address, length, iova, access);
            (!made.is_null()).then_some(made)
        },
        |made| allowed(&**made),
        |refused| {
            (real().dereg_mr)(refused);
        },
    )
}

/// `ibv_dereg_mr`
pub unsafe fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    let Some(shadow) = objects::mr(mr) else {
        return (real().dereg_mr)(mr);
    };
    let mut world = running_world();
    let tracked = written::tracked(&world, shadow.id);
    let result = (real().dereg_mr)(shadow.real.load(Ordering::Acquire));
    if result == 0 {
        if let Some(memory) = tracked {
            written::mark_given_back(&mut world, memory);
        }
        KEYS.forget(shadow.face.lkey);
        world.freed_keys.push(shadow.face.rkey);
        all_windows().region_ended(shadow.id);
        world.remove(shadow.id);
        drop(Box::from_raw(mr.cast::<ShadowMr>()));
    }
    result
}

/// The device's context for a query: the one behind a shadow, or the context itself. A query waits
/// while the process moves.
pub(in crate::shim) unsafe fn behind(context: *mut ibv_context) -> *mut ibv_context {
    if !context_is_ours(context) {
        return context;
    }
    let _running = running_world();
    objects::context(context).map_or(context, |shadow| shadow.real.load(Ordering::Acquire))
}
