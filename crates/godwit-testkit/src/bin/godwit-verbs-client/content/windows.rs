//! Memory windows: creation, binding and invalidation.

use std::io;

use godwit_verbs::abi::*;

use super::super::device::{Device, Slot, done, made};
use super::super::handover::{Offered, Used};
use super::ledger::MESSAGE;

/// `IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ`
const ACCESS: u32 = 6;

/// The windows of one queue pair, and the other side's windows for its writes and reads.
pub(crate) struct PairWindows {
    windows: [*mut ibv_mw; 2],
    /// The keys of the bound windows.
    bound: [Option<u32>; 2],
    pub(crate) offered: Offered,
    pub(crate) used: Used,
}

impl PairWindows {
    /// Creates two unbound windows.
    pub(crate) fn alloc(device: &Device) -> io::Result<Self> {
        Ok(Self {
            windows: [device.alloc_window()?, device.alloc_window()?],
            bound: [None; 2],
            offered: Offered::default(),
            used: Used::default(),
        })
    }

    /// Returns the window's key, if an invalidation must precede the next binding.
    pub(crate) fn to_invalidate(&self, device: &Device, window: usize) -> Option<u32> {
        self.bound[window].filter(|_| device.windows == IBV_MW_TYPE_2)
    }

    /// Returns the key of the last binding; 0 before the first.
    pub(crate) fn newest(&self) -> u32 {
        let last = (self.offered.bindings() as usize + 1) % 2;
        self.bound[last].unwrap_or(0)
    }

    /// Posts a request to bind the window to this queue pair's part of the memory.
    pub(crate) fn bind(
        &mut self,
        device: &Device,
        pair: usize,
        window: usize,
        wr_id: u64,
    ) -> io::Result<()> {
        let key = device.bind_window(pair, self.windows[window], window, wr_id)?;
        self.bound[window] = Some(key);
        self.offered.bind();
        Ok(())
    }

    /// Posts a request to invalidate the window by the key.
    pub(crate) fn invalidate(
        &mut self,
        device: &Device,
        pair: usize,
        window: usize,
        wr_id: u64,
    ) -> io::Result<()> {
        // SAFETY: integers, null pointers and a union of both.
        let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
        (request.wr_id, request.opcode) = (wr_id, IBV_WR_LOCAL_INV);
        request.send_flags = IBV_SEND_SIGNALED;
        request.imm_data = self.bound[window].take().unwrap_or(0);
        device.post_send(pair, &mut request)
    }

    /// Takes the peer's number of adopted keys from a message, and checks that the message has invalidated the right
    /// window, if any.
    pub(crate) fn hear(
        &mut self,
        device: &Device,
        adopted: u32,
        completion: &ibv_wc,
    ) -> Result<(), String> {
        let to_go = self.offered.hear(adopted)?;
        let to_go = to_go.filter(|_| device.windows == IBV_MW_TYPE_2);
        let expected = to_go.and_then(|window| self.bound[window].take());
        let invalidated = completion.invalidates().then_some(completion.imm_data);
        if invalidated == expected {
            return Ok(());
        }
        Err(format!(
            "a message invalidated {invalidated:x?} in place of {expected:x?}"
        ))
    }

    /// Deallocates both windows.
    pub(crate) fn dealloc(self) -> io::Result<()> {
        for window in self.windows {
            // SAFETY: does the same as the inline function of verbs.h; the windows have no user any more.
            let result = unsafe {
                let dealloc = (*(*window).context).ops.dealloc_mw;
                dealloc.ok_or(io::ErrorKind::Unsupported)?(window)
            };
            done(result, "ibv_dealloc_mw")?;
        }
        Ok(())
    }
}

impl Device {
    fn alloc_window(&self) -> io::Result<*mut ibv_mw> {
        // SAFETY: does the same as the inline function of verbs.h.
        let window = unsafe {
            let alloc = (*(*self.domain).context).ops.alloc_mw;
            alloc.ok_or(io::ErrorKind::Unsupported)?(self.domain, self.windows)
        };
        made(window, "ibv_alloc_mw")
    }

    /// Posts a request to bind the window to the landing of the peer's writes for this one of the queue pair's two
    /// windows. Returns the new key.
    fn bind_window(
        &self,
        pair: usize,
        window: *mut ibv_mw,
        which: usize,
        wr_id: u64,
    ) -> io::Result<u32> {
        let bind_info = ibv_mw_bind_info {
            mr: self.region,
            addr: self.address(Slot::Landing(pair, which)) as u64,
            length: MESSAGE as u64,
            mw_access_flags: ACCESS,
        };
        // SAFETY: the objects live; otherwise does the same as the inline functions of verbs.h.
        unsafe {
            if self.windows == IBV_MW_TYPE_1 {
                let mut wanted = ibv_mw_bind {
                    wr_id,
                    send_flags: IBV_SEND_SIGNALED,
                    bind_info,
                };
                let bind = (*(*window).context).ops.bind_mw;
                let bind = bind.ok_or(io::ErrorKind::Unsupported)?;
                let result = bind(self.pairs[pair], window, &raw mut wanted);
                done(result, "ibv_bind_mw")?;
            } else {
                let mut request: ibv_send_wr = std::mem::zeroed();
                (request.wr_id, request.opcode) = (wr_id, IBV_WR_BIND_MW);
                request.send_flags = IBV_SEND_SIGNALED;
                // `ibv_inc_rkey`
                let rkey = (*window).rkey & !0xff | (*window).rkey.wrapping_add(1) & 0xff;
                request.bind_mw = ibv_send_bind_mw {
                    mw: window,
                    rkey,
                    bind_info,
                };
                self.post_send(pair, &mut request)?;
                (*window).rkey = rkey;
            }
            Ok((*window).rkey)
        }
    }
}
