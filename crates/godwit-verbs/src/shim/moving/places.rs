//! Where queue pairs for datagrams are and where they were, so that whoever sends to them can be told. Datagrams have no
//! connection that would say who that is.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::abi::*;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::verbs::datagrams::Redirect;
use crate::shim::world::world;
use crate::tables::Gid;

/// Addresses of a port that are looked at.
const ADDRESSES: c_int = 16;
/// Places that are remembered of one queue pair. Of those between the first, which applications know, and the last ones
/// somebody knows who answered what came from there.
const MOST: usize = 256;

/// Where a queue pair has been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shim) struct Place {
    /// The address's place in its port's table: the same one leads to the queue pair at any host.
    index: c_int,
    address: Gid,
    /// The number that the device there knew.
    number: u32,
}

/// The addresses of ports, each asked for once: applications have many queue pairs, which keep back what they send
/// meanwhile.
#[derive(Default)]
pub(super) struct Ports(BTreeMap<(usize, u8), Vec<(c_int, Gid)>>);

impl Ports {
    /// The addresses of the queue pair's port, with their places in its table.
    unsafe fn of(&mut self, pair: &ShadowQp) -> &[(c_int, Gid)] {
        match port(pair) {
            Some((context, port)) => self
                .0
                .entry((context.addr(), port))
                .or_insert_with(|| addresses(context, port)),
            None => &[],
        }
    }
}

/// The queue pair's port, and the device's context of it; nothing if it has none yet, or is released.
unsafe fn port(pair: &ShadowQp) -> Option<(*mut ibv_context, u8)> {
    let port = {
        let steps = pair
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let last = steps.iter().rev().find(|step| step.mask & IBV_QP_PORT != 0);
        last.map(|step| step.attributes.port_num)
    };
    let context =
        objects::context(pair.face.context).map(|context| context.real.load(Ordering::Acquire));
    Some((context.filter(|context| !context.is_null())?, port?))
}

unsafe fn addresses(context: *mut ibv_context, port: u8) -> Vec<(c_int, Gid)> {
    let address = |index| {
        let mut gid = ibv_gid::default();
        let asked = (real().query_gid)(context, port, index, &raw mut gid) == 0;
        (asked && gid != ibv_gid::default()).then_some((index, Gid(gid.raw)))
    };
    (0..ADDRESSES).filter_map(address).collect()
}

/// Remembers where the queue pair is, before it leaves.
pub(super) unsafe fn note(pair: &ShadowQp, ports: &mut Ports) {
    if pair.face.qp_type != IBV_QPT_UD {
        return;
    }
    let number = pair.physical.load(Ordering::Acquire);
    let mut places = pair.places.lock().unwrap_or_else(PoisonError::into_inner);
    for &(index, address) in ports.of(pair) {
        let place = Place {
            index,
            address,
            number,
        };
        if !places.contains(&place) {
            if places.len() == MOST {
                // The first ones stay.
                places.remove(MOST / 2);
            }
            places.push(place);
        }
    }
}

/// Where each queue pair for datagrams is now, for whoever knows it where it was.
pub fn redirects() -> Vec<Redirect> {
    let world = world();
    let (mut told, mut ports) = (Vec::new(), Ports::default());
    for pair in world.queue_pairs() {
        // SAFETY: objects live while the world is locked.
        let (pair, now) = unsafe { (&*pair, ports.of(&*pair)) };
        let physical = pair.physical.load(Ordering::Acquire);
        let places = pair.places.lock().unwrap_or_else(PoisonError::into_inner);
        told.extend(places.iter().filter_map(|place| {
            let (_, to) = now.iter().find(|(index, _)| *index == place.index)?;
            Some(Redirect {
                remote: place.address,
                number: place.number,
                to: *to,
                physical,
            })
        }));
    }
    told
}
