//! What a mover does with the process's objects: suspend, drain, release, recreate, connect, resume.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::completions::{make_cq, state, take_event, wake};
use super::doorbell;
use super::objects::{self, *};
use super::queue_pairs::{add_route, device_attributes, remove_route};
use super::real::real;
use super::world::{KEYS, Object, Phase, World, announce_running, world};
use crate::abi::*;
use crate::tables::{Call, Drain, Gid, RemoteKeys, Verdict};

/// A queue pair as the mover sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QueuePairState {
    /// The number that the application knows.
    pub number: u32,
    /// The number that the device knows.
    pub physical: u32,
    /// `IBV_QPS_*`
    pub state: i32,
    /// Whether it is a reliable connection.
    pub reliable_connection: bool,
    /// Whether a request has failed.
    pub failed: bool,
    /// The address of the port that it uses; known once it is connected.
    pub local: Option<Gid>,
    /// The port that it is connected to.
    pub remote: Option<Gid>,
    /// The number that the peer's device knows.
    pub remote_physical: Option<u32>,
    /// Two-sided requests posted (n_sent).
    pub sent: u32,
    /// Receives completed (n_recv).
    pub received: u32,
    /// Receives that wait for data.
    pub receives_outstanding: usize,
    /// Requests that are kept back.
    pub kept: usize,
}

/// Why this process cannot move, in words for its operator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Obstacle {
    /// One sentence.
    pub what: String,
}

/// Where a queue pair goes on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connection {
    /// The number that the application knows.
    pub number: u32,
    /// The peer's port.
    pub remote: Gid,
    /// The number that the peer's device knows.
    pub remote_physical: u32,
    /// The peer's remote keys: what applications know, and what its device knows. Absent: as before.
    pub remote_keys: Option<Vec<(u32, u32)>>,
}

/// What came of recreation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recreated {
    /// The process's remote keys: what applications know, and what the device knows.
    pub remote_keys: Vec<(u32, u32)>,
    /// Its queue pairs.
    pub queue_pairs: Vec<QueuePairState>,
}

/// The transition that set the peer, with the mask bit for it.
fn last_with(transitions: &[Transition], bit: c_int) -> Option<&ibv_qp_attr> {
    transitions
        .iter()
        .rev()
        .find(|step| step.mask & bit != 0)
        .map(|step| &step.attributes)
}

unsafe fn describe(pair: &ShadowQp) -> QueuePairState {
    let lane = pair.lane.lock();
    let transitions = pair
        .transitions
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let route = last_with(&transitions, IBV_QP_AV);
    let local = route.and_then(|attributes| {
        let context = objects::context(pair.face.context)?
            .real
            .load(Ordering::Acquire);
        let mut gid = ibv_gid::default();
        let index = c_int::from(attributes.ah_attr.grh.sgid_index);
        let asked = !context.is_null()
            && (real().query_gid)(context, attributes.ah_attr.port_num, index, &raw mut gid) == 0;
        asked.then_some(Gid(gid.raw))
    });
    let device = (!lane.real.is_null())
        .then(|| device_peer(lane.real))
        .flatten();
    QueuePairState {
        number: pair.face.qp_num,
        physical: pair.physical.load(Ordering::Acquire),
        state: pair.face.state.load(Ordering::Relaxed),
        reliable_connection: pair.face.qp_type == IBV_QPT_RC,
        failed: pair.failed.load(Ordering::Acquire),
        local,
        remote: device.map(|(gid, _)| gid),
        remote_physical: device.map(|(_, number)| number),
        sent: lane.sent,
        received: pair.receives.completed(),
        receives_outstanding: pair.receives.outstanding().len(),
        kept: lane.kept.len(),
    }
}

/// Where the device's queue pair is connected to.
unsafe fn device_peer(pair: *mut ibv_qp) -> Option<(Gid, u32)> {
    let (mut attributes, mut init) = (
        ibv_qp_attr::default(),
        std::mem::zeroed::<ibv_qp_init_attr>(),
    );
    let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN;
    let asked = (real().query_qp)(pair, &raw mut attributes, mask, &raw mut init) == 0;
    let connected = asked && attributes.qp_state >= IBV_QPS_RTR;
    connected.then_some((Gid(attributes.ah_attr.grh.dgid.raw), attributes.dest_qp_num))
}

/// The process's queue pairs.
pub fn queue_pairs() -> Vec<QueuePairState> {
    let world = world();
    // SAFETY: objects live while the world is locked.
    world
        .queue_pairs()
        .map(|pair| unsafe { describe(&*pair) })
        .collect()
}

/// What this version cannot move.
pub fn obstacles() -> Vec<Obstacle> {
    let world = world();
    let mut found = Vec::new();
    for pair in world.queue_pairs() {
        // SAFETY: as above.
        let pair = unsafe { &*pair };
        if pair.face.qp_type != IBV_QPT_RC {
            let number = pair.face.qp_num;
            found.push(Obstacle {
                what: format!("queue pair {number} is no reliable connection; only those can move"),
            });
        }
        if pair.failed.load(Ordering::Acquire) {
            let number = pair.face.qp_num;
            found.push(Obstacle {
                what: format!(
                    "queue pair {number} has a failed request; its connection is broken already"
                ),
            });
        }
    }
    if world
        .objects
        .values()
        .any(|object| matches!(object, Object::Ah(_)))
    {
        found.push(Obstacle {
            what: "the process has address handles; datagrams cannot move".to_owned(),
        });
    }
    found
}

