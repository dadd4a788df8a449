//! Datagrams: address handles, the present places of queue pairs that have moved, and the marker behind the last
//! datagram.
//!
//! Datagrams have no order and no acknowledgements. A move does no more than a network may do: some datagrams are lost.
//! Posted requests complete, kept requests are posted later, and receives are posted again.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::contexts::refuse;
use crate::abi::*;
use crate::shim::moving::{resume, suspend};
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{Object, World, running_world, world};
use crate::tables::{Call, Gid};

/// Most queue pairs of peers that may have moved.
const MOST_REDIRECTS: usize = 1 << 16;
/// Former handles of one queue pair of a peer before their removal is waited for.
const MOST_OLD: usize = 8;
/// Time limit for datagrams to leave.
const LEAVE: Duration = Duration::from_secs(2);

/// The new place of a queue pair for datagrams whose process has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirect {
    /// The address that applications know.
    pub remote: Gid,
    /// The number that applications know.
    pub number: u32,
    /// The present address.
    pub to: Gid,
    /// The number at the present device.
    pub physical: u32,
}

impl Redirect {
    fn is_for(&self, attributes: &ibv_ah_attr) -> bool {
        attributes.is_global != 0 && attributes.grh.dgid.raw == self.remote.0
    }

    fn leads(&self, attributes: &ibv_ah_attr) -> ibv_ah_attr {
        let mut there = *attributes;
        there.grh.dgid.raw = self.to.0;
        there
    }
}

impl Elsewhere {
    /// Destroys the device's handles. Requires that no posting thread and no queued request uses one.
    unsafe fn end(self) {
        for handle in self.old.into_iter().chain([self.real]) {
            (real().destroy_ah)(handle);
        }
    }
}

fn elsewhere(handle: &ShadowAh) -> MutexGuard<'_, Vec<Elsewhere>> {
    handle
        .elsewhere
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// `ibv_create_ah`
pub unsafe fn create_ah(pd: *mut ibv_pd, attributes: *mut ibv_ah_attr) -> *mut ibv_ah {
    let Some(parent) = objects::pd(pd) else {
        return (real().create_ah)(pd, attributes);
    };
    let mut world = running_world();
    let domain = parent.real.load(Ordering::Acquire);
    let made = (real().create_ah)(domain, attributes);
    if made.is_null() {
        return made;
    }
    let Some(id) = world.add(Call::AddressHandle { pd: parent.id }) else {
        (real().destroy_ah)(made);
        return refuse(libc::EINVAL);
    };
    let face = ibv_ah {
        context: parent.face.context,
        pd,
        handle: (*made).handle,
    };
    let shadow = Box::into_raw(Box::new(ShadowAh {
        face,
        id,
        real: AtomicPtr::new(made),
        attributes: *attributes,
        has_elsewhere: AtomicBool::new(false),
        elsewhere: Mutex::new(Vec::new()),
    }));
    *parent
        .last_route
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = Some(*attributes);
    for redirect in &world.redirects {
        // Datagrams to a peer whose new place is unreachable are lost.
        let _unreached = lead(&*shadow, domain, redirect);
    }
    world.objects.insert(id, Object::Ah(shadow));
    shadow.cast()
}

/// `ibv_destroy_ah`
pub unsafe fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    let Some(shadow) = objects::ah(ah) else {
        return (real().destroy_ah)(ah);
    };
    let mut world = running_world();
    let result = (real().destroy_ah)(shadow.real.load(Ordering::Acquire));
    if result == 0 {
        for other in elsewhere(shadow).drain(..) {
            other.end();
        }
        world.remove(shadow.id);
        drop(Box::from_raw(ah.cast::<ShadowAh>()));
    }
    result
}

/// Adds the new place of `redirect`'s queue pair, if the handle has its address.
unsafe fn lead(handle: &ShadowAh, domain: *mut ibv_pd, redirect: &Redirect) -> Result<(), String> {
    if !redirect.is_for(&handle.attributes) {
        return Ok(());
    }
    let mut all = elsewhere(handle);
    let known = all
        .iter_mut()
        .find(|other| other.redirect.number == redirect.number);
    match &known {
        Some(known) if known.redirect == *redirect => return Ok(()),
        Some(known) if known.old.len() >= MOST_OLD => {
            return Err(format!(
                "a handle still leads to where queue pair {} of {} was",
                redirect.number, redirect.remote
            ));
        }
        _ => {}
    }
    let mut attributes = redirect.leads(&handle.attributes);
    let made = (real().create_ah)(domain, &raw mut attributes);
    if made.is_null() {
        return Err(format!(
            "{} cannot be addressed: {}",
            redirect.to,
            std::io::Error::last_os_error()
        ));
    }
    match known {
        Some(known) => {
            known.redirect = *redirect;
            known.old.push(std::mem::replace(&mut known.real, made));
        }
        None => all.push(Elsewhere {
            redirect: *redirect,
            real: made,
            old: Vec::new(),
        }),
    }
    handle.has_elsewhere.store(true, Ordering::Release);
    Ok(())
}

