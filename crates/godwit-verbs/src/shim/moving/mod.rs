//! What a mover does with the process's objects: suspend, drain, release (`stopping`), recreate
//! (`making`), connect, resume (`connecting`).

mod connecting;
mod making;
mod places;
mod preparing;
mod stopping;
mod windows;
pub(super) mod written;

pub(super) use connecting::walk;
pub use connecting::{connect, resume};
pub(super) use making::open_by_name;
pub use making::{Attached, attach, recreate};
pub(super) use places::Place;
pub use places::redirects;
pub use preparing::{PreparedPair, abandon, prepare, switch, tidy};
pub(super) use preparing::{abandon_one, tidy_one};
pub use stopping::{drain, release, suspend};
pub use written::{mark_written, track_written};

use crate::abi::*;
use crate::preflight::Need;
use crate::shim::data_path::gate::a_thread_ended_inside;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{Object, World, world};
use crate::tables::{Gid, RemoteKey};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

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
    pub remote_keys: Option<Vec<RemoteKey>>,
}

/// What came of recreation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recreated {
    /// The process's remote keys: what applications know, and what the device knows.
    pub remote_keys: Vec<RemoteKey>,
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
    let lane = pair.lane.visit();
    let local = address_used(pair).and_then(|(_, _, address)| address);
    // What a device says of the peer of one for datagrams means nothing.
    let device = (!lane.real.is_null() && pair.face.qp_type == IBV_QPT_RC)
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
        receives_outstanding: objects::srq(pair.face.srq).map_or_else(
            || pair.receives.waiting() as usize,
            |queue| queue.receives.waiting(),
        ),
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

/// What the process uses of each device.
pub fn needs() -> Vec<Need> {
    let world = world();
    let mut needs: BTreeMap<usize, Need> = BTreeMap::new();
    for object in world.objects.values() {
        if let Object::Context(context) = object {
            // SAFETY: objects live while the world is locked.
            let device = unsafe { (**context).device_name.clone() };
            needs.insert(
                context.addr(),
                Need {
                    device,
                    queue_pairs: 0,
                    regions: 0,
                    windows: 0,
                    completion_queues: 0,
                    addresses: Vec::new(),
                },
            );
        }
    }
    for object in world.objects.values() {
        // SAFETY: as above.
        unsafe {
            match *object {
                Object::Mr(region) => {
                    let need = needs.get_mut(&(*region).face.context.addr());
                    need.into_iter().for_each(|need| need.regions += 1);
                }
                Object::Mw(window) => {
                    let need = needs.get_mut(&(*window).face.context.addr());
                    need.into_iter().for_each(|need| need.windows += 1);
                }
                Object::Cq(queue) => {
                    let need = needs.get_mut(&(*queue).face.context.addr());
                    need.into_iter()
                        .for_each(|need| need.completion_queues += 1);
                }
                Object::Qp(pair) => {
                    if let Some(need) = needs.get_mut(&(*pair).face.context.addr()) {
                        need.queue_pairs += 1;
                        let used =
                            address_used(&*pair).filter(|used| !need.addresses.contains(used));
                        need.addresses.extend(used);
                    }
                }
                _ => {}
            }
        }
    }
    needs.into_values().collect()
}

/// The port, the place in its table of addresses, and the address that the queue pair uses.
unsafe fn address_used(pair: &ShadowQp) -> Option<(u8, u8, Option<Gid>)> {
    let transitions = pair
        .transitions
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let route = last_with(&transitions, IBV_QP_AV)?;
    let (port, place) = (route.ah_attr.port_num, route.ah_attr.grh.sgid_index);
    let mut gid = ibv_gid::default();
    let context = objects::context(pair.face.context)?
        .real
        .load(Ordering::Acquire);
    let asked = !context.is_null()
        && (real().query_gid)(context, port, c_int::from(place), &raw mut gid) == 0;
    Some((port, place, asked.then_some(Gid(gid.raw))))
}

/// Why a process is neither moved nor a partner of one that moves.
const ENDED_INSIDE: &str = "a thread of the application has ended in the middle of posting or polling; what its queues hold is not known";

/// What this version cannot move.
pub fn obstacles() -> Vec<Obstacle> {
    obstacles_of(&world())
}

fn obstacles_of(world: &World) -> Vec<Obstacle> {
    let mut found = Vec::new();
    if a_thread_ended_inside() {
        found.push(Obstacle {
            what: ENDED_INSIDE.to_owned(),
        });
    }
    let marks = world.marks.iter();
    found.extend(marks.map(|what| Obstacle {
        what: format!("the process has used {what}; what comes of that does not move"),
    }));
    // SAFETY: objects live while the world is locked.
    found.extend(unsafe { that_stay(world) });
    for pair in world.queue_pairs() {
        // SAFETY: as above.
        let pair = unsafe { &*pair };
        let number = pair.face.qp_num;
        if !matches!(pair.face.qp_type, IBV_QPT_RC | IBV_QPT_UD) {
            found.push(Obstacle {
                what: format!(
                    "queue pair {number} is neither a reliable connection nor for datagrams; only those can move"
                ),
            });
        }
        if pair.was_reset.load(Ordering::Acquire) {
            found.push(Obstacle {
                what: format!(
                    "queue pair {number} was reset by the application; what its queues held is not known"
                ),
            });
        } else if !matches!(
            pair.face.state.load(Ordering::Relaxed),
            IBV_QPS_RTR | IBV_QPS_RTS
        ) {
            found.push(Obstacle {
                what: format!(
                    "queue pair {number} is not connected; its partner could not find it after a move"
                ),
            });
        }
        if pair.failed.load(Ordering::Acquire) {
            found.push(Obstacle {
                what: format!(
                    "queue pair {number} has a failed request; its connection is broken already"
                ),
            });
        }
    }
    // SAFETY: objects live while the world is locked.
    let of_windows = unsafe { windows::obstacles(world) };
    found.extend(of_windows.into_iter().map(|what| Obstacle { what }));
    found
}

/// Objects that do not move, for what they are or what was done to them.
unsafe fn that_stay(world: &World) -> Vec<Obstacle> {
    let of = |object: &Object| -> Option<String> {
        let (name, stays) = match *object {
            Object::Pd(domain) => ("a protection domain".to_owned(), &(*domain).stays),
            Object::Mr(region) => (
                format!("the memory region with key {}", (*region).face.lkey),
                &(*region).stays,
            ),
            Object::Srq(queue) => ("a shared receive queue".to_owned(), &(*queue).stays),
            Object::Qp(pair) => (
                format!("queue pair {}", (*pair).face.qp_num),
                &(*pair).stays,
            ),
            _ => return None,
        };
        stays
            .get()
            .map(|why| format!("{name} {why}; that does not move"))
    };
    let found = world.objects.values().filter_map(of);
    found.map(|what| Obstacle { what }).collect()
}

unsafe fn chosen<'a>(world: &World, only: Option<&[u32]>) -> Vec<&'a ShadowQp> {
    let all = world.queue_pairs().map(|pair| &*pair);
    all.filter(|pair| only.is_none_or(|only| only.contains(&pair.face.qp_num)))
        .collect()
}

/// The first of `numbers` that none of `pairs` has.
fn missing(pairs: &[&ShadowQp], numbers: &[u32]) -> Option<u32> {
    numbers
        .iter()
        .copied()
        .find(|number| !pairs.iter().any(|pair| pair.face.qp_num == *number))
}

fn check(result: c_int, what: &str) -> Result<(), String> {
    if result == 0 {
        Ok(())
    } else {
        Err(format!("{what} failed with errno {result}"))
    }
}
