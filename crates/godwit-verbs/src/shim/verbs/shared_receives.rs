//! Shared receive queues.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::contexts::refuse;
use crate::abi::*;
use crate::shim::data_path::gate::Gate;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{KEYS, Object, World, running_world};
use crate::tables::{Call, SharedReceives};

/// `IBV_SRQ_MAX_WR`
const MAX_WR: c_int = 1;
/// `IBV_SRQ_LIMIT`
const LIMIT: c_int = 2;

/// `ibv_create_srq`
pub unsafe fn create_srq(pd: *mut ibv_pd, wanted: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    let Some(parent) = objects::pd(pd) else {
        return (real().create_srq)(pd, wanted);
    };
    let mut world = running_world();
    let shadow = uninit();
    let mut asked = *wanted;
    let made = make_srq(
        parent.real.load(Ordering::Acquire),
        shadow.cast(),
        &mut asked,
    );
    (*wanted).attr = asked.attr;
    let call = Call::SharedReceiveQueue { pd: parent.id };
    keep(
        &mut world,
        shadow,
        parent,
        made,
        *wanted,
        call,
        Stays::new(),
    )
}

/// Makes a queue that does not move. `make` makes the device's queue with this cookie and may change the attributes
/// that the application gets.
pub(super) unsafe fn create_as_is(
    world: &mut World,
    parent: &ShadowPd,
    wanted: *mut ibv_srq_init_attr,
    make: impl FnOnce(*mut c_void) -> *mut ibv_srq,
) -> *mut ibv_srq {
    let shadow = uninit();
    let cookie = objects::as_cookie(shadow.cast::<ShadowSrq>());
    let made = make(cookie);
    if !made.is_null() {
        (*made).srq_context = cookie;
    }
    let call = Call::Stays {
        parents: [Some(parent.id), None, None, None, None],
    };
    let stays = Stays::from("is of a kind of its own (ibv_create_srq_ex)");
    keep(world, shadow, parent, made, *wanted, call, stays)
}

/// Allocates memory for a shadow, whose address the device's queue carries.
fn uninit() -> *mut MaybeUninit<ShadowSrq> {
    Box::into_raw(Box::<ShadowSrq>::new_uninit())
}

/// Puts a shadow in front of the device's queue, if `made` is one.
unsafe fn keep(
    world: &mut World,
    room: *mut MaybeUninit<ShadowSrq>,
    parent: &ShadowPd,
    made: *mut ibv_srq,
    init: ibv_srq_init_attr,
    call: Call,
    stays: Stays,
) -> *mut ibv_srq {
    let shadow = room.cast::<ShadowSrq>();
    let give_up = |errno| {
        if !made.is_null() {
            (real().destroy_srq)(made);
        }
        drop(Box::from_raw(room));
        refuse(errno)
    };
    if made.is_null() {
        return give_up(*libc::__errno_location());
    }
    let Some(post) = (*(*made).context).ops.post_srq_recv else {
        return give_up(libc::EOPNOTSUPP);
    };
    let Some(id) = world.add(call) else {
        return give_up(libc::EINVAL);
    };
    shadow.write(ShadowSrq {
        face: ibv_srq {
            context: parent.face.context,
            srq_context: init.srq_context,
            pd: ptr::from_ref(&parent.face).cast_mut(),
            handle: (*made).handle,
            mutex: [0; 5],
            cond: [0; 6],
            events_completed: 0,
        },
        id,
        stays,
        init,
        limit: AtomicU32::new(0),
        receives: SharedReceives::new(init.attr.max_wr, init.attr.max_sge),
        made_ahead: AtomicPtr::new(ptr::null_mut()),
        lane: Gate::new(SrqLane {
            real: made,
            post,
            plain: !world.all_translate,
            pieces: Box::new([ibv_sge::default(); BATCH_PIECES]),
        }),
    });
    world.objects.insert(id, Object::Srq(shadow));
    shadow.cast()
}

/// Returns the device's queue.
pub(super) unsafe fn behind(srq: *mut ibv_srq) -> *mut ibv_srq {
    objects::srq(srq).map_or(srq, |shadow| shadow.lane.lock().real)
}

/// Makes a queue of the device that carries the shadow's address; null on failure.
pub(in crate::shim) unsafe fn make_srq(
    domain: *mut ibv_pd,
    shadow: *const ShadowSrq,
    attributes: &mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    attributes.srq_context = objects::as_cookie(shadow);
    (real().create_srq)(domain, attributes)
}

/// `ibv_modify_srq`
pub unsafe fn modify_srq(srq: *mut ibv_srq, to: *mut ibv_srq_attr, mask: c_int) -> c_int {
    let Some(shadow) = objects::srq(srq) else {
        return (real().modify_srq)(srq, to, mask);
    };
    let _world = running_world();
    let device_queue = shadow.lane.lock().real;
    let result = (real().modify_srq)(device_queue, to, mask);
    if result == 0 && mask & MAX_WR != 0 {
        // The queue may hold more receives than can be recorded from now on.
        let _first = shadow.stays.set("was resized (ibv_modify_srq)");
    }
    if result == 0 && mask & LIMIT != 0 {
        shadow.limit.store((*to).srq_limit, Ordering::Relaxed);
    }
    result
}