/// Sends datagrams for queue pairs that have moved to their new places from now on.
///
/// # Errors
/// One sentence: an address is unreachable, datagrams to a former place of an often moved queue pair do not leave, or
/// too many queue pairs have moved. The other queue pairs are redirected all the same, also in handles that are made
/// later.
pub fn redirect(redirects: &[Redirect]) -> Result<(), String> {
    let noted = note(&mut world().redirects, redirects);
    let (mut failed, mut stuck) = (None, None);
    if noted < redirects.len() {
        failed = Some(format!(
            "more than {MOST_REDIRECTS} queue pairs for datagrams have moved"
        ));
    }
    for redirect in redirects.iter().take(noted) {
        let many = leads_to_many(&world());
        if many && stuck.is_none() {
            // A single wait suffices: later ones would wait for the same datagrams.
            stuck = end_old().err();
        }
        let world = world();
        // SAFETY: objects live while the world is locked.
        unsafe {
            for handle in world.address_handles() {
                let domain = objects::pd((*handle).face.pd).map_or(ptr::null_mut(), |domain| {
                    domain.real.load(Ordering::Acquire)
                });
                // A released handle gets the redirect when made again.
                if (*handle).real.load(Ordering::Acquire).is_null() {
                    continue;
                }
                if let Err(error) = lead(&*handle, domain, redirect) {
                    failed = Some(error);
                }
            }
        }
    }
    let failed: Vec<String> = [failed, stuck].into_iter().flatten().collect();
    if failed.is_empty() {
        Ok(())
    } else {
        Err(failed.join(": "))
    }
}

/// Records the places of queue pairs. Returns the number of leading redirects that found room.
fn note(known: &mut Vec<Redirect>, redirects: &[Redirect]) -> usize {
    let has_room = |redirect: &&Redirect| {
        let same =
            |other: &Redirect| (other.remote, other.number) == (redirect.remote, redirect.number);
        if let Some(known) = known.iter_mut().find(|other| same(other)) {
            *known = **redirect;
        } else if known.len() < MOST_REDIRECTS {
            known.push(**redirect);
        } else {
            return false;
        }
        true
    };
    redirects.iter().take_while(has_room).count()
}

/// Returns true if a handle has the largest number of old handles.
fn leads_to_many(world: &World) -> bool {
    world.address_handles().any(|handle| {
        // SAFETY: objects live while the world is locked.
        let all = elsewhere(unsafe { &*handle });
        all.iter().any(|other| other.old.len() >= MOST_OLD)
    })
}

