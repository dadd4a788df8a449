//! A partner's part of pre-setup (the RDMA live-migration paper, section 3.2): a second queue pair of the device is
//! made and connected while the application works on the first. The second takes the place of the first once nothing is
//! in flight.
//!
//! Both complete into the same queues. The first is destroyed after the application resumes.

use std::ptr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::connecting::{post_again, take_keys, walk};
use super::{Connection, chosen, windows};
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::verbs::queue_pairs::{add_route, forget_route, make_pair};
use crate::shim::world::{Phase, World, world};
use crate::tables::RemoteKey;

/// A queue pair that waits to replace another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedPair {
    /// The application's number.
    pub number: u32,
    /// The device's number of the waiting queue pair.
    pub physical: u32,
}

/// Makes and connects replacements for the named queue pairs. The old queue pairs go on.
///
/// # Errors
/// One sentence that names the queue pair and the call that the device refused. Then no queue pair is prepared.
pub fn prepare(connections: &[Connection]) -> Result<Vec<PreparedPair>, String> {
    let world = world();
    if world.phase != Phase::Running {
        return Err("this process is being moved itself".to_owned());
    }
    let mut prepared = Vec::new();
    for connection in connections {
        // SAFETY: objects live while the world is locked.
        let made = unsafe { prepare_one(&world, connection) };
        match made {
            Ok(pair) => prepared.push(pair),
            Err(error) => {
                let numbers: Vec<u32> = prepared.iter().map(|pair| pair.number).collect();
                // SAFETY: as above.
                unsafe { abandon_in(&world, Some(&numbers)) };
                return Err(format!("queue pair {}: {error}", connection.number));
            }
        }
    }
    Ok(prepared)
}

unsafe fn prepare_one(world: &World, connection: &Connection) -> Result<PreparedPair, String> {
    let pair = one(world, connection.number)?;
    let domain = objects::pd(pair.face.pd).ok_or("its domain is gone")?;
    {
        let lane = pair.lane.visit();
        if lane.suspended || lane.real.is_null() {
            return Err("it is being moved already".to_owned());
        }
        if lane.prepared.is_some() {
            return Err("another one is prepared for it already".to_owned());
        }
    }
    let domain = domain.real.load(Ordering::Acquire);
    let (made, _) = make_pair(domain, pair, &pair.init, world);
    if made.is_null() {
        return Err(format!(
            "ibv_create_qp failed: {}",
            std::io::Error::last_os_error()
        ));
    }
    let steps: Vec<_> = {
        let transitions = pair
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        transitions
            .iter()
            .map(|step| (step.mask, step.attributes))
            .collect()
    };
    if let Err(error) = walk(made, &steps, Some(connection), || Ok(())) {
        (real().destroy_qp)(made);
        return Err(error);
    }
    pair.lane.visit().prepared = Some(Prepared { real: made });
    Ok(PreparedPair {
        number: connection.number,
        physical: (*made).qp_num,
    })
}

unsafe fn one<'a>(world: &World, number: u32) -> Result<&'a ShadowQp, String> {
    let pairs = chosen(world, Some(&[number]));
    pairs
        .first()
        .copied()
        .ok_or_else(|| "there is none of this number".to_owned())
}

