//! A mover's operations on the process's objects: suspend, drain, release (`stopping`), recreate (`making`), connect,
//! resume (`connecting`).

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

/// The mover's view of a queue pair.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QueuePairState {
    /// The application's number.
    pub number: u32,
    /// The device's number.
    pub physical: u32,
    /// `IBV_QPS_*`
    pub state: i32,
    /// True for a reliable connection.
    pub reliable_connection: bool,
    /// True if a request has failed.
    pub failed: bool,
    /// The address of the local port, once connected.
    pub local: Option<Gid>,
    /// The address of the peer's port.
    pub remote: Option<Gid>,
    /// The number at the peer's device.
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

/// An obstacle to a move of this process, in words for its operator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Obstacle {
    /// A single sentence.
    pub what: String,
}

/// The new place of a queue pair's peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connection {
    /// The application's number of the queue pair.
    pub number: u32,
    /// The peer's port.
    pub remote: Gid,
    /// The number at the peer's device.
    pub remote_physical: u32,
    /// The peer's remote keys: the application's and the device's. Absent to keep the present keys.
    pub remote_keys: Option<Vec<RemoteKey>>,
}

/// The result of a recreation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recreated {
    /// The process's remote keys: the application's and the device's.
    pub remote_keys: Vec<RemoteKey>,
    /// The process's queue pairs.
    pub queue_pairs: Vec<QueuePairState>,
}

/// Returns the last transition with this mask bit.
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
    // For datagrams, the device's peer is meaningless.
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

/// Returns the peer that the device's queue pair is connected to.
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

/// Returns the process's queue pairs.
pub fn queue_pairs() -> Vec<QueuePairState> {
    let world = world();
    // SAFETY: objects live while the world is locked.
    world
        .queue_pairs()
        .map(|pair| unsafe { describe(&*pair) })
        .collect()
}

/// Returns the process's needs of each device.
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

/// Returns the port, the GID index and the address that the queue pair uses.
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

/// The reason against a process that moves or is a partner.
const ENDED_INSIDE: &str = "a thread of the application has ended in the middle of posting or polling; what its queues hold is not known";

/// Returns the obstacles to a move with this version.
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

/// Returns an obstacle for each object that does not move because of its kind or its use.
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

/// Returns the first of `numbers` that belongs to none of `pairs`.
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