/// Destroys old handles. After the replacement no new request uses an old handle. Once a marker behind the earlier
/// requests has completed, no queued request uses one.
fn end_old() -> Result<(), String> {
    let datagrams: Vec<u32> = {
        let world = world();
        // SAFETY: objects live while the world is locked.
        let pairs = world.queue_pairs().map(|pair| unsafe { &*pair });
        let datagrams = pairs.filter(|pair| pair.face.qp_type == IBV_QPT_UD);
        datagrams.map(|pair| pair.face.qp_num).collect()
    };
    suspend(Some(&datagrams))?;
    let until = Instant::now() + LEAVE;
    let left = loop {
        let world = world();
        // SAFETY: objects live while the world is locked.
        if unsafe { all_have_left(&world, &datagrams) } {
            for handle in world.address_handles() {
                // SAFETY: as above.
                for other in elsewhere(unsafe { &*handle }).iter_mut() {
                    // SAFETY: nothing uses them any more.
                    let end = |old| unsafe { (real().destroy_ah)(old) };
                    other.old.drain(..).map(end).for_each(drop);
                }
            }
            break Ok(());
        }
        drop(world);
        if Instant::now() > until {
            break Err(format!(
                "after {} s datagrams to where queue pairs were are in flight",
                LEAVE.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_micros(200));
    };
    resume(Some(&datagrams))?;
    left
}

/// Returns true if the markers of these suspended queue pairs have completed.
unsafe fn all_have_left(world: &World, numbers: &[u32]) -> bool {
    for queue in world.completion_queues() {
        let mut lane = (*queue).lane.visit();
        if lane.suspended {
            lane.drain(&*queue);
        }
    }
    world.queue_pairs().map(|pair| &*pair).all(|pair| {
        !numbers.contains(&pair.face.qp_num) || pair.marker_done.load(Ordering::Acquire)
    })
}

/// Replaces the handle and the number in the request by the device's and the peer's.
#[inline]
pub(in crate::shim) unsafe fn address(request: &mut ibv_ud) {
    let Some(handle) = objects::ah(request.ah) else {
        return;
    };
    request.ah = handle.real.load(Ordering::Acquire);
    if handle.has_elsewhere.load(Ordering::Acquire) {
        let all = elsewhere(handle);
        if let Some(other) = all
            .iter()
            .find(|other| other.redirect.number == request.remote_qpn)
        {
            (request.ah, request.remote_qpn) = (other.real, other.redirect.physical);
        }
    }
}

/// Gives the device's handles back.
pub(in crate::shim) unsafe fn give_back(handle: &ShadowAh) -> Result<(), c_int> {
    for other in elsewhere(handle).drain(..) {
        other.end();
    }
    handle.has_elsewhere.store(false, Ordering::Release);
    match (real().destroy_ah)(handle.real.load(Ordering::Acquire)) {
        0 => {
            handle.real.store(ptr::null_mut(), Ordering::Release);
            Ok(())
        }
        errno => Err(errno),
    }
}

/// Makes the handle again in `domain`. Only the network tells if the peer is reachable from there.
pub(in crate::shim) unsafe fn make_again(
    world: &World,
    handle: &ShadowAh,
    domain: *mut ibv_pd,
) -> *mut ibv_ah {
    let mut attributes = handle.attributes;
    let made = (real().create_ah)(domain, &raw mut attributes);
    if made.is_null() {
        return made;
    }
    handle.real.store(made, Ordering::Release);
    for redirect in &world.redirects {
        let _unreached = lead(handle, domain, redirect);
    }
    made
}

/// Posts a marker behind the last datagram: an empty datagram to the queue pair itself, which refuses its foreign key.
/// Returns false if there was no datagram.
pub(in crate::shim) unsafe fn post_marker(
    pair: &ShadowQp,
    lane: &mut QpLane,
) -> Result<bool, c_int> {
    let Some(domain) = objects::pd(pair.face.pd) else {
        return Err(libc::EINVAL);
    };
    let route = *domain
        .last_route
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let Some(mut route) = route else {
        // A sender always has a handle.
        return Ok(false);
    };
    let key = {
        let steps = pair
            .transitions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let last = steps.iter().rev().find(|step| step.mask & IBV_QP_QKEY != 0);
        last.map_or(0, |step| step.attributes.qkey)
    };
    let context = (*lane.real).context;
    let own = (real().query_gid)(
        context,
        route.port_num,
        c_int::from(route.grh.sgid_index),
        &raw mut route.grh.dgid,
    );
    if own != 0 {
        return Err(libc::EADDRNOTAVAIL);
    }
    end_marker(pair);
    let handle = (real().create_ah)(domain.real.load(Ordering::Acquire), &raw mut route);
    if handle.is_null() {
        return Err(*libc::__errno_location());
    }
    pair.marker_route.store(handle, Ordering::Release);
    let mut marker: ibv_send_wr = std::mem::zeroed();
    marker.wr_id = MARKER;
    marker.opcode = IBV_WR_SEND;
    marker.send_flags = IBV_SEND_SIGNALED;
    marker.wr.ud = ibv_ud {
        ah: handle,
        remote_qpn: pair.physical.load(Ordering::Acquire),
        // The highest bit would stand for the queue pair's own key.
        remote_qkey: (key ^ 1) & 0x7fff_ffff,
    };
    lane.give(&mut marker).map(|()| true)
}

/// Destroys the handle of a marker.
pub(in crate::shim) unsafe fn end_marker(pair: &ShadowQp) {
    let handle = pair.marker_route.swap(ptr::null_mut(), Ordering::AcqRel);
    if !handle.is_null() {
        (real().destroy_ah)(handle);
    }
}
