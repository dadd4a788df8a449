//! Queue pairs: made, changed, queried, destroyed.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::contexts::refuse;
use super::{datagrams, extended};
use crate::abi::*;
use crate::shim::data_path::gate::Gate;
use crate::shim::data_path::lists::RequestList;
use crate::shim::moving::{abandon_one, tidy_one};
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{Object, World, running_world, windows};
use crate::tables::{Call, ReceiveQueue, RemoteKeys, make_allowed};

/// Permits remote writes to the queue pair. A marker is a write of no bytes, which a queue pair that forbids writes
/// would answer with an error. The memory regions still decide about real writes.
const ACCESS_REMOTE_WRITE: u32 = 2;
const QP_ACCESS_FLAGS: c_int = 1 << 3;

/// Returns the arguments for the device, with the device's queues.
pub(super) unsafe fn device_attributes(
    cookie: *mut c_void,
    wanted: &ibv_qp_init_attr,
) -> ibv_qp_init_attr {
    let mut attributes = *wanted;
    attributes.qp_context = cookie;
    attributes.send_cq =
        objects::cq(wanted.send_cq).map_or(wanted.send_cq, |queue| queue.lane.visit().real);
    attributes.recv_cq =
        objects::cq(wanted.recv_cq).map_or(wanted.recv_cq, |queue| queue.lane.visit().real);
    attributes.srq = objects::srq(wanted.srq).map_or(wanted.srq, |queue| queue.lane.visit().real);
    attributes
}

/// Makes a queue pair of the device with a number that is not in use; null if there is none. The queue pair has an
/// extra entry for a marker if the device allows. Also returns the granted attributes, without this entry.
pub(in crate::shim) unsafe fn make_pair(
    domain: *mut ibv_pd,
    shadow: *const ShadowQp,
    wanted: &ibv_qp_init_attr,
    world: &World,
) -> (*mut ibv_qp, ibv_qp_init_attr) {
    let asked = device_attributes(objects::as_cookie(shadow), wanted);
    let mut attributes = asked;
    let made = make_allowed(
        world.queue_pairs().count(),
        || {
            attributes = asked;
            attributes.cap.max_send_wr = asked.cap.max_send_wr.saturating_add(1);
            let mut made = (real().create_qp)(domain, &raw mut attributes);
            if made.is_null() {
                attributes = asked;
                made = (real().create_qp)(domain, &raw mut attributes);
            } else {
                attributes.cap.max_send_wr = attributes.cap.max_send_wr.saturating_sub(1);
            }
            (!made.is_null()).then_some(made)
        },
        |made| world.allows_number((**made).qp_num, shadow),
        |refused| {
            (real().destroy_qp)(refused);
        },
    );
    (made.unwrap_or(ptr::null_mut()), attributes)
}

/// `ibv_create_qp`
pub unsafe fn create_qp(pd: *mut ibv_pd, wanted: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    create(pd, wanted, None)
}

/// Returns true if the queue pair can be made again: no object of the device was handed out.
pub(super) unsafe fn all_are_shadows(wanted: *const ibv_qp_init_attr) -> bool {
    let attributes = &*wanted;
    objects::cq(attributes.send_cq).is_some()
        && objects::cq(attributes.recv_cq).is_some()
        && (attributes.srq.is_null() || objects::srq(attributes.srq).is_some())
}

/// Makes a queue pair, with these calls to build requests, if any.
pub(super) unsafe fn create(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
    calls: Option<ibv_qp_ex_wr>,
) -> *mut ibv_qp {
    let Some(parent) = objects::pd(pd) else {
        return (real().create_qp)(pd, wanted);
    };
    if !all_are_shadows(wanted) {
        return create_as_is(parent.face.context, pd, &mut *wanted, |_, cookie| {
            let mut asked = device_attributes(cookie, &*wanted);
            let made = (real().create_qp)(parent.real.load(Ordering::Acquire), &raw mut asked);
            (*wanted).cap = asked.cap;
            made
        });
    }
    let mut world = running_world();
    let shadow = uninit();
    let domain = parent.real.load(Ordering::Acquire);
    let (made, attributes) = make_pair(domain, shadow.cast(), &*wanted, &world);
    let list = calls.as_ref().map(|_| RequestList::new(&attributes.cap));
    if !made.is_null() && matches!(list, Some(None)) {
        (real().destroy_qp)(made);
        drop(Box::from_raw(shadow));
        return refuse(libc::ENOMEM);
    }
    (*wanted).cap = attributes.cap;
    let mut init = *wanted;
    if !made.is_null() && init.srq.is_null() {
        init.cap.max_recv_wr = most_receives(made, &init.cap);
    }
    let parts = Parts {
        context: parent.face.context,
        pd,
        init,
        calls,
        list: list.flatten(),
        stays: Stays::new(),
    };
    keep(&mut world, shadow, made, parts)
}

