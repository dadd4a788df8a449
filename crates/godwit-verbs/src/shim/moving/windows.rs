//! Memory windows of a process that moves or has a moving peer. A window belongs to the device, and a request to a
//! queue pair binds it. So windows are bound again, as applications know them, once their queue pairs are connected.
//! The requests complete behind the application's back, as markers do.

use std::ptr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::abi::*;
use crate::shim::objects::{self, *};
use crate::shim::world::{Object, World, windows};
use crate::tables::{Binding, Bound, Window, WindowType};

/// Time limit of the device for a request that needs no peer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns the obstacles to binding windows again, one sentence each.
pub(super) unsafe fn obstacles(world: &World) -> Vec<String> {
    let mut found = Vec::new();
    for (shadow, window) in all(world) {
        let key = window.known_key();
        match window.bound {
            Bound::No => {}
            Bound::Unknown => found.push(format!(
                "memory window {key:#x} was last bound or unbound by a queue pair that failed and is gone; whether it is bound is not known"
            )),
            Bound::To(binding) if binder(world, &*shadow, &window, &binding).is_none() => {
                found.push(format!(
                    "memory window {key:#x} is bound, and no connected queue pair is left that could bind it again"
                ));
            }
            Bound::To(_) => {}
        }
    }
    found
}

/// Returns all windows in their present state.
unsafe fn all(world: &World) -> Vec<(*mut ShadowMw, Window)> {
    let windows = windows();
    if windows.is_empty() {
        // Most processes have no window, and some have thousands of other objects, while this runs for each queue pair.
        return Vec::new();
    }
    let known = |shadow: *mut ShadowMw| Some((shadow, *windows.get(shadow.addr())?));
    world.memory_windows().filter_map(known).collect()
}

/// Returns the queue pair that binds the window again: the original one, or for type 1 another of the protection
/// domain.
unsafe fn binder<'a>(
    world: &World,
    shadow: &ShadowMw,
    window: &Window,
    binding: &Binding,
) -> Option<&'a ShadowQp> {
    let can = |pair: &&ShadowQp| {
        pair.face.qp_type == IBV_QPT_RC && pair.face.state.load(Ordering::Relaxed) == IBV_QPS_RTS
    };
    let of_domain =
        |pair: &&ShadowQp| window.kind == WindowType::One && ptr::eq(pair.face.pd, shadow.face.pd);
    let pairs = || world.queue_pairs().map(|pair| &*pair).filter(can);
    pairs()
        .find(|pair| pair.id == binding.pair)
        .or_else(|| pairs().find(of_domain))
}

/// Binds the windows that one of `pairs`, which are connected, has to bind again. A failure at one queue pair does not
/// affect the windows of others. Returns the first error.
pub(super) unsafe fn bind_again(world: &World, pairs: &[&ShadowQp]) -> Result<(), String> {
    let mut result = Ok(());
    for (shadow, window) in all(world) {
        let Bound::To(binding) = window.bound else {
            continue;
        };
        if window.on_device {
            continue;
        }
        let Some(pair) = binder(world, &*shadow, &window, &binding) else {
            continue;
        };
        let Some(Object::Mr(region)) = world.objects.get(&binding.region) else {
            continue;
        };
        if !pairs.iter().any(|connected| connected.id == pair.id) {
            continue;
        }
        if pair.failed.load(Ordering::Acquire) {
            // The device takes no more requests, and the reason was reported already.
            continue;
        }
        let info = ibv_mw_bind_info {
            mr: (**region).real.load(Ordering::Acquire),
            addr: binding.address,
            length: binding.length,
            mw_access_flags: binding.access,
        };
        let device_window = (*shadow).real.load(Ordering::Acquire);
        match bind_as_known(pair, device_window, &window, info) {
            Ok(()) => windows().set_on_device(shadow.addr(), true),
            Err(error) => {
                result = result.and(Err(format!(
                    "memory window {:#x} was not bound again: {error}",
                    window.known_key()
                )));
            }
        }
    }
    result
}

/// Binds the device's unbound window with the tag that applications know.
unsafe fn bind_as_known(
    pair: &ShadowQp,
    device_window: *mut ibv_mw,
    window: &Window,
    info: ibv_mw_bind_info,
) -> Result<(), String> {
    let (mut has, wanted) = (window.device_key(), window.bound_key());
    if has == wanted {
        // Some devices, soft-RoCE before Linux 6.0, bind no window with its present tag.
        has = wanted ^ 1;
        bind(pair, device_window, window.device_key(), has, info)?;
        if window.kind == WindowType::Two {
            invalidate(pair, has)?;
        }
    }
    bind(pair, device_window, has, wanted, info)
}

unsafe fn bind(
    pair: &ShadowQp,
    device_window: *mut ibv_mw,
    has: u32,
    wanted: u32,
    bind_info: ibv_mw_bind_info,
) -> Result<(), String> {
    (*device_window).rkey = has;
    let mut request: ibv_send_wr = std::mem::zeroed();
    request.opcode = IBV_WR_BIND_MW;
    request.bind_mw = ibv_send_bind_mw {
        mw: device_window,
        rkey: wanted,
        bind_info,
    };
    carry_out(pair, &mut request)
}

unsafe fn invalidate(pair: &ShadowQp, device_key: u32) -> Result<(), String> {
    let mut request: ibv_send_wr = std::mem::zeroed();
    (request.opcode, request.imm_data) = (IBV_WR_LOCAL_INV, device_key);
    carry_out(pair, &mut request)
}

/// Makes the device forget that windows of type 2 are bound by the queue pair, before the queue pair ends or is reset.
pub(super) unsafe fn unbind(world: &World, pair: &ShadowQp) -> Result<(), String> {
    for (shadow, window) in all(world) {
        let own = matches!(window.bound, Bound::To(binding) if binding.pair == pair.id);
        if !own || !window.on_device || window.kind != WindowType::Two {
            continue;
        }
        invalidate(pair, window.device_key()).map_err(|error| {
            format!(
                "memory window {:#x} cannot be bound anew: {error}",
                window.known_key()
            )
        })?;
        windows().set_on_device(shadow.addr(), false);
    }
    Ok(())
}

/// Posts a request of the shim to an empty queue pair and waits for its completion.
unsafe fn carry_out(pair: &ShadowQp, request: &mut ibv_send_wr) -> Result<(), String> {
    let queue = objects::cq(pair.face.send_cq).ok_or("its completion queue is gone")?;
    request.wr_id = MARKER;
    request.send_flags = IBV_SEND_SIGNALED;
    queue.lane.visit().markers += 1;
    pair.marker_done.store(false, Ordering::Release);
    // From now on the flag tells of this request.
    let had_failed = pair.failed.swap(false, Ordering::AcqRel);
    let posted = pair.lane.visit().give(request);
    if let Err(errno) = posted {
        queue.lane.visit().markers -= 1;
        pair.marker_done.store(true, Ordering::Release);
        pair.failed.fetch_or(had_failed, Ordering::AcqRel);
        return Err(format!("the device took no request for it (errno {errno})"));
    }
    let began = Instant::now();
    loop {
        queue.lane.visit().drain(queue);
        if pair.marker_done.load(Ordering::Acquire) {
            return Ok(());
        }
        if pair.failed.load(Ordering::Acquire) {
            return Err("the device's request for it failed".to_owned());
        }
        if began.elapsed() >= PATIENCE {
            // Only a reset removes the request.
            pair.failed.store(true, Ordering::Release);
            return Err(format!(
                "the device did nothing about it in {} s",
                PATIENCE.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}
