//! Making the device's objects again.

use super::{Recreated, describe};
use crate::abi::*;
use crate::shim::completions::make_cq;
use crate::shim::objects::{self, *};
use crate::shim::queue_pairs::{add_route, device_attributes};
use crate::shim::real::real;
use crate::shim::world::{KEYS, Object, Phase, world};
use crate::tables::Call;
use std::ptr;
use std::sync::atomic::Ordering;

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
