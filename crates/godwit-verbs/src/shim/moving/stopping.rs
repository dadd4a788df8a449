//! Wait-before-stop, and giving the device's objects back.

use super::{QueuePairState, check, chosen, describe, resume};
use crate::abi::*;
use crate::shim::completions::{state, take_event, wake};
use crate::shim::doorbell;
use crate::shim::objects::{self, *};
use crate::shim::queue_pairs::remove_route;
use crate::shim::real::real;
use crate::shim::world::{Object, Phase, world};
use crate::tables::{Drain, Verdict};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

/// Keeps back new requests of the queue pairs that are named, or of all, puts a marker behind what
/// was posted, and begins to drain their completion queues.
///
/// # Errors
/// One sentence if a marker cannot be posted; nothing is suspended then.
pub fn suspend(only: Option<&[u32]>) -> Result<Vec<QueuePairState>, String> {
    let mut world = world();
    if world.phase != Phase::Running {
        return Err("this process is being moved already".to_owned());
    }
    // SAFETY: objects live while the world is locked; the requests are built here.
    unsafe {
        let pairs = chosen(&world, only);
        for pair in &pairs {
            for queue in [pair.face.send_cq, pair.face.recv_cq] {
                if let Some(queue) = objects::cq(queue) {
                    queue.lane.lock().suspended = true;
                }
            }
            pair.lane.lock().suspended = true;
        }
        for pair in &pairs {
            if let Err(errno) = post_marker(pair) {
                let number = pair.face.qp_num;
                drop(world);
                resume(only)?;
                return Err(format!(
                    "queue pair {number} took no marker (errno {errno}): its send queue is full, or an earlier attempt is not over"
                ));
            }
        }
        if only.is_none() {
            world.phase = Phase::Suspended;
        }
        Ok(pairs.into_iter().map(|pair| describe(pair)).collect())
    }
}

unsafe fn post_marker(pair: &ShadowQp) -> Result<(), c_int> {
    if !pair.marker_done.load(Ordering::Acquire) {
        // One of an earlier attempt is still in the queue, and cannot be told from another.
        return Err(libc::EBUSY);
    }
    if pair.face.state.load(Ordering::Relaxed) != IBV_QPS_RTS || pair.face.qp_type != IBV_QPT_RC {
        return Ok(());
    }
    let Some(queue) = objects::cq(pair.face.send_cq) else {
        return Err(libc::EINVAL);
    };
    queue.lane.lock().markers += 1;
    pair.marker_done.store(false, Ordering::Release);
    let lane = pair.lane.lock();
    let mut marker: ibv_send_wr = std::mem::zeroed();
    marker.wr_id = MARKER;
    marker.opcode = IBV_WR_RDMA_WRITE;
    marker.send_flags = IBV_SEND_SIGNALED;
    let mut bad = ptr::null_mut();
    let mut result = (lane.post_send)(lane.real, &raw mut marker, &raw mut bad);
    if result == libc::EACCES && bad.is_null() {
        result = doorbell::ring(lane.real);
    }
    drop(lane);
    if result != 0 {
        queue.lane.lock().markers -= 1;
        pair.marker_done.store(true, Ordering::Release);
        return Err(result);
    }
    Ok(())
}

