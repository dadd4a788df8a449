//! Wait-before-stop, and giving the device's objects back.

use super::places;
use super::preparing::{abandon_one, tidy_one};
use super::{ENDED_INSIDE, QueuePairState, check, chosen, describe, missing, obstacles_of, resume};
use crate::abi::*;
use crate::shim::data_path::gate::a_thread_ended_inside;
use crate::shim::descriptors;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::verbs::completions::{Event, add_event, lead, state, take_event};
use crate::shim::verbs::datagrams;
use crate::shim::verbs::queue_pairs::remove_route;
use crate::shim::verbs::windows::end_window;
use crate::shim::world::{Object, Phase, world};
use crate::tables::{Drain, Verdict};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

/// Keeps back new requests of the named queue pairs or of all, puts a marker behind the posted requests, and begins to
/// drain the completion queues.
///
/// # Errors
/// One sentence if a marker cannot be posted. Then no queue pair is suspended.
pub fn suspend(only: Option<&[u32]>) -> Result<Vec<QueuePairState>, String> {
    let mut world = world();
    if world.phase != Phase::Running {
        return Err("this process is being moved already".to_owned());
    }
    if only.is_none()
        && let Some(first) = obstacles_of(&world).first()
    {
        return Err(first.what.clone());
    }
    // SAFETY: objects live while the world is locked; the requests are built here.
    unsafe {
        let pairs = chosen(&world, only);
        if let Some(missing) = missing(&pairs, only.unwrap_or(&[])) {
            return Err(format!("there is no queue pair {missing}"));
        }
        if a_thread_ended_inside() {
            return Err(ENDED_INSIDE.to_owned());
        }
        if let Some(pair) = pairs
            .iter()
            .find(|pair| pair.was_reset.load(Ordering::Acquire))
        {
            return Err(format!(
                "queue pair {} was reset by the application; what its queues held is not known",
                pair.face.qp_num
            ));
        }
        if let Some((pair, why)) = pairs
            .iter()
            .find_map(|pair| pair.stays.get().map(|why| (pair, why)))
        {
            return Err(format!("queue pair {} {why}", pair.face.qp_num));
        }
        if let Some(pair) = pairs.iter().find(|pair| pair.lane.visit().suspended) {
            // The other move would take the queue pair for empty once this move resumes it.
            return Err(format!(
                "queue pair {} is suspended already",
                pair.face.qp_num
            ));
        }
        for pair in &pairs {
            for queue in [pair.face.send_cq, pair.face.recv_cq] {
                if let Some(queue) = objects::cq(queue) {
                    queue.lane.visit().suspended = true;
                }
            }
            let mut lane = pair.lane.visit();
            lane.suspended = true;
            lane.empty = false;
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
        // A marker of an earlier attempt is still in the queue and cannot be told from a new one.
        return Err(libc::EBUSY);
    }
    if pair.face.state.load(Ordering::Relaxed) != IBV_QPS_RTS {
        return Ok(());
    }
    let Some(queue) = objects::cq(pair.face.send_cq) else {
        return Err(libc::EINVAL);
    };
    queue.lane.visit().markers += 1;
    pair.marker_done.store(false, Ordering::Release);
    let mut lane = pair.lane.visit();
    let posted = if lane.datagrams {
        datagrams::post_marker(pair, &mut lane)
    } else {
        let mut marker: ibv_send_wr = std::mem::zeroed();
        marker.wr_id = MARKER;
        marker.opcode = IBV_WR_RDMA_WRITE;
        marker.send_flags = IBV_SEND_SIGNALED;
        lane.give(&mut marker).map(|()| true)
    };
    drop(lane);
    if posted != Ok(true) {
        queue.lane.visit().markers -= 1;
        pair.marker_done.store(true, Ordering::Release);
    }
    posted.map(drop)
}

/// Waits until nothing of the suspended queue pairs is in flight. `peer_sent` has the number of requests that each peer
/// posted, by the application's number of the queue pair.
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
                let mut lane = (*queue).lane.visit();
                if lane.suspended {
                    lane.drain(&*queue);
                }
            }
        }
        // SAFETY: as above.
        let pairs = unsafe { chosen(&world, None) };
        let named: Vec<u32> = peer_sent.keys().copied().collect();
        let suspended: Vec<_> = pairs
            .into_iter()
            .filter(|pair| pair.lane.visit().suspended)
            .collect();
        if let Some(number) = missing(&suspended, &named) {
            return Err(format!("queue pair {number} is not suspended"));
        }
        for pair in suspended {
            let verdict = Drain {
                // A queue pair that only receives has requests in flight as well.
                connected: pair.face.state.load(Ordering::Relaxed) >= IBV_QPS_RTR,
                marker_done: pair.marker_done.load(Ordering::Acquire),
                failed: pair.failed.load(Ordering::Acquire),
                received: pair.receives.completed(),
                // A datagram in flight may be lost.
                peer_sent: if pair.face.qp_type == IBV_QPT_UD {
                    Some(pair.receives.completed())
                } else {
                    peer_sent.get(&pair.face.qp_num).copied()
                },
                waited: began.elapsed(),
                bound,
            }
            .verdict();
            match verdict {
                Verdict::Empty => pair.lane.visit().empty = true,
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

/// Gives the device's objects back. The process then holds no RDMA objects and can be dumped.
///
/// # Errors
/// One sentence if the process is not suspended, or the device refuses.
pub fn release() -> Result<(), String> {
    let mut world = world();
    if world.phase != Phase::Suspended {
        return Err("this process is not suspended".to_owned());
    }
    let mut ports = places::Ports::default();
    // SAFETY: objects live while the world is locked.
    for pair in unsafe { chosen(&world, None) } {
        // SAFETY: as above.
        unsafe {
            abandon_one(pair);
            tidy_one(pair)?;
        }
        if !pair.lane.visit().empty {
            return Err(format!(
                "queue pair {} has not been waited for",
                pair.face.qp_num
            ));
        }
        // SAFETY: as above.
        unsafe { places::note(pair, &mut ports) };
    }
    let mut objects: Vec<Object> = world
        .roadmap
        .calls()
        .rev()
        .filter_map(|(id, _)| world.objects.get(&id).copied())
        .collect();
    // A bound window uses its region and its queue pair, in any order of creation.
    objects.sort_by_key(|object| !matches!(object, Object::Mw(_)));
    // SAFETY: objects live while the world is locked, and nobody is inside a suspended queue.
    unsafe {
        // A failure below leaves some objects, and recreation makes the others again.
        world.phase = Phase::Released;
        for channel in world.channels() {
            park(&*channel)?;
        }
        // Drained while every completion still finds its queue pair.
        for queue in world.completion_queues() {
            (*queue).lane.visit().drain(&*queue);
        }
        for object in objects {
            give_back(object)?;
        }
    }
    Ok(())
}

/// Detaches the device's channel from the descriptor at which the application waits.
unsafe fn park(channel: &ShadowChannel) -> Result<(), String> {
    let mut waiting = state(channel);
    let mut told = Vec::new();
    // A process with a queue of the device's own does not move.
    while let Some(Event::Shadow(queue)) = take_event(channel) {
        add_event(channel, &mut waiting, queue);
        told.push(queue);
    }
    let parted = lead(channel, &mut waiting, None);
    // A thread that drains a queue holds the queue and waits for the channel, so the channel is let go first.
    drop(waiting);
    for queue in told {
        (*queue).lane.visit().armed = Armed::No;
    }
    parted.map_err(|error| format!("the descriptor for events of completions: {error}"))
}

unsafe fn give_back(object: Object) -> Result<(), String> {
    /// An object that the device refuses to take back stays in its place.
    unsafe fn take<T>(
        place: &AtomicPtr<T>,
        end: unsafe extern "C" fn(*mut T) -> c_int,
        what: &str,
    ) -> Result<(), String> {
        check(end(place.load(Ordering::Acquire)), what)?;
        place.store(ptr::null_mut(), Ordering::Release);
        Ok(())
    }
    match object {
        object if object.is_released() => Ok(()),
        Object::Qp(pair) => {
            datagrams::end_marker(&*pair);
            {
                let mut lane = (*pair).lane.visit();
                check((real().destroy_qp)(lane.real), "ibv_destroy_qp")?;
                lane.real = ptr::null_mut();
                (*pair).made_ahead.store(ptr::null_mut(), Ordering::Release);
            }
            for queue in [(*pair).face.send_cq, (*pair).face.recv_cq] {
                if let Some(queue) = objects::cq(queue) {
                    // Senders of datagrams are not held: some datagrams may have arrived until the queue pair's end.
                    queue.lane.visit().drain(queue);
                    remove_route(queue, pair);
                }
            }
            Ok(())
        }
        Object::Srq(queue) => {
            let mut lane = (*queue).lane.visit();
            check((real().destroy_srq)(lane.real), "ibv_destroy_srq")?;
            lane.real = ptr::null_mut();
            (*queue)
                .made_ahead
                .store(ptr::null_mut(), Ordering::Release);
            Ok(())
        }
        Object::Cq(queue) => {
            let mut lane = (*queue).lane.visit();
            lane.drain(&*queue);
            lane.markers = 0;
            lane.suspended = true;
            check((real().destroy_cq)(lane.real), "ibv_destroy_cq")?;
            lane.real = ptr::null_mut();
            (*queue)
                .made_ahead
                .store(ptr::null_mut(), Ordering::Release);
            Ok(())
        }
        Object::Mr(region) => take(&(*region).real, real().dereg_mr, "ibv_dereg_mr"),
        Object::Mw(window) => {
            let device_window = (*window).real.load(Ordering::Acquire);
            check(
                end_window((*window).face.context, device_window),
                "ibv_dealloc_mw",
            )?;
            (*window).real.store(ptr::null_mut(), Ordering::Release);
            Ok(())
        }
        Object::Ah(handle) => datagrams::give_back(&*handle)
            .map_err(|errno| format!("ibv_destroy_ah failed with errno {errno}")),
        Object::Pd(domain) => take(&(*domain).real, real().dealloc_pd, "ibv_dealloc_pd"),
        Object::Channel(channel) => {
            take(
                &(*channel).real,
                real().destroy_comp_channel,
                "ibv_destroy_comp_channel",
            )?;
            (*channel).made_ahead.store(false, Ordering::Release);
            Ok(())
        }
        Object::Context(context) => {
            // The application may wait at this number; no event comes meanwhile.
            let device = (*(*context).real.load(Ordering::Acquire)).async_fd;
            descriptors::take_out_of((*context).face.async_fd, device)
                .map_err(|error| format!("the descriptor for events of the device: {error}"))?;
            let taken = take(&(*context).real, real().close_device, "ibv_close_device");
            if taken.is_err() {
                // The device stays, and its events are announced again.
                let _untold = descriptors::put_into((*context).face.async_fd, device);
            }
            taken
        }
    }
}
