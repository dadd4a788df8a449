//! Present and former places of queue pairs for datagrams, for the information of senders. Datagrams have no connection
//! that would tell the senders.

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

/// Examined addresses of a port.
const ADDRESSES: c_int = 16;
/// Most remembered places of a queue pair. Applications know the first place. A place between the first and the latest
/// ones is known only to peers that answered datagrams from there, so these places are dropped.
const MOST: usize = 256;

/// A former place of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shim) struct Place {
    /// The GID index of the address: the same index leads to the queue pair at any host.
    index: c_int,
    address: Gid,
    /// The number at the former device.
    number: u32,
}

/// A cache of the ports' addresses. An application has many queue pairs and keeps back their requests during the
/// queries.
#[derive(Default)]
pub(super) struct Ports(BTreeMap<(usize, u8), Vec<(c_int, Gid)>>);

impl Ports {
    /// Returns the addresses of the queue pair's port with their GID indexes.
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

/// Returns the queue pair's port and the device's context; none without a port or after a release.
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

/// Remembers the present place of the queue pair before a move.
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
                // The first places stay.
                places.remove(MOST / 2);
            }
            places.push(place);
        }
    }
}

/// Returns the present place of each queue pair for datagrams, for senders that know a former place.
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
