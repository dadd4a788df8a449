//! Connecting queue pairs, and resuming the application.

use super::{Connection, check, chosen, windows};
use crate::abi::*;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::verbs::completions::{lead, state};
use crate::shim::world::{Phase, World, announce_running, world};
use crate::tables::{RemoteKey, RemoteKeys};
use std::ffi::c_int;
use std::ptr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Connects queue pairs to the present addresses of their peers: queue pairs that were made again, or whose peer has
/// moved. Receives that wait for data are posted again. Kept requests stay kept.
///
/// # Errors
/// One sentence that names the queue pair and the call that the device refused. Earlier queue pairs are connected, with
/// their memory windows bound.
pub fn connect(connections: &[Connection]) -> Result<(), String> {
    let mut world = world();
    let keys_moved = |connection: &Connection| {
        let keys = connection.remote_keys.as_deref().unwrap_or(&[]);
        keys.iter().any(RemoteKey::differs)
    };
    if connections.iter().any(keys_moved) && !world.translates {
        // Requests of this process are translated from now on, which needs all local keys.
        world.translate();
    }
    let mut connected = Vec::new();
    let mut result = Ok(());
    for connection in connections {
        // SAFETY: objects live while the world is locked.
        match unsafe { connect_named(&world, connection) } {
            Ok(pair) => connected.push(pair),
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    // SAFETY: as above.
    let bound = unsafe { windows::bind_again(&world, &connected) };
    result.and(bound)
}

unsafe fn connect_named<'a>(
    world: &World,
    connection: &Connection,
) -> Result<&'a ShadowQp, String> {
    let pairs = chosen(world, Some(&[connection.number]));
    let pair = *pairs
        .first()
        .ok_or_else(|| format!("there is no queue pair {}", connection.number))?;
    connect_one(world, pair, connection)
        .map_err(|error| format!("queue pair {}: {error}", connection.number))?;
    Ok(pair)
}

unsafe fn connect_one(
    world: &World,
    pair: &ShadowQp,
    connection: &Connection,
) -> Result<(), String> {
    let lane = pair.lane.visit();
    if !lane.suspended || lane.real.is_null() {
        return Err("it is not suspended, or has no object of the device".to_owned());
    }
    if !lane.empty {
        // A reset would lose the requests in flight.
        return Err("it has not been waited for".to_owned());
    }
    drop(lane);
    if pair.failed.load(Ordering::Acquire) {
        // A request of the shim failed at an earlier attempt: the device takes no other request until the queue pair is
        // reset.
        restart(pair, Some(connection))?;
        windows::unbind(world, pair)?;
    } else {
        windows::unbind(world, pair)?;
        restart(pair, Some(connection))?;
    }
    if let Some(keys) = &connection.remote_keys {
        take_keys(&mut pair.lane.visit(), keys);
    }
    Ok(())
}

/// Takes the device's queue pair from reset to the application's state, with its receives.
pub(super) unsafe fn restart(
    pair: &ShadowQp,
    connection: Option<&Connection>,
) -> Result<(), String> {
    let mut lane = pair.lane.visit();
    let mut reset = ibv_qp_attr {
        qp_state: IBV_QPS_RESET,
        ..Default::default()
    };
    check(
        (real().modify_qp)(lane.real, &raw mut reset, IBV_QP_STATE),
        "its reset",
    )?;
    let steps: Vec<_> = {
        let transitions = pair
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let steps = transitions.iter();
        steps.map(|step| (step.mask, step.attributes)).collect()
    };
    // Receives are posted before the peer can send anything.
    let device_pair = lane.real;
    walk(device_pair, &steps, connection, || {
        post_again(pair, &mut lane)
    })?;
    pair.failed.store(false, Ordering::Release);
    pair.marker_done.store(true, Ordering::Release);
    Ok(())
}

/// Replaces the peer's remote keys.
pub(super) fn take_keys(lane: &mut QpLane, keys: &[RemoteKey]) {
    lane.remote_keys = RemoteKeys::new(keys);
    lane.plain &= lane.remote_keys.is_empty();
}

