//! Requests that are kept back while a queue pair is suspended or its device's queue is full.

use std::ffi::c_int;
use std::ptr;

use super::windows::{self, KeyOf};
use crate::abi::*;
use crate::shim::objects::*;

impl QpLane {
    /// Returns true if requests have to be kept back: the queue pair is suspended, or earlier kept requests do not fit
    /// into the device's queue yet.
    pub(super) unsafe fn is_behind(&mut self) -> bool {
        if !self.suspended && !self.kept.is_empty() {
            // After any error the kept requests stay kept, in their order.
            let _still_full = self.send_kept();
        }
        self.suspended || !self.kept.is_empty()
    }

    /// Keeps requests until the queue pair is connected again. The application believes them posted.
    pub(super) unsafe fn keep(
        &mut self,
        limits: &ibv_qp_cap,
        first: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
        key_of: KeyOf,
    ) -> c_int {
        let mut next = first;
        while !next.is_null() {
            let request = *next;
            let count = usize::try_from(request.num_sge).unwrap_or(0);
            if self.kept.len() >= limits.max_send_wr as usize {
                *bad = next;
                return libc::ENOMEM;
            }
            // Requests that the device would refuse are refused now, since a later error could not be reported.
            let inline = request.send_flags & IBV_SEND_INLINE != 0;
            let bytes: u64 = (0..count)
                .map(|piece| u64::from((*request.sg_list.add(piece)).length))
                .sum();
            let too_long = inline && bytes > u64::from(limits.max_inline_data);
            let fits = count <= (limits.max_send_sge as usize).min(BATCH_PIECES)
                && !too_long
                && !(self.datagrams && request.is_local());
            let Some(window_key) = key_of(next).filter(|_| fits) else {
                *bad = next;
                return libc::EINVAL;
            };
            let mut kept = KeptSend {
                request,
                pieces: Vec::with_capacity(count),
                inline: Vec::new(),
                window_key,
            };
            for piece in 0..count {
                let piece = *request.sg_list.add(piece);
                if inline {
                    // The application may reuse this memory after the call.
                    let data =
                        std::slice::from_raw_parts(piece.addr as *const u8, piece.length as usize);
                    kept.inline.extend_from_slice(data);
                } else {
                    kept.pieces.push(piece);
                }
            }
            self.kept.push_back(kept);
            next = request.next;
        }
        0
    }

    /// As [`QpLane::keep`], for the whole list or none.
    pub(super) unsafe fn keep_whole(
        &mut self,
        limits: &ibv_qp_cap,
        first: *mut ibv_send_wr,
        key_of: KeyOf,
    ) -> c_int {
        let before = self.kept.len();
        let result = self.keep(limits, first, &mut ptr::null_mut(), key_of);
        if result != 0 {
            self.kept.truncate(before);
        }
        result
    }

    /// Posts the kept requests, until the device refuses one. The remaining requests stay kept.
    pub(in crate::shim) unsafe fn send_kept(&mut self) -> Result<(), c_int> {
        while let Some(mut kept) = self.kept.pop_front() {
            let mut inline = [ibv_sge {
                addr: kept.inline.as_ptr() as u64,
                length: kept.inline.len() as u32,
                lkey: 0,
            }];
            let pieces = if kept.inline.is_empty() {
                &mut kept.pieces[..]
            } else {
                &mut inline[..]
            };
            let mut request = kept.request;
            request.next = ptr::null_mut();
            request.num_sge = pieces.len() as c_int;
            request.sg_list = pieces.as_mut_ptr();
            let result = if request.is_local() {
                self.send_local(&request, kept.window_key)
            } else {
                self.send(&raw mut request, &mut ptr::null_mut(), windows::key_of)
            };
            if result != 0 {
                self.kept.push_front(kept);
                return Err(result);
            }
        }
        Ok(())
    }
}