/// `ibv_query_srq`
pub unsafe fn query_srq(srq: *mut ibv_srq, into: *mut ibv_srq_attr) -> c_int {
    let Some(shadow) = objects::srq(srq) else {
        return (real().query_srq)(srq, into);
    };
    let _world = running_world();
    let device_queue = shadow.lane.lock().real;
    (real().query_srq)(device_queue, into)
}

/// `ibv_destroy_srq`
pub unsafe fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    let Some(shadow) = objects::srq(srq) else {
        return (real().destroy_srq)(srq);
    };
    let mut world = running_world();
    if world.roadmap.user_of(shadow.id).is_some() {
        return libc::EBUSY;
    }
    let device_queue = shadow.lane.lock().real;
    let result = (real().destroy_srq)(device_queue);
    if result == 0 {
        world.remove(shadow.id);
        drop(Box::from_raw(srq.cast::<ShadowSrq>()));
    }
    result
}

/// `ibv_post_srq_recv`
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let shadow = &*srq.cast::<ShadowSrq>();
    match shadow.lane.enter() {
        Some(mut lane) => shadow.post(&mut lane, first, bad),
        None => {
            let mut lane = shadow.lane.lock();
            let result = shadow.post(&mut lane, first, bad);
            lane.own();
            result
        }
    }
}

impl ShadowSrq {
    /// Records receives, and posts them to the device if there is one.
    unsafe fn post(
        &self,
        lane: &mut SrqLane,
        first: *mut ibv_recv_wr,
        bad: *mut *mut ibv_recv_wr,
    ) -> c_int {
        let mut next = first;
        while !next.is_null() {
            let request = &*next;
            let result = self.post_one(lane, request);
            if result != 0 {
                *bad = next;
                return result;
            }
            next = request.next;
        }
        0
    }

    unsafe fn post_one(&self, lane: &mut SrqLane, request: &ibv_recv_wr) -> c_int {
        let pieces = match usize::try_from(request.num_sge) {
            Ok(count) if count > 0 => std::slice::from_raw_parts(request.sg_list, count),
            _ => &[],
        };
        if self.stays.get().is_some() {
            return lane.give(request.wr_id, pieces);
        }
        if pieces.len() > self.init.attr.max_sge as usize {
            return libc::EINVAL;
        }
        if lane.real.is_null() && self.receives.waiting() >= self.init.attr.max_wr as usize {
            return libc::ENOMEM;
        }
        let Some(name) = self.receives.push(request.wr_id, pieces) else {
            return libc::ENOMEM;
        };
        let result = lane.give(name, pieces);
        if result != 0 {
            self.receives.complete(name);
        }
        result
    }

    /// Posts the outstanding receives to a new queue of the device.
    pub(in crate::shim) unsafe fn post_again(&self, lane: &mut SrqLane) -> Result<(), c_int> {
        for (name, receive) in self.receives.outstanding() {
            let result = lane.give(name, &receive.sges);
            if result != 0 {
                return Err(result);
            }
        }
        let mut to = ibv_srq_attr {
            srq_limit: self.limit.load(Ordering::Relaxed),
            ..Default::default()
        };
        if to.srq_limit == 0 {
            return Ok(());
        }
        match (real().modify_srq)(lane.real, &raw mut to, LIMIT) {
            0 => Ok(()),
            errno => Err(errno),
        }
    }
}

impl SrqLane {
    /// Posts one receive under the device's name, with the device's keys.
    unsafe fn give(&mut self, name: u64, pieces: &[ibv_sge]) -> c_int {
        if self.real.is_null() {
            return 0;
        }
        let count = pieces.len().min(BATCH_PIECES);
        for (piece, copy) in pieces.iter().zip(self.pieces.iter_mut()) {
            *copy = *piece;
            if !self.plain {
                copy.lkey = KEYS.physical(piece.lkey);
            }
        }
        let mut request = ibv_recv_wr {
            wr_id: name,
            next: ptr::null_mut(),
            sg_list: self.pieces.as_mut_ptr(),
            num_sge: count as c_int,
        };
        let mut refused = ptr::null_mut();
        (self.post)(self.real, &raw mut request, &raw mut refused)
    }
}

/// Returns the shadow that the device's queue carries. Clears the limit if the limit was reached.
pub(in crate::shim) unsafe fn of_event(queue: *mut c_void, limit_reached: bool) -> *mut c_void {
    let shadow = (*queue.cast::<ibv_srq>()).srq_context;
    if limit_reached {
        (*shadow.cast::<ShadowSrq>())
            .limit
            .store(0, Ordering::Relaxed);
    }
    shadow
}