/// Takes the device's queue pair through the application's changes of state, connecting to the peer's present place.
/// `ready` is called in the state INIT.
pub(in crate::shim) unsafe fn walk(
    device_pair: *mut ibv_qp,
    steps: &[(c_int, ibv_qp_attr)],
    connection: Option<&Connection>,
    mut ready: impl FnMut() -> Result<(), String>,
) -> Result<(), String> {
    for (mask, attributes) in steps {
        let mut attributes = *attributes;
        if let Some(connection) = connection {
            if mask & IBV_QP_DEST_QPN != 0 {
                attributes.dest_qp_num = connection.remote_physical;
            }
            if mask & IBV_QP_AV != 0 {
                attributes.ah_attr.grh.dgid = ibv_gid {
                    raw: connection.remote.0,
                };
            }
        }
        let to = attributes.qp_state;
        check(
            (real().modify_qp)(device_pair, &raw mut attributes, *mask),
            &format!("its change to state {to}"),
        )?;
        if mask & IBV_QP_STATE != 0 && to == IBV_QPS_INIT {
            ready()?;
        }
    }
    Ok(())
}

pub(super) unsafe fn post_again(pair: &ShadowQp, lane: &mut QpLane) -> Result<(), String> {
    if !pair.face.srq.is_null() {
        // The receives of a shared queue were posted when the queue was made.
        return Ok(());
    }
    for mut receive in pair.receives.outstanding() {
        let mut request = ibv_recv_wr {
            wr_id: receive.wr_id,
            next: ptr::null_mut(),
            sg_list: receive.sges.as_mut_ptr(),
            num_sge: receive.sges.len() as c_int,
        };
        let mut bad = ptr::null_mut();
        check(
            lane.receive(None, &raw mut request, &raw mut bad),
            "a receive that was posted before",
        )?;
    }
    Ok(())
}

/// Lets the application work again, on the named queue pairs or on all.
///
/// # Errors
/// One sentence that names the queue pair whose requests the device refused, or reports missing objects. While the
/// process itself moves, single queue pairs cannot resume: their requests would go to objects that the move gives back.
pub fn resume(only: Option<&[u32]>) -> Result<(), String> {
    let mut world = world();
    if world.phase == Phase::Released {
        return Err("the device's objects have not been made again".to_owned());
    }
    if only.is_some() && world.phase != Phase::Running {
        return Err("this process is being moved itself".to_owned());
    }
    let mut refused = Vec::new();
    // SAFETY: objects live while the world is locked.
    unsafe {
        for pair in &chosen(&world, only) {
            let mut lane = pair.lane.visit();
            match lane.send_kept() {
                Ok(()) => lane.suspended = false,
                // A full queue, after a cancelled move, takes the remaining requests as it empties.
                Err(errno) if errno.abs() == libc::ENOMEM => lane.suspended = false,
                // Requests that the application believes posted stay kept, and its other queue pairs resume.
                Err(errno) => refused.push(format!(
                    "queue pair {}: a request that was kept back failed with errno {errno}",
                    pair.face.qp_num
                )),
            }
            let behind = !lane.kept.is_empty();
            drop(lane);
            if let Some(queue) = objects::cq(pair.face.send_cq).filter(|_| behind) {
                queue.lane.visit().backlog = true;
            }
        }
        // A completion queue resumes once none of its queue pairs is suspended.
        let held: Vec<_> = world
            .queue_pairs()
            .filter(|pair| (**pair).lane.visit().suspended)
            .flat_map(|pair| [(*pair).face.send_cq, (*pair).face.recv_cq])
            .collect();
        for queue in world.completion_queues() {
            let mut lane = (*queue).lane.visit();
            if lane.real.is_null() || held.contains(&queue.cast()) {
                continue;
            }
            lane.suspended = false;
            if lane.armed != Armed::No {
                (lane.notify)(lane.real, c_int::from(lane.armed == Armed::Solicited));
                // Completions from before the new queue was armed are announced now.
                lane.drain(&*queue);
            }
        }
        for channel in world.channels() {
            let mut waiting = state(&*channel);
            let device_channel = (*channel).real.load(Ordering::Acquire);
            if !device_channel.is_null()
                && let Err(error) = lead(&*channel, &mut waiting, Some((*device_channel).fd))
            {
                refused.push(format!("the descriptor for events of completions: {error}"));
            }
        }
    }
    if only.is_none() {
        world.phase = Phase::Running;
        world.told = None;
        world.written = None;
        announce_running();
    }
    if refused.is_empty() {
        Ok(())
    } else {
        Err(refused.join("; "))
    }
}
