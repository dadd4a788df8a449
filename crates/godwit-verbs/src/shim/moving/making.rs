//! Making the device's objects again.

use super::{Recreated, describe};
use crate::abi::*;
use crate::shim::completions::make_cq;
use crate::shim::contexts::register;
use crate::shim::descriptors;
use crate::shim::objects::{self, *};
use crate::shim::queue_pairs::{add_route, make_pair};
use crate::shim::real::real;
use crate::shim::shared_receives::make_srq;
use crate::shim::world::{KEYS, Object, Phase, World, world};
use crate::tables::Call;
use std::ptr;
use std::sync::atomic::Ordering;

/// Makes the device's objects again, on the device named `device` or on that of the same name.
///
/// # Errors
/// One sentence that names what the device refused.
pub fn recreate(device: Option<&str>) -> Result<Recreated, String> {
    let mut world = world();
    if world.phase != Phase::Released {
        return Err("this process has its objects".to_owned());
    }
    let spoken: Vec<u32> = world.regions().map(|(known, _)| known).collect();
    world.spoken_keys.extend(spoken);
    let local: Vec<u32> = world.local_keys().collect();
    world.known_local_keys.extend(local);
    world.translate();
    // The keys that the application uses are the old device's from now on.
    for pair in world.queue_pairs() {
        // SAFETY: objects live while the world is locked.
        unsafe { (*pair).lane.visit().plain = false };
    }
    for queue in world.shared_receive_queues() {
        // SAFETY: as above.
        unsafe { (*queue).lane.visit().plain = false };
    }
    // SAFETY: objects live while the world is locked; parents come before what is made from them.
    unsafe {
        for (id, call) in world.roadmap.calls() {
            if let Some(object) = world.objects.get(&id) {
                make_again(&world, *object, call, device)?;
            }
        }
        // What there is can be given back once more, or used.
        world.phase = Phase::Suspended;
        Ok(Recreated {
            remote_keys: world.regions().collect(),
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

unsafe fn make_again(
    world: &World,
    object: Object,
    call: &Call,
    device: Option<&str>,
) -> Result<(), String> {
    if !object.is_released() {
        // It was not given back, or an earlier attempt has made it.
        if let Object::Channel(channel) = object {
            let device_channel = (*channel).real.load(Ordering::Acquire);
            descriptors::replace((*channel).face.fd, (*device_channel).fd)
                .map_err(|error| format!("the descriptor for events of completions: {error}"))?;
        }
        return Ok(());
    }
    match object {
        Object::Context(context) => {
            let name = device.unwrap_or(&(*context).device_name);
            let opened = open_by_name(name)?;
            if let Err(error) = descriptors::replace((*context).face.async_fd, (*opened).async_fd) {
                (real().close_device)(opened);
                return Err(format!("the descriptor for events of the device: {error}"));
            }
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
            let known = (*region).face.rkey;
            let allowed =
                |made: &ibv_mr| made.rkey == known || !world.spoken_keys.contains(&made.rkey);
            let again = register(domain, address, length, iova, access as u32, allowed);
            let again = made(again.unwrap_or(ptr::null_mut()), "ibv_reg_mr")?;
            KEYS.set((*region).face.lkey, (*again).lkey);
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
            if let Err(error) = descriptors::replace((*channel).face.fd, (*again).fd) {
                (real().destroy_comp_channel)(again);
                return Err(format!("the descriptor for events of completions: {error}"));
            }
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
            (*queue).lane.visit().real = again;
        }
        Object::Srq(queue) => {
            let domain = behind_pd((*queue).face.pd);
            let mut attributes = (*queue).init;
            let again = made(make_srq(domain, queue, &mut attributes), "ibv_create_srq")?;
            let mut lane = (*queue).lane.visit();
            lane.real = again;
            if let Err(errno) = (*queue).post_again(&mut lane) {
                // The next attempt begins anew: it could not tell what this queue has.
                (real().destroy_srq)(again);
                lane.real = ptr::null_mut();
                return Err(format!(
                    "a shared receive queue took less than before (errno {errno})"
                ));
            }
        }
        Object::Qp(pair) => {
            let domain = behind_pd((*pair).face.pd);
            let (again, _) = make_pair(domain, pair, &(*pair).init, world);
            let again = made(again, "ibv_create_qp")?;
            (*pair).physical.store((*again).qp_num, Ordering::Release);
            (*pair).lane.visit().real = again;
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