/// Waits until nothing of the suspended queue pairs is in flight. `peer_sent` says for each, by the
/// number that the application knows, what its peer posted.
///
/// # Errors
/// One sentence that names the queue pairs that did not become empty within `bound`.
pub fn drain(peer_sent: &BTreeMap<u32, u32>, bound: Duration) -> Result<Duration, String> {
    let began = Instant::now();
    loop {
        let world = world();
        let (mut waiting, mut late, mut failed) = (0, Vec::new(), Vec::new());
        for queue in world.completion_queues() {
            // SAFETY: objects live while the world is locked.
            unsafe {
                let mut lane = (*queue).lane.lock();
                if lane.suspended {
                    lane.drain(&*queue);
                }
            }
        }
        for pair in world.queue_pairs() {
            // SAFETY: as above.
            let pair = unsafe { &*pair };
            if !pair.lane.lock().suspended {
                continue;
            }
            let verdict = Drain {
                connected: pair.face.state.load(Ordering::Relaxed) == IBV_QPS_RTS,
                marker_done: pair.marker_done.load(Ordering::Acquire),
                failed: pair.failed.load(Ordering::Acquire),
                received: pair.receives.completed(),
                peer_sent: peer_sent.get(&pair.face.qp_num).copied(),
                waited: began.elapsed(),
                bound,
            }
            .verdict();
            match verdict {
                Verdict::Empty => {}
                Verdict::Wait => waiting += 1,
                Verdict::TimedOut => late.push(pair.face.qp_num),
                Verdict::Failed => failed.push(pair.face.qp_num),
            }
        }
        drop(world);
        if !failed.is_empty() {
            return Err(format!("requests failed on the queue pairs {failed:?}"));
        }
        if !late.is_empty() {
            return Err(format!(
                "after {} ms requests are in flight on the queue pairs {late:?}",
                bound.as_millis()
            ));
        }
        if waiting == 0 {
            return Ok(began.elapsed());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Gives the device's objects back. The process then holds nothing of RDMA and can be dumped.
///
/// # Errors
/// One sentence if the process is not suspended, or the device refuses.
pub fn release() -> Result<(), String> {
    let mut world = world();
    if world.phase != Phase::Suspended {
        return Err("this process is not suspended".to_owned());
    }
    let objects: Vec<Object> = world
        .roadmap
        .calls()
        .rev()
        .filter_map(|(id, _)| world.objects.get(&id).copied())
        .collect();
    // SAFETY: objects live while the world is locked, and nobody is inside a suspended queue.
    unsafe {
        for channel in world.channels() {
            park(&*channel);
        }
        for object in objects {
            give_back(object)?;
        }
    }
    world.phase = Phase::Released;
    Ok(())
}

/// Takes the device's channel away from those who wait for its events.
unsafe fn park(channel: &ShadowChannel) {
    let mut waiting = state(channel);
    waiting.parked = true;
    while waiting.polling > 0 {
        wake(channel);
        let (again, _) = channel
            .changed
            .wait_timeout(waiting, Duration::from_millis(10))
            .unwrap_or_else(PoisonError::into_inner);
        waiting = again;
    }
    while let Some(queue) = take_event(channel) {
        waiting.events.push_back(queue as usize);
        (*queue).lane.lock().armed = Armed::No;
    }
    libc::dup2(channel.wake, channel.face.fd);
}

unsafe fn give_back(object: Object) -> Result<(), String> {
    fn take<T>(place: &AtomicPtr<T>) -> *mut T {
        place.swap(ptr::null_mut(), Ordering::AcqRel)
    }
    match object {
        Object::Qp(pair) => {
            for queue in [(*pair).face.send_cq, (*pair).face.recv_cq] {
                if let Some(queue) = objects::cq(queue) {
                    remove_route(queue, pair);
                }
            }
            let mut lane = (*pair).lane.lock();
            let behind = std::mem::replace(&mut lane.real, ptr::null_mut());
            check((real().destroy_qp)(behind), "ibv_destroy_qp")
        }
        Object::Cq(queue) => {
            let mut lane = (*queue).lane.lock();
            lane.drain(&*queue);
            lane.markers = 0;
            lane.suspended = true;
            let behind = std::mem::replace(&mut lane.real, ptr::null_mut());
            check((real().destroy_cq)(behind), "ibv_destroy_cq")
        }
        Object::Mr(region) => check((real().dereg_mr)(take(&(*region).real)), "ibv_dereg_mr"),
        Object::Ah(handle) => check((real().destroy_ah)(take(&(*handle).real)), "ibv_destroy_ah"),
        Object::Pd(domain) => check((real().dealloc_pd)(take(&(*domain).real)), "ibv_dealloc_pd"),
        Object::Channel(channel) => check(
            (real().destroy_comp_channel)(take(&(*channel).real)),
            "ibv_destroy_comp_channel",
        ),
        Object::Context(context) => {
            // The application may wait on this number; it is an event that never comes meanwhile.
            let placeholder = libc::eventfd(0, libc::EFD_CLOEXEC);
            libc::dup2(placeholder, (*context).face.async_fd);
            libc::close(placeholder);
            check(
                (real().close_device)(take(&(*context).real)),
                "ibv_close_device",
            )
        }
    }
}