/// Returns the capacity for receives of the device's queue pair. Some devices have more room than requested and tell
/// only in a later query.
unsafe fn most_receives(made: *mut ibv_qp, told: &ibv_qp_cap) -> u32 {
    let mut attributes: ibv_qp_attr = std::mem::zeroed();
    let mut init: ibv_qp_init_attr = std::mem::zeroed();
    let asked = (real().query_qp)(made, &raw mut attributes, IBV_QP_CAP, &raw mut init);
    match asked {
        0 => attributes.cap.max_recv_wr.max(told.max_recv_wr),
        _ => told.max_recv_wr,
    }
}

/// Makes a queue pair that works as without this library and does not move. `make` makes the device's queue pair in
/// this context of the device, with this cookie, and may change the attributes that the application gets.
pub(super) unsafe fn create_as_is(
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
    make: impl FnOnce(*mut ibv_context, *mut c_void) -> *mut ibv_qp,
) -> *mut ibv_qp {
    let Some(parent) = objects::context(context) else {
        return refuse(libc::EINVAL);
    };
    let mut world = running_world();
    let shadow = uninit();
    let made = make(
        parent.real.load(Ordering::Acquire),
        objects::as_cookie(shadow.cast::<ShadowQp>()),
    );
    let parts = Parts {
        context,
        pd,
        init: *wanted,
        calls: None,
        list: None,
        stays: Stays::from("was made with what does not move"),
    };
    keep(&mut world, shadow, made, parts)
}

/// Allocates memory for a shadow, whose address the device's queue pair carries.
fn uninit() -> *mut MaybeUninit<ShadowQp> {
    Box::into_raw(Box::<ShadowQp>::new_uninit())
}

/// The parts of a shadow beside the device's queue pair.
struct Parts {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    init: ibv_qp_init_attr,
    calls: Option<ibv_qp_ex_wr>,
    list: Option<RequestList>,
    stays: Stays,
}

/// Puts a shadow in front of the device's queue pair, if `made` is one.
unsafe fn keep(
    world: &mut World,
    room: *mut MaybeUninit<ShadowQp>,
    made: *mut ibv_qp,
    parts: Parts,
) -> *mut ibv_qp {
    let shadow = room.cast::<ShadowQp>();
    let give_up = |errno| {
        if !made.is_null() {
            (real().destroy_qp)(made);
        }
        drop(Box::from_raw(room));
        refuse(errno)
    };
    if made.is_null() {
        return give_up(*libc::__errno_location());
    }
    let Parts { pd, init, .. } = parts;
    let queues = [init.send_cq, init.recv_cq].map(|queue| objects::cq(queue));
    let stays = parts.stays.get().is_some();
    let (domain, srq) = (objects::pd(pd), objects::srq(init.srq));
    let call = match (domain, queues) {
        (Some(domain), [Some(send_cq), Some(recv_cq)]) if !stays => Call::QueuePair {
            pd: domain.id,
            send_cq: send_cq.id,
            recv_cq: recv_cq.id,
            srq: srq.map(|queue| queue.id),
            transport: init.qp_type,
        },
        _ => Call::Stays {
            parents: [
                objects::context(parts.context).map(|context| context.id),
                domain.map(|domain| domain.id),
                queues[0].map(|queue| queue.id),
                queues[1].map(|queue| queue.id),
                srq.map(|queue| queue.id),
            ],
        },
    };
    let operations = &(*(*made).context).ops;
    let (Some(post_send), Some(post_recv)) = (operations.post_send, operations.post_recv) else {
        return give_up(libc::EOPNOTSUPP);
    };
    let Some(id) = world.add(call) else {
        return give_up(libc::EINVAL);
    };
    let datagrams = init.qp_type == IBV_QPT_UD;
    if (datagrams || stays) && !world.translates {
        // Its requests are copied because of their handles, so all of their keys are translated.
        world.translate();
    }
    let number = (*made).qp_num;
    let noted = if stays { 0 } else { init.cap.max_recv_wr };
    shadow.write(ShadowQp {
        face: ibv_qp {
            context: parts.context,
            qp_context: init.qp_context,
            pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            handle: (*made).handle,
            qp_num: number,
            state: AtomicI32::new((*made).state.load(Ordering::Relaxed)),
            qp_type: init.qp_type,
            mutex: [0; 5],
            cond: [0; 6],
            events_completed: 0,
        },
        wr: UnsafeCell::new(parts.calls.unwrap_or_default()),
        list: parts.list,
        id,
        stays: parts.stays,
        with_calls: AtomicUsize::new(0),
        init,
        physical: AtomicU32::new(number),
        receives: ReceiveQueue::new(noted, init.cap.max_recv_sge),
        failed: AtomicBool::new(false),
        was_reset: AtomicBool::new(false),
        marker_done: AtomicBool::new(true),
        marker_route: AtomicPtr::new(ptr::null_mut()),
        places: Mutex::new(Vec::new()),
        transitions: Mutex::new(Vec::new()),
        made_ahead: AtomicPtr::new(ptr::null_mut()),
        lane: Gate::new(QpLane {
            id,
            real: made,
            post_send,
            post_recv,
            datagrams,
            plain: !datagrams && !stays && !world.all_translate,
            notes: !stays,
            suspended: false,
            empty: false,
            kept: VecDeque::new(),
            remote_keys: RemoteKeys::default(),
            prepared: None,
            retired: Vec::new(),
            sent: 0,
            // SAFETY: integers, null pointers and a union of both.
            sends: Box::new([std::mem::zeroed(); BATCH_REQUESTS]),
            recvs: Box::new([std::mem::zeroed(); BATCH_REQUESTS]),
            pieces: Box::new([ibv_sge::default(); BATCH_PIECES]),
        }),
    });
    // Completions of a queue pair that stays already have the application's numbers.
    for queue in queues.into_iter().flatten().filter(|_| !stays) {
        add_route(queue, number, shadow);
    }
    world.objects.insert(id, Object::Qp(shadow));
    shadow.cast()
}

