//! Devices, protection domains and memory regions.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::completions::close_unless;
use super::{passed, shared_receives, windows};
use crate::abi::*;
use crate::shim::data_path::{polling, posting};
use crate::shim::descriptors;
use crate::shim::moving::written;
use crate::shim::objects::context_is_ours;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{KEYS, Object, World, running_world, windows as all_windows};
use crate::tables::{Call, ObjectId, make_allowed};

/// Sets `errno` and returns a null pointer, as libibverbs does after a failure to make an object.
pub(in crate::shim) fn refuse<T>(errno: c_int) -> *mut T {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    ptr::null_mut()
}

/// Returns the operations of a shadow context.
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

/// `ibv_open_device`
pub unsafe fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut world = running_world();
    let opened = (real().open_device)(device);
    if opened.is_null() {
        return opened;
    }
    crate::control::start();
    // The application may wait at this number, so the number has to stay when the device's goes.
    let async_fd = descriptors::gathering().and_then(|number| {
        let led = descriptors::put_into(number, (*opened).async_fd);
        close_unless(number, led).map(|()| number)
    });
    let async_fd = match async_fd {
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
    // libibverbs frees a device's description with the last context and list that refer to it. The shadow refers to
    // this description for life, on any device, so the shadow keeps a list of its own.
    let mut count = 0;
    let devices = (real().get_device_list)(&raw mut count);
    let whole = Box::into_raw(Box::new(verbs_context {
        verbs: passed::offered(opened),
        abi_placeholder3: 0,
        sz: size_of::<verbs_context>(),
        context: ShadowContext {
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
        },
    }));
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
        // The kernel gives back the objects that the application left, and libibverbs allows this. The shadows stay in
        // memory, since the application may still use them.
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
    let call = Call::ProtectionDomain { context: parent.id };
    keep_pd(&mut world, context, made, call, Stays::new())
}

/// Returns a domain that does not move, with the reason in words that follow the domain's name.
pub(super) unsafe fn keep_domain(
    world: &mut World,
    context: &ShadowContext,
    made: *mut ibv_pd,
    parent: Option<ObjectId>,
    stays: &'static str,
) -> *mut ibv_pd {
    if made.is_null() {
        return made;
    }
    let face = ptr::from_ref(&context.face).cast_mut();
    let call = Call::Stays {
        parents: [Some(context.id), parent, None, None, None],
    };
    keep_pd(world, face, made, call, Stays::from(stays))
}

unsafe fn keep_pd(
    world: &mut World,
    context: *mut ibv_context,
    made: *mut ibv_pd,
    call: Call,
    stays: Stays,
) -> *mut ibv_pd {
    let Some(id) = world.add(call) else {
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
        stays,
    }));
    world.objects.insert(id, Object::Pd(shadow));
    shadow.cast()
}

/// `ibv_dealloc_pd`
pub unsafe fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    end_pd(pd, |domain| (real().dealloc_pd)(domain))
}

/// `ibv_unimport_pd`
pub(in crate::shim) unsafe fn unimport_pd(pd: *mut ibv_pd) {
    let end = |domain| {
        if let Some(unimport) = real().unimport_pd {
            unimport(domain);
        }
        0
    };
    end_pd(pd, end);
}

unsafe fn end_pd(pd: *mut ibv_pd, end: impl FnOnce(*mut ibv_pd) -> c_int) -> c_int {
    let Some(shadow) = objects::pd(pd) else {
        return end(pd);
    };
    let mut world = running_world();
    if world.roadmap.user_of(shadow.id).is_some() {
        return libc::EBUSY;
    }
    let result = end(shadow.real.load(Ordering::Acquire));
    if result == 0 {
        world.remove(shadow.id);
        drop(Box::from_raw(pd.cast::<ShadowPd>()));
    }
    result
}

/// Bits of `access` that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL_ACCESS: u32 = 0x3ff0_0000;

/// `ibv_reg_mr_iova2`, the common form of all registrations of process memory.
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
    keep_mr(
        &mut world,
        parent,
        id,
        made,
        (address, length),
        Stays::new(),
    )
}

/// Returns a region that does not move, with the reason in words that follow the region's name.
pub(super) unsafe fn keep_region(
    world: &mut World,
    parent: &ShadowPd,
    made: *mut ibv_mr,
    stays: &'static str,
) -> *mut ibv_mr {
    if made.is_null() {
        return made;
    }
    let call = Call::Stays {
        parents: [Some(parent.id), None, None, None, None],
    };
    let Some(id) = world.add(call) else {
        (real().dereg_mr)(made);
        return refuse(libc::EINVAL);
    };
    let memory = ((*made).addr, (*made).length);
    keep_mr(world, parent, id, made, memory, Stays::from(stays))
}

unsafe fn keep_mr(
    world: &mut World,
    parent: &ShadowPd,
    id: ObjectId,
    made: *mut ibv_mr,
    (addr, length): (*mut c_void, usize),
    stays: Stays,
) -> *mut ibv_mr {
    let lkey = (*made).lkey;
    if world.translates {
        KEYS.set(lkey, lkey);
    }
    let face = ibv_mr {
        context: parent.face.context,
        pd: ptr::from_ref(&parent.face).cast_mut(),
        addr,
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
        stays,
    }));
    world.objects.insert(id, Object::Mr(shadow));
    shadow.cast()
}