/// Puts prepared queue pairs in the place of the named ones, which are suspended and empty. `remote_keys` are the
/// peer's: the application's and the device's.
///
/// # Errors
/// One sentence that names the queue pair. Earlier queue pairs have been switched, with their memory windows bound.
pub fn switch(numbers: &[u32], remote_keys: &[RemoteKey]) -> Result<(), String> {
    let mut world = world();
    if remote_keys.iter().any(RemoteKey::differs) && !world.translates {
        world.translate();
    }
    let by_number: std::collections::BTreeMap<u32, *mut ShadowQp> = world
        .queue_pairs()
        // SAFETY: objects live while the world is locked.
        .map(|pair| (unsafe { (*pair).face.qp_num }, pair))
        .collect();
    // All queue pairs are checked before one is changed.
    let mut pairs = Vec::new();
    for number in numbers {
        let pair = by_number
            .get(number)
            .ok_or_else(|| format!("there is no queue pair {number}"))?;
        // SAFETY: as above.
        let pair = unsafe { &**pair };
        let lane = pair.lane.visit();
        let why = if !lane.suspended || lane.real.is_null() {
            "is not suspended, or has no object of the device"
        } else if !lane.empty {
            "has not been waited for"
        } else if lane.prepared.is_none() {
            "has nothing prepared for it"
        } else {
            pairs.push(pair);
            continue;
        };
        return Err(format!("queue pair {number} {why}"));
    }
    let mut switched = Vec::new();
    let mut result = Ok(());
    for pair in pairs {
        // SAFETY: as above.
        if let Err(error) = unsafe { switch_one(&world, pair, remote_keys) } {
            result = Err(format!("queue pair {}: {error}", pair.face.qp_num));
            break;
        }
        switched.push(pair);
    }
    // SAFETY: as above.
    let bound = unsafe { windows::bind_again(&world, &switched) };
    result.and(bound)
}

unsafe fn switch_one(
    world: &World,
    pair: &ShadowQp,
    remote_keys: &[RemoteKey],
) -> Result<(), String> {
    windows::unbind(world, pair)?;
    let number = {
        let mut lane = pair.lane.visit();
        let Some(prepared) = lane.prepared.take() else {
            return Err("nothing is prepared for it".to_owned());
        };
        let old = std::mem::replace(&mut lane.real, prepared.real);
        lane.retired.push(old);
        let posted = post_again(pair, &mut lane);
        if posted.is_err() {
            // Undone: the old queue pair still has its receives.
            lane.retired.pop();
            lane.real = old;
            lane.prepared = Some(prepared);
            return posted;
        }
        take_keys(&mut lane, remote_keys);
        (*prepared.real).qp_num
    };
    pair.physical.store(number, Ordering::Release);
    // A holder of a queue pair's gate must not wait for a completion queue.
    for queue in [pair.face.send_cq, pair.face.recv_cq] {
        if let Some(queue) = objects::cq(queue) {
            add_route(queue, number, pair);
        }
    }
    pair.failed.store(false, Ordering::Release);
    pair.marker_done.store(true, Ordering::Release);
    Ok(())
}

/// Destroys prepared queue pairs that were not switched to: for the named queue pairs, or for all.
pub fn abandon(only: Option<&[u32]>) {
    let world = world();
    // SAFETY: objects live while the world is locked.
    unsafe { abandon_in(&world, only) };
}

unsafe fn abandon_in(world: &World, only: Option<&[u32]>) {
    for pair in chosen(world, only) {
        abandon_one(pair);
    }
}

/// As [`abandon`]. The caller does not hold the queue pair.
pub(in crate::shim) unsafe fn abandon_one(pair: &ShadowQp) {
    let prepared = pair.lane.visit().prepared.take();
    if let Some(prepared) = prepared {
        (real().destroy_qp)(prepared.real);
    }
}

/// Destroys queue pairs that were replaced.
///
/// # Errors
/// One sentence if the device refuses; the next call tries again.
pub fn tidy() -> Result<(), String> {
    let world = world();
    for pair in world.queue_pairs() {
        // SAFETY: objects live while the world is locked.
        unsafe { tidy_one(&*pair)? };
    }
    Ok(())
}

/// As [`tidy`]. The caller does not hold the queue pair.
pub(in crate::shim) unsafe fn tidy_one(pair: &ShadowQp) -> Result<(), String> {
    loop {
        let Some(old) = pair.lane.visit().retired.last().copied() else {
            return Ok(());
        };
        let number = (*old).qp_num;
        super::check((real().destroy_qp)(old), "ibv_destroy_qp")?;
        pair.lane.visit().retired.retain(|one| !ptr::eq(*one, old));
        if ptr::eq(pair.made_ahead.load(Ordering::Acquire), old) {
            pair.made_ahead.store(ptr::null_mut(), Ordering::Release);
        }
        for queue in [pair.face.send_cq, pair.face.recv_cq] {
            if let Some(queue) = objects::cq(queue) {
                forget_route(queue, number, pair);
            }
        }
    }
}
