//! Polling: no lock of this library, no allocation, no system call for the thread that owns the queue.

use std::ffi::c_int;
use std::hint::cold_path;
use std::ptr;
use std::sync::atomic::Ordering;

use super::windows;
use crate::abi::*;
use crate::shim::objects::{self, *};
use crate::shim::verbs::completions;

/// `ibv_poll_cq`
pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    let shadow = &*cq.cast::<ShadowCq>();
    match shadow.lane.enter() {
        Some(mut lane) => lane.poll(most, into),
        None => poll_slowly(shadow, most, into),
    }
}

#[cold]
unsafe extern "C" fn poll_slowly(shadow: &ShadowCq, most: c_int, into: *mut ibv_wc) -> c_int {
    let mut lane = shadow.lane.lock();
    if !lane.suspended && !lane.backlog && lane.drained.is_empty() && lane.markers == 0 {
        let result = lane.poll(most, into);
        lane.own();
        return result;
    }
    lane.drain(shadow);
    if lane.backlog && !lane.suspended {
        lane.send_backlog(shadow);
    }
    let mut count = 0;
    while count < most {
        let Some(completion) = lane.drained.pop_front() else {
            break;
        };
        into.add(count as usize).write(completion);
        count += 1;
    }
    count
}

impl CqLane {
    /// Polls the device.
    #[inline]
    unsafe fn poll(&mut self, most: c_int, into: *mut ibv_wc) -> c_int {
        let count = (self.poll)(self.real, most, into);
        for place in 0..count {
            self.settle(&mut *into.add(place as usize));
        }
        count
    }

    /// Counts a completion and translates its queue pair's number to the application's.
    #[inline]
    unsafe fn settle(&mut self, completion: &mut ibv_wc) -> *const ShadowQp {
        if self.last.0 != completion.qp_num {
            self.last = self.route(completion.qp_num);
        }
        if self.last.1.is_null() {
            cold_path();
            return ptr::null();
        }
        let shadow = &*self.last.1;
        if !shadow.face.srq.is_null()
            && let Some(queue) = objects::srq(shadow.face.srq)
            && (completion.status != IBV_WC_SUCCESS || completion.opcode & IBV_WC_RECV != 0)
            && let Some(wr_id) = queue.receives.complete(completion.wr_id)
        {
            completion.wr_id = wr_id;
        }
        if completion.status != IBV_WC_SUCCESS {
            cold_path();
            shadow.failed.store(true, Ordering::Release);
        } else if completion.opcode & IBV_WC_RECV != 0 {
            shadow.receives.complete_one();
            if completion.wc_flags & WITH_INV_OF_ANY_DEVICE != 0 {
                windows::may_be_invalidated(completion, shadow);
            }
        }
        completion.qp_num = shadow.face.qp_num;
        shadow
    }

    /// Returns the queue pair with the device's number `number`, if any.
    #[inline(never)]
    fn route(&self, number: u32) -> (u32, *const ShadowQp) {
        let found = self.routes.binary_search_by_key(&number, |route| route.0);
        found.map_or((number, ptr::null()), |place| self.routes[place])
    }

    /// Posts kept requests of the queue pairs whose sends complete here, as far as there is room.
    unsafe fn send_backlog(&mut self, queue: &ShadowCq) {
        self.backlog = false;
        for (_, pair) in &self.routes {
            // No deadlock: a thread that holds a queue pair never waits for a completion queue.
            if !std::ptr::eq((**pair).face.send_cq.cast(), queue) {
                continue;
            }
            let mut lane = (**pair).lane.lock();
            if lane.suspended || lane.real.is_null() {
                continue;
            }
            let _still_full = lane.send_kept();
            self.backlog |= !lane.kept.is_empty();
        }
    }

    /// Takes completions for the application, and the shim's markers. Announces an event on the application's channel
    /// if the queue is armed.
    pub(in crate::shim) unsafe fn drain(&mut self, queue: &ShadowCq) {
        if self.real.is_null() {
            return;
        }
        let mut completions = [ibv_wc::default(); 32];
        loop {
            let count = (self.poll)(
                self.real,
                completions.len() as c_int,
                completions.as_mut_ptr(),
            );
            if count <= 0 {
                return;
            }
            for completion in &mut completions[..count as usize] {
                let is_marker = completion.wr_id == MARKER && self.markers > 0;
                let succeeded = completion.status == IBV_WC_SUCCESS;
                let pair = self.settle(completion);
                if is_marker {
                    self.markers -= 1;
                    if !pair.is_null() && succeeded {
                        (*pair).marker_done.store(true, Ordering::Release);
                    }
                    continue;
                }
                self.drained.push_back(*completion);
                if self.armed != Armed::No {
                    self.armed = Armed::No;
                    if let Some(channel) = objects::channel(queue.face.channel) {
                        completions::tell(channel, queue);
                    }
                }
            }
        }
    }
}

/// `ibv_req_notify_cq`
pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited: c_int) -> c_int {
    let shadow = &*cq.cast::<ShadowCq>();
    let armed = if solicited != 0 {
        Armed::Solicited
    } else {
        Armed::Any
    };
    let arm = |lane: &mut CqLane| {
        lane.armed = armed;
        if lane.real.is_null() {
            0
        } else {
            (lane.notify)(lane.real, solicited)
        }
    };
    match shadow.lane.enter() {
        Some(mut lane) => arm(&mut lane),
        None => arm(&mut shadow.lane.lock()),
    }
}