/// Returns the device's queue pair, for calls that involve no other object.
pub(in crate::shim) unsafe fn behind(qp: *mut ibv_qp) -> *mut ibv_qp {
    objects::qp(qp).map_or(qp, |shadow| shadow.lane.lock().real)
}

/// `ibv_attach_mcast`
pub unsafe fn attach_mcast(qp: *mut ibv_qp, group: *const ibv_gid, lid: u16) -> c_int {
    let result = (real().attach_mcast)(behind(qp), group, lid);
    stays_if(
        qp,
        result,
        "has been in a multicast group (ibv_attach_mcast)",
    )
}

/// `ibv_query_ece`
pub unsafe fn query_ece(qp: *mut ibv_qp, options: *mut c_void) -> c_int {
    let query = real().query_ece;
    query.map_or(libc::EOPNOTSUPP, |query| query(behind(qp), options))
}

/// `ibv_set_ece`
pub(in crate::shim) unsafe fn set_ece(qp: *mut ibv_qp, options: *mut c_void) -> c_int {
    let set = real().set_ece;
    let result = set.map_or(libc::EOPNOTSUPP, |set| set(behind(qp), options));
    stays_if(
        qp,
        result,
        "has options of its device's maker (ibv_set_ece)",
    )
}

/// `ibv_query_qp_data_in_order`
pub(in crate::shim) unsafe fn query_data_in_order(
    qp: *mut ibv_qp,
    opcode: c_int,
    flags: u32,
) -> c_int {
    let query = real().query_qp_data_in_order;
    query.map_or(0, |query| query(behind(qp), opcode, flags))
}

/// Marks the queue pair as staying after a successful change; `result` is an errno value or 0.
unsafe fn stays_if(qp: *mut ibv_qp, result: c_int, why: &'static str) -> c_int {
    if result == 0
        && let Some(shadow) = objects::qp(qp)
    {
        let _first = shadow.stays.set(why);
    }
    result
}

/// Routes completions of the device's queue pair `number` to this shadow.
pub(in crate::shim) fn add_route(queue: &ShadowCq, number: u32, shadow: *const ShadowQp) {
    let mut lane = queue.lane.visit();
    match lane.routes.binary_search_by_key(&number, |route| route.0) {
        Ok(place) => lane.routes[place].1 = shadow,
        Err(place) => lane.routes.insert(place, (number, shadow)),
    }
    lane.last = (number, shadow);
}

/// Removes all routes of the queue pair.
pub(in crate::shim) fn remove_route(queue: &ShadowCq, shadow: *const ShadowQp) {
    let mut lane = queue.lane.lock();
    lane.routes.retain(|route| !ptr::eq(route.1, shadow));
    lane.last = (0, ptr::null());
}

/// Removes the route of one of the device's queue pairs behind `shadow`.
pub(in crate::shim) unsafe fn forget_route(queue: &ShadowCq, number: u32, shadow: *const ShadowQp) {
    let mut lane = queue.lane.visit();
    // Earlier completions still belong to the application.
    lane.drain(queue);
    lane.routes
        .retain(|route| route.0 != number || !ptr::eq(route.1, shadow));
    lane.last = (0, ptr::null());
}

