//! Queue pairs: made, changed, asked, destroyed.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use super::contexts::refuse;
use super::datagrams;
use crate::abi::*;
use crate::shim::data_path::gate::Gate;
use crate::shim::data_path::lists::RequestList;
use crate::shim::moving::{abandon_one, tidy_one};
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{Object, World, running_world, windows};
use crate::tables::{Call, ReceiveQueue, RemoteKeys, make_allowed};

/// Remote writes to the queue pair: a marker is a write of nothing, which a queue pair that forbids
/// writes would answer with an error. What may be written is up to the memory regions, as ever.
const ACCESS_REMOTE_WRITE: u32 = 2;
const QP_ACCESS_FLAGS: c_int = 1 << 3;

/// What the device is asked for: the device's completion queues, and one entry more for a marker.
unsafe fn device_attributes(
    shadow: *const ShadowQp,
    wanted: &ibv_qp_init_attr,
) -> ibv_qp_init_attr {
    let mut attributes = *wanted;
    attributes.qp_context = objects::as_cookie(shadow);
    attributes.send_cq =
        objects::cq(wanted.send_cq).map_or(wanted.send_cq, |queue| queue.lane.visit().real);
    attributes.recv_cq =
        objects::cq(wanted.recv_cq).map_or(wanted.recv_cq, |queue| queue.lane.visit().real);
    attributes.srq = objects::srq(wanted.srq).map_or(wanted.srq, |queue| queue.lane.visit().real);
    attributes.cap.max_send_wr = attributes.cap.max_send_wr.saturating_add(1);
    attributes
}