unsafe fn chosen<'a>(world: &World, only: Option<&[u32]>) -> Vec<&'a ShadowQp> {
    let all = world.queue_pairs().map(|pair| &*pair);
    all.filter(|pair| only.is_none_or(|only| only.contains(&pair.face.qp_num)))
        .collect()
}

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

fn check(result: c_int, what: &str) -> Result<(), String> {
    if result == 0 {
        Ok(())
    } else {
        Err(format!("{what} failed with errno {result}"))
    }
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

/// Makes the device's objects again, on the device named `device` or on that of the same name.
///
/// # Errors
/// One sentence that names what the device refused.
pub fn recreate(device: Option<&str>) -> Result<Recreated, String> {
    let world = world();
    if world.phase != Phase::Released {
        return Err("this process has its objects".to_owned());
    }
    // SAFETY: objects live while the world is locked; parents come before what is made from them.
    unsafe {
        for (id, call) in world.roadmap.calls() {
            if let Some(object) = world.objects.get(&id) {
                make_again(*object, call, device)?;
            }
        }
        let regions = world.objects.values().filter_map(|object| match object {
            Object::Mr(region) => Some((
                (**region).face.rkey,
                (**region).physical_rkey.load(Ordering::Acquire),
            )),
            _ => None,
        });
        Ok(Recreated {
            remote_keys: regions.collect(),
            queue_pairs: world.queue_pairs().map(|pair| describe(&*pair)).collect(),
        })
    }
}

fn made<T>(made: *mut T, what: &str) -> Result<*mut T, String> {
    if made.is_null() {
        Err(format!(
            "{what} failed: {}",
            std::io::Error::last_os_error()
        ))
    } else {
        Ok(made)
    }
}

unsafe fn make_again(object: Object, call: &Call, device: Option<&str>) -> Result<(), String> {
    match object {
        Object::Context(context) => {
            let name = device.unwrap_or(&(*context).device_name);
            let opened = open_by_name(name)?;
            libc::dup2((*opened).async_fd, (*context).face.async_fd);
            (*context).real.store(opened, Ordering::Release);
        }
        Object::Pd(domain) => {
            let context =
                objects::context((*domain).face.context).map_or(ptr::null_mut(), behind_context);
            (*domain).real.store(
                made((real().alloc_pd)(context), "ibv_alloc_pd")?,
                Ordering::Release,
            );
        }
        Object::Mr(region) => {
            let domain = behind_pd((*region).face.pd);
            let Call::MemoryRegion { iova, access, .. } = *call else {
                return Ok(());
            };
            let (address, length) = ((*region).face.addr, (*region).face.length);
            let again = made(
                (real().reg_mr_iova2)(domain, address, length, iova, access as u32),
                "ibv_reg_mr",
            )?;
            KEYS.change((*region).face.lkey, (*again).lkey);
            (*region)
                .physical_rkey
                .store((*again).rkey, Ordering::Release);
            (*region).real.store(again, Ordering::Release);
        }
        Object::Ah(_) => return Err("address handles cannot be made again".to_owned()),
        Object::Channel(channel) => {
            let context =
                objects::context((*channel).face.context).map_or(ptr::null_mut(), behind_context);
            let again = made(
                (real().create_comp_channel)(context),
                "ibv_create_comp_channel",
            )?;
            libc::dup2((*again).fd, (*channel).face.fd);
            (*channel).real.store(again, Ordering::Release);
        }
        Object::Cq(queue) => {
            let context =
                objects::context((*queue).face.context).map_or(ptr::null_mut(), behind_context);
            let channel = objects::channel((*queue).face.channel)
                .map_or(ptr::null_mut(), |channel| {
                    channel.real.load(Ordering::Acquire)
                });
            let again = made(
                make_cq(
                    context,
                    (*queue).face.cqe,
                    queue.cast(),
                    channel,
                    (*queue).vector,
                ),
                "ibv_create_cq",
            )?;
            (*queue).lane.lock().real = again;
        }
        Object::Qp(pair) => {
            let domain = behind_pd((*pair).face.pd);
            let mut attributes = device_attributes(pair, &(*pair).init);
            let again = made(
                (real().create_qp)(domain, &raw mut attributes),
                "ibv_create_qp",
            )?;
            (*pair).physical.store((*again).qp_num, Ordering::Release);
            (*pair).lane.lock().real = again;
            for queue in [(*pair).face.send_cq, (*pair).face.recv_cq] {
                if let Some(queue) = objects::cq(queue) {
                    add_route(queue, (*again).qp_num, pair);
                }
            }
        }
    }
    Ok(())
}

fn behind_context(context: &ShadowContext) -> *mut ibv_context {
    context.real.load(Ordering::Acquire)
}

unsafe fn behind_pd(domain: *mut ibv_pd) -> *mut ibv_pd {
    objects::pd(domain).map_or(ptr::null_mut(), |domain| {
        domain.real.load(Ordering::Acquire)
    })
}

unsafe fn open_by_name(name: &str) -> Result<*mut ibv_context, String> {
    let mut count = 0;
    let list = (real().get_device_list)(&raw mut count);
    if list.is_null() {
        return Err("this host has no RDMA device".to_owned());
    }
    let found = (0..count as usize)
        .map(|place| *list.add(place))
        .find(|device| {
            std::ffi::CStr::from_ptr((real().get_device_name)(*device)).to_bytes()
                == name.as_bytes()
        });
    let opened = found.map(|device| (real().open_device)(device));
    (real().free_device_list)(list);
    match opened {
        None => Err(format!("this host has no RDMA device {name}")),
        Some(context) => made(context, "ibv_open_device"),
    }
}

/// Connects queue pairs to where their peers are now: those that were made again, and those whose peer
/// has moved. Receives that wait for data are posted again, with what is kept still kept.
///
/// # Errors
/// One sentence that names the queue pair and what the device refused.
pub fn connect(connections: &[Connection]) -> Result<(), String> {
    let world = world();
    for connection in connections {
        // SAFETY: objects live while the world is locked.
        unsafe {
            let pairs = chosen(&world, Some(&[connection.number]));
            let pair = pairs
                .first()
                .ok_or_else(|| format!("there is no queue pair {}", connection.number))?;
            connect_one(pair, connection)
                .map_err(|error| format!("queue pair {}: {error}", connection.number))?;
        }
    }
    Ok(())
}

unsafe fn connect_one(pair: &ShadowQp, connection: &Connection) -> Result<(), String> {
    let mut lane = pair.lane.lock();
    if !lane.suspended || lane.real.is_null() {
        return Err("it is not suspended, or has no object of the device".to_owned());
    }
    let mut reset = ibv_qp_attr {
        qp_state: IBV_QPS_RESET,
        ..Default::default()
    };
    check(
        (real().modify_qp)(lane.real, &raw mut reset, IBV_QP_STATE),
        "its reset",
    )?;
    let transitions = pair
        .transitions
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    for step in transitions {
        let mut attributes = step.attributes;
        if step.mask & IBV_QP_DEST_QPN != 0 {
            attributes.dest_qp_num = connection.remote_physical;
        }
        if step.mask & IBV_QP_AV != 0 {
            attributes.ah_attr.grh.dgid = ibv_gid {
                raw: connection.remote.0,
            };
        }
        let to = attributes.qp_state;
        check(
            (real().modify_qp)(lane.real, &raw mut attributes, step.mask),
            &format!("its change to state {to}"),
        )?;
        if step.mask & IBV_QP_STATE != 0 && to == IBV_QPS_INIT {
            // Before the peer can send anything.
            post_again(pair, &mut lane)?;
        }
    }
    pair.failed.store(false, Ordering::Release);
    pair.marker_done.store(true, Ordering::Release);
    if let Some(pairs) = &connection.remote_keys {
        lane.remote_keys = RemoteKeys::new(pairs.clone());
    }
    Ok(())
}

unsafe fn post_again(pair: &ShadowQp, lane: &mut QpLane) -> Result<(), String> {
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

/// Lets the application work again: of the queue pairs that are named, or of all.
///
/// # Errors
/// One sentence that names the queue pair whose requests the device refused.
pub fn resume(only: Option<&[u32]>) -> Result<(), String> {
    let mut world = world();
    // SAFETY: objects live while the world is locked.
    unsafe {
        let pairs = chosen(&world, only);
        for pair in &pairs {
            let mut lane = pair.lane.lock();
            if lane.real.is_null() {
                return Err(format!(
                    "queue pair {} has no object of the device",
                    pair.face.qp_num
                ));
            }
            let number = pair.face.qp_num;
            lane.send_kept().map_err(|errno| {
                format!(
                    "queue pair {number}: a request that was kept back failed with errno {errno}"
                )
            })?;
            lane.suspended = false;
        }
        // A queue goes on when none of its queue pairs is suspended.
        let held: Vec<_> = world
            .queue_pairs()
            .filter(|pair| (**pair).lane.lock().suspended)
            .flat_map(|pair| [(*pair).face.send_cq, (*pair).face.recv_cq])
            .collect();
        for queue in world.completion_queues() {
            let mut lane = (*queue).lane.lock();
            if lane.real.is_null() || held.contains(&queue.cast()) {
                continue;
            }
            lane.suspended = false;
            if lane.armed != Armed::No {
                (lane.notify)(lane.real, c_int::from(lane.armed == Armed::Solicited));
                // What completed before the new queue was armed is told of now.
                lane.drain(&*queue);
            }
        }
        for channel in world.channels() {
            state(&*channel).parked = false;
            wake(&*channel);
        }
    }
    if only.is_none() {
        world.phase = Phase::Running;
        announce_running();
    }
    Ok(())
}