/// `ibv_destroy_qp`
pub unsafe fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    let Some(shadow) = objects::qp(qp) else {
        return (real().destroy_qp)(qp);
    };
    let mut world = running_world();
    abandon_one(shadow);
    if tidy_one(shadow).is_err() {
        return libc::EBUSY;
    }
    let result = {
        // Until the routes are gone, a thread that polls a completion queue may post kept requests.
        let mut lane = shadow.lane.lock();
        let result = (real().destroy_qp)(lane.real);
        if result == 0 {
            lane.real = ptr::null_mut();
        }
        result
    };
    if result == 0 {
        for queue in [shadow.face.send_cq, shadow.face.recv_cq] {
            if let Some(queue) = objects::cq(queue) {
                // Earlier completions still belong to the application, under the application's names.
                queue.lane.lock().drain(queue);
                remove_route(queue, shadow);
            }
        }
        datagrams::end_marker(shadow);
        extended::forget(shadow);
        windows().pair_ended(shadow.id, shadow.failed.load(Ordering::Acquire));
        world.remove(shadow.id);
        drop(Box::from_raw(qp.cast::<ShadowQp>()));
    }
    result
}

/// `ibv_modify_qp`
pub unsafe fn modify_qp(qp: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let Some(shadow) = objects::qp(qp) else {
        return (real().modify_qp)(qp, attributes, mask);
    };
    let _world = running_world();
    let mut asked = *attributes;
    let connects = mask & IBV_QP_STATE != 0 && matches!(asked.qp_state, IBV_QPS_INIT | IBV_QPS_RTR);
    if connects && shadow.physical.load(Ordering::Acquire) != shadow.face.qp_num {
        // Partners would look for the number that the application knows, which here belongs to another process or to
        // none.
        return libc::EOPNOTSUPP;
    }
    let adds_write = mask & QP_ACCESS_FLAGS != 0
        && shadow.face.qp_type == IBV_QPT_RC
        && shadow.stays.get().is_none()
        && asked.qp_access_flags & ACCESS_REMOTE_WRITE == 0;
    if adds_write {
        asked.qp_access_flags |= ACCESS_REMOTE_WRITE;
    }
    let device_pair = shadow.lane.lock().real;
    let result = (real().modify_qp)(device_pair, &raw mut asked, mask);
    if result == 0 {
        // The prepared queue pair was made for the former state.
        abandon_one(shadow);
        let mut transitions = shadow
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let before = shadow.face.state.load(Ordering::Relaxed);
        let stays = mask & IBV_QP_STATE == 0 || asked.qp_state == before;
        if mask & IBV_QP_STATE != 0 {
            shadow.face.state.store(asked.qp_state, Ordering::Relaxed);
            if asked.qp_state == IBV_QPS_RESET {
                // Earlier transitions do not lead to the present state.
                transitions.clear();
                shadow.was_reset.store(true, Ordering::Release);
                // The next partner's keys need no translation.
                shadow.lane.lock().remote_keys = RemoteKeys::default();
            }
        }
        if shadow.face.state.load(Ordering::Relaxed) != IBV_QPS_RESET {
            // This transition supersedes an equal earlier one. An application may repeat such changes endlessly.
            transitions.retain(|step| !(stays && step.stays && step.mask == mask));
            transitions.push(Transition {
                attributes: asked,
                mask,
                stays,
                adds_write,
            });
        }
    }
    result
}

/// `ibv_query_qp`
pub unsafe fn query_qp(
    qp: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let Some(shadow) = objects::qp(qp) else {
        return (real().query_qp)(qp, attributes, mask, init);
    };
    let _world = running_world();
    let device_pair = shadow.lane.lock().real;
    let result = (real().query_qp)(device_pair, attributes, mask, init);
    if result == 0 {
        *init = shadow.init;
        if shadow.stays.get().is_none() {
            (*attributes).cap = shadow.init.cap;
        }
        // The number that the application connected to, regardless of the peer's present place.
        let transitions = shadow
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let last = |bit| transitions.iter().rev().find(|step| step.mask & bit != 0);
        if let Some(to) = last(IBV_QP_DEST_QPN) {
            (*attributes).dest_qp_num = to.attributes.dest_qp_num;
        }
        if last(QP_ACCESS_FLAGS).is_some_and(|step| step.adds_write) {
            (*attributes).qp_access_flags &= !ACCESS_REMOTE_WRITE;
        }
    }
    result
}
