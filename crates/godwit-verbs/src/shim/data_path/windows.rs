//! Requests about memory windows, processed one at a time, since each changes a window's record. These requests take
//! the lock of the windows; others do not.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;

use crate::abi::*;
use crate::shim::objects::{self, *};
use crate::shim::world::{KEYS, windows};
use crate::tables::{Binding, Bound, Windows};

impl QpLane {
    /// Posts one request that binds or invalidates a window, and records the effect. `has` is the key in the window's
    /// structure when the application posted the request.
    #[cold]
    pub(super) unsafe fn send_local(&mut self, request: &ibv_send_wr, has: u32) -> c_int {
        let mut windows = windows();
        let mut copy = *request;
        copy.next = ptr::null_mut();
        if request.opcode == IBV_WR_LOCAL_INV {
            let known = request.imm_data;
            let physical = match windows.device_key(known) {
                Some(key) => key,
                None if self.plain => known,
                // The key of a region, which the application knows as a local key as well, or a key of nothing.
                None => KEYS.physical(known),
            };
            copy.imm_data = physical;
            let result = self.post_local(&mut copy);
            if result == 0 {
                windows.invalidate(known, self.id);
            }
            return result;
        }
        // Some devices' libraries refuse a value that others ignore.
        copy.imm_data = 0;
        let Some(bound) = self.translate_bind(&windows, &mut copy, has) else {
            return libc::EINVAL;
        };
        let result = self.post_local(&mut copy);
        if result == 0 {
            let bind = &request.bind_mw;
            windows.bind(bind.mw.addr(), bind.rkey, bound, self.id);
        }
        result
    }

    unsafe fn post_local(&mut self, request: &mut ibv_send_wr) -> c_int {
        match self.give(request) {
            Ok(()) => 0,
            Err(errno) => errno,
        }
    }

    /// Puts the device's objects and keys into a request to bind. Returns the new binding; none if the window or the
    /// region does not exist.
    unsafe fn translate_bind(
        &self,
        windows: &Windows,
        request: &mut ibv_send_wr,
        has: u32,
    ) -> Option<Bound> {
        let bind = &mut request.bind_mw;
        let address = bind.mw.addr();
        let (device_has, device_wanted) = windows.keys_to_bind(address, has, bind.rkey)?;
        // The table shows that the window lives.
        let window = (*bind.mw.cast::<ShadowMw>()).real.load(Ordering::Acquire);
        let region = region_of(&bind.bind_info)?;
        // The device's library reads the key there while it takes the request.
        (*window).rkey = device_has;
        (bind.mw, bind.rkey) = (window, device_wanted);
        let info = &mut bind.bind_info;
        let Some(region) = region else {
            return Some(Bound::No);
        };
        info.mr = region.real.load(Ordering::Acquire);
        if info.length == 0 {
            return Some(Bound::No);
        }
        Some(Bound::To(Binding {
            region: region.id,
            pair: self.id,
            address: info.addr,
            length: info.length,
            access: info.mw_access_flags,
        }))
    }
}

/// Returns the region for a binding, which may be null; none if the region is not this library's.
unsafe fn region_of<'a>(info: &ibv_mw_bind_info) -> Option<Option<&'a ShadowMr>> {
    if info.mr.is_null() {
        // With a length, a provider would read the region for its key.
        return (info.length == 0).then_some(None);
    }
    objects::mr(info.mr).map(Some)
}

/// Returns the present or former key in the structure of the window that a request binds.
pub(super) type KeyOf = unsafe fn(*const ibv_send_wr) -> Option<u32>;

/// Returns the key in the structure of the window to bind. Returns none if the request names no window or region, or
/// has data.
pub(super) unsafe fn key_of(request: *const ibv_send_wr) -> Option<u32> {
    let request = &*request;
    if request.opcode != IBV_WR_BIND_MW {
        return Some(0);
    }
    if request.num_sge != 0 {
        return None;
    }
    let bind = &request.bind_mw;
    windows().get(bind.mw.addr())?;
    region_of(&bind.bind_info)?;
    Some((*bind.mw).rkey)
}

/// Handles a received message by which the peer may have invalidated a window, by the device's key. Replaces the key by
/// the application's.
#[cold]
pub(super) fn may_be_invalidated(completion: &mut ibv_wc, pair: &ShadowQp) {
    if pair.face.qp_type == IBV_QPT_RC
        && completion.invalidates()
        && let Some(known) = windows().invalidated(completion.imm_data)
    {
        completion.imm_data = known;
    }
}