/// A queue pair of the device, whose number means no other one; null if there is none. With it, what
/// the device made of the attributes.
pub(in crate::shim) unsafe fn make_pair(
    domain: *mut ibv_pd,
    shadow: *const ShadowQp,
    wanted: &ibv_qp_init_attr,
    world: &World,
) -> (*mut ibv_qp, ibv_qp_init_attr) {
    let asked = device_attributes(shadow, wanted);
    let mut attributes = asked;
    let made = make_allowed(
        world.queue_pairs().count(),
        || {
            attributes = asked;
            let made = (real().create_qp)(domain, &raw mut attributes);
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

/// A queue pair, with these calls to put requests together if there are any.
pub(super) unsafe fn create(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
    calls: Option<ibv_qp_ex_wr>,
) -> *mut ibv_qp {
    let Some(parent) = objects::pd(pd) else {
        return (real().create_qp)(pd, wanted);
    };
    let mut world = running_world();
    let (Some(send_cq), Some(recv_cq)) = (
        objects::cq((*wanted).send_cq),
        objects::cq((*wanted).recv_cq),
    ) else {
        return refuse(libc::EINVAL);
    };
    let srq = objects::srq((*wanted).srq);
    if !(*wanted).srq.is_null() && srq.is_none() {
        return refuse(libc::EINVAL);
    }
    let shadow = Box::into_raw(Box::<ShadowQp>::new_uninit()).cast::<ShadowQp>();
    let domain = parent.real.load(Ordering::Acquire);
    let (made, attributes) = make_pair(domain, shadow, &*wanted, &world);
    let give_up = |errno| {
        if !made.is_null() {
            (real().destroy_qp)(made);
        }
        drop(Box::from_raw(
            shadow.cast::<std::mem::MaybeUninit<ShadowQp>>(),
        ));
        refuse(errno)
    };
    if made.is_null() {
        return give_up(*libc::__errno_location());
    }
    let call = Call::QueuePair {
        pd: parent.id,
        send_cq: send_cq.id,
        recv_cq: recv_cq.id,
        srq: srq.map(|queue| queue.id),
        transport: (*wanted).qp_type,
    };
    let operations = &(*(*made).context).ops;
    let (Some(post_send), Some(post_recv)) = (operations.post_send, operations.post_recv) else {
        return give_up(libc::EOPNOTSUPP);
    };
    let mut told = attributes.cap;
    told.max_send_wr = told.max_send_wr.saturating_sub(1);
    let list = calls.as_ref().map(|_| RequestList::new(&told));
    if matches!(list, Some(None)) {
        return give_up(libc::ENOMEM);
    }
    let Some(id) = world.add(call) else {
        return give_up(libc::EINVAL);
    };
    let datagrams = (*wanted).qp_type == IBV_QPT_UD;
    if datagrams && !world.translates {
        // Its requests are copied, for their handles, and so are all of their keys.
        world.translate();
    }
    (*wanted).cap = told;
    let number = (*made).qp_num;
    shadow.write(ShadowQp {
        face: ibv_qp {
            context: parent.face.context,
            qp_context: (*wanted).qp_context,
            pd,
            send_cq: (*wanted).send_cq,
            recv_cq: (*wanted).recv_cq,
            srq: (*wanted).srq,
            handle: (*made).handle,
            qp_num: number,
            state: AtomicI32::new(IBV_QPS_RESET),
            qp_type: (*wanted).qp_type,
            mutex: [0; 5],
            cond: [0; 6],
            events_completed: 0,
        },
        wr: UnsafeCell::new(calls.unwrap_or_default()),
        list: list.flatten(),
        id,
        init: *wanted,
        physical: AtomicU32::new(number),
        receives: ReceiveQueue::new(attributes.cap.max_recv_wr, attributes.cap.max_recv_sge),
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
            plain: !datagrams && !world.all_translate,
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
    for queue in [send_cq, recv_cq] {
        add_route(queue, number, shadow);
    }
    world.objects.insert(id, Object::Qp(shadow));
    shadow.cast()
}

/// From now on completions of the device's queue pair `number` are this one's.
pub(in crate::shim) fn add_route(queue: &ShadowCq, number: u32, shadow: *const ShadowQp) {
    let mut lane = queue.lane.visit();
    match lane.routes.binary_search_by_key(&number, |route| route.0) {
        Ok(place) => lane.routes[place].1 = shadow,
        Err(place) => lane.routes.insert(place, (number, shadow)),
    }
    lane.last = (number, shadow);
}

/// The queue pair's number means nothing any more.
pub(in crate::shim) fn remove_route(queue: &ShadowCq, shadow: *const ShadowQp) {
    let mut lane = queue.lane.lock();
    lane.routes.retain(|route| !ptr::eq(route.1, shadow));
    lane.last = (0, ptr::null());
}

/// The number of one of the queue pairs behind `shadow` means nothing any more.
pub(in crate::shim) unsafe fn forget_route(queue: &ShadowCq, number: u32, shadow: *const ShadowQp) {
    let mut lane = queue.lane.visit();
    // What it has completed is still the application's.
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
        // Whoever polls a completion queue of it may post what was kept back, until its routes are gone.
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
                // What it has completed is still the application's, under the names that it gave.
                queue.lane.lock().drain(queue);
                remove_route(queue, shadow);
            }
        }
        datagrams::end_marker(shadow);
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
        // Partners would look for it under the number that the application knows, which is another
        // process's here, or nobody's.
        return libc::EOPNOTSUPP;
    }
    if mask & QP_ACCESS_FLAGS != 0 && shadow.face.qp_type == IBV_QPT_RC {
        asked.qp_access_flags |= ACCESS_REMOTE_WRITE;
    }
    let device_pair = shadow.lane.lock().real;
    let result = (real().modify_qp)(device_pair, &raw mut asked, mask);
    if result == 0 {
        // What was prepared was made from what was asked for before.
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
                // Nothing that was before leads to where it is now.
                transitions.clear();
                shadow.was_reset.store(true, Ordering::Release);
                // The next partner's keys mean what they say.
                shadow.lane.lock().remote_keys = RemoteKeys::default();
            }
        }
        if shadow.face.state.load(Ordering::Relaxed) != IBV_QPS_RESET {
            // This one says all that such an earlier one said. An application may do this without end.
            transitions.retain(|step| !(stays && step.stays && step.mask == mask));
            transitions.push(Transition {
                attributes: asked,
                mask,
                stays,
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
        (*attributes).cap = shadow.init.cap;
        // The number that the application connected to, wherever its peer is now.
        let transitions = shadow
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(to) = transitions
            .iter()
            .rev()
            .find(|step| step.mask & IBV_QP_DEST_QPN != 0)
        {
            (*attributes).dest_qp_num = to.attributes.dest_qp_num;
        }
    }
    result
}
