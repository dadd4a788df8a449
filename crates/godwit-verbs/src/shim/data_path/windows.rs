//! Requests about memory windows: one at a time, since they change what is known of a window. They take the lock of the
//! windows; requests of other kinds do not.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;

use crate::abi::*;
use crate::shim::objects::{self, *};
use crate::shim::world::{KEYS, windows};
use crate::tables::{Binding, Bound, Windows};

impl QpLane {
    /// Posts one request that binds or invalidates a window, and notes what becomes of the window. `has` is the key that
    /// the window's structure had when the application posted the request.
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
                // The key of a region, which the application knows as a local one as well; or of nothing.
                None => KEYS.physical(known),
            };
            copy.imm_data = physical;
            let result = self.post_local(&mut copy);
            if result == 0 {
                windows.invalidate(known, self.id);
            }
            return result;
        }
        // Some devices' libraries refuse what others do not look at.
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

    /// Puts the device's objects and keys into a request to bind. Gives what the window is bound to then; nothing if there
    /// is no such window or region.
    unsafe fn translate_bind(
        &self,
        windows: &Windows,
        request: &mut ibv_send_wr,
        has: u32,
    ) -> Option<Bound> {
        let bind = &mut request.bind_mw;
        let address = bind.mw.addr();
        let (device_has, device_wanted) = windows.keys_to_bind(address, has, bind.rkey)?;
        // The table says that it lives.
        let window = (*bind.mw.cast::<ShadowMw>()).real.load(Ordering::Acquire);
        let region = region_of(&bind.bind_info)?;
        // The device's library reads the key from there while it takes the request.
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

/// The region that a window is to be bound to, which may be none; nothing at all if it is not this library's.
unsafe fn region_of<'a>(info: &ibv_mw_bind_info) -> Option<Option<&'a ShadowMr>> {
    if info.mr.is_null() {
        // A provider would look into the region for its key if there were anything to bind to.
        return (info.length == 0).then_some(None);
    }
    objects::mr(info.mr).map(Some)
}

/// Gives the key that the structure has, or had, of the window that a request is to bind.
pub(super) type KeyOf = unsafe fn(*const ibv_send_wr) -> Option<u32>;

/// The key that the structure has of the window that is to be bound. Nothing if the request names no window or region, or
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

/// A message was received by which the peer may have invalidated a window by the key that the device knows. Tells the
/// application the one that it knows.
#[cold]
pub(super) fn may_be_invalidated(completion: &mut ibv_wc, pair: &ShadowQp) {
    if pair.face.qp_type == IBV_QPT_RC
        && completion.invalidates()
        && let Some(known) = windows().invalidated(completion.imm_data)
    {
        completion.imm_data = known;
    }
}