/// `ibv_reg_dmabuf_mr`
pub(in crate::shim) unsafe fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    let Some(register) = real().reg_dmabuf_mr else {
        return refuse(libc::EOPNOTSUPP);
    };
    let Some(parent) = objects::pd(pd) else {
        return register(pd, offset, length, iova, fd, access);
    };
    let mut world = running_world();
    let domain = parent.real.load(Ordering::Acquire);
    let made = register(domain, offset, length, iova, fd, access);
    keep_region(
        &mut world,
        parent,
        made,
        "is memory of another device (ibv_reg_dmabuf_mr)",
    )
}

/// `IBV_REREG_MR_CHANGE_TRANSLATION`
const CHANGE_TRANSLATION: c_int = 1;
/// `IBV_REREG_MR_CHANGE_PD`
const CHANGE_PD: c_int = 2;

/// `ibv_rereg_mr`. The region no longer has the arguments of its registration.
pub unsafe fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // An unused domain argument may be any pointer.
    let domain = if flags & CHANGE_PD != 0 {
        passed::domain_behind(pd)
    } else {
        ptr::null_mut()
    };
    let Some(shadow) = objects::mr(mr) else {
        return (real().rereg_mr)(mr, flags, domain, address, length, access);
    };
    let world = running_world();
    let device_region = shadow.real.load(Ordering::Acquire);
    let result = (real().rereg_mr)(device_region, flags, domain, address, length, access);
    // Set after a failure too, which may be partial.
    let _first = shadow.stays.set("was registered anew (ibv_rereg_mr)");
    if result == 0 {
        if flags & CHANGE_TRANSLATION != 0 {
            ((*mr).addr, (*mr).length) = (address, length);
        }
        if flags & CHANGE_PD != 0 {
            (*mr).pd = pd;
        }
    }
    let lkey = (*device_region).lkey;
    if world.all_translate {
        KEYS.set((*mr).lkey, lkey);
    } else if lkey != (*mr).lkey {
        KEYS.forget((*mr).lkey);
        KEYS.set(lkey, lkey);
        (*mr).lkey = lkey;
    }
    (*mr).rkey = (*device_region).rkey;
    shadow.physical_rkey.store((*mr).rkey, Ordering::Release);
    result
}

/// `ibv_import_device`: the objects of such a device belong to another process as well, so the application gets the
/// device's own.
pub(in crate::shim) unsafe fn import_device(cmd_fd: c_int) -> *mut ibv_context {
    let Some(import) = real().import_device else {
        return refuse(libc::EOPNOTSUPP);
    };
    let opened = import(cmd_fd);
    if !opened.is_null() {
        crate::control::start();
    }
    running_world().handed_out(opened, "the device of another process (ibv_import_device)")
}

/// `verbs_open_device`, by which devices' own libraries open devices for their callers. libibverbs itself calls with a
/// null `asks_for`.
pub(in crate::shim) unsafe fn open_by_library(
    device: *mut ibv_device,
    asks_for: *mut c_void,
) -> *mut ibv_context {
    let Some(open) = real().verbs_open_device else {
        return refuse(libc::EOPNOTSUPP);
    };
    let opened = open(device, asks_for);
    if asks_for.is_null() || opened.is_null() {
        return opened;
    }
    crate::control::start();
    running_world().handed_out(opened, "a device by calls of the device's own library")
}

/// `ibv_import_pd`
pub(in crate::shim) unsafe fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    let Some(import) = real().import_pd else {
        return refuse(libc::EOPNOTSUPP);
    };
    let Some(parent) = objects::context(context) else {
        return import(context, handle);
    };
    let mut world = running_world();
    let made = import(parent.real.load(Ordering::Acquire), handle);
    keep_domain(
        &mut world,
        parent,
        made,
        None,
        "was imported (ibv_import_pd)",
    )
}

/// `ibv_import_mr`
pub(in crate::shim) unsafe fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    let Some(import) = real().import_mr else {
        return refuse(libc::EOPNOTSUPP);
    };
    let Some(parent) = objects::pd(pd) else {
        return import(pd, handle);
    };
    let mut world = running_world();
    let made = import(parent.real.load(Ordering::Acquire), handle);
    keep_region(&mut world, parent, made, "was imported (ibv_import_mr)")
}

/// `ibv_import_dm`
pub(in crate::shim) unsafe fn import_dm(context: *mut ibv_context, handle: u32) -> *mut c_void {
    let Some(import) = real().import_dm else {
        return refuse(libc::EOPNOTSUPP);
    };
    let made = import(behind(context), handle);
    running_world().handed_out(made, "memory of the device (ibv_import_dm)")
}

/// Registers a region of the device with `allowed` keys. At most `taken` keys are not allowed.
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
    end_mr(mr, |region| (real().dereg_mr)(region))
}

/// `ibv_unimport_mr`
pub(in crate::shim) unsafe fn unimport_mr(mr: *mut ibv_mr) {
    let end = |region| {
        if let Some(unimport) = real().unimport_mr {
            unimport(region);
        }
        0
    };
    end_mr(mr, end);
}

unsafe fn end_mr(mr: *mut ibv_mr, end: impl FnOnce(*mut ibv_mr) -> c_int) -> c_int {
    let Some(shadow) = objects::mr(mr) else {
        return end(mr);
    };
    let mut world = running_world();
    let tracked = written::tracked(&world, shadow.id);
    let result = end(shadow.real.load(Ordering::Acquire));
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

/// Returns the device's context for a query: the one behind a shadow, or the context itself. A query waits while the
/// process moves.
pub(in crate::shim) unsafe fn behind(context: *mut ibv_context) -> *mut ibv_context {
    if !context_is_ours(context) {
        return context;
    }
    let _running = running_world();
    objects::context(context).map_or(context, |shadow| shadow.real.load(Ordering::Acquire))
}
