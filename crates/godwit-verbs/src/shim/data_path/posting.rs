//! Posting: no lock of this library, no allocation, no system call for the thread that owns the queue.
//!
//! Requests are copied, because the application's own must stay unchanged: they may lie in memory that the application
//! shares or reuses. The copy carries the keys and handles of the device.

use std::ffi::c_int;
use std::hint::cold_path;
use std::mem::MaybeUninit;
use std::ptr;

use super::gate::Inside;
use super::{doorbell, windows};
use crate::abi::*;
use crate::shim::objects::*;
use crate::shim::verbs::datagrams;
use crate::shim::world::KEYS;

/// `ibv_post_send`
pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let shadow = &*qp.cast::<ShadowQp>();
    match shadow.lane.enter() {
        Some(mut lane) if lane.plain && is_single(first) => lane.pass_on_one(first, bad),
        Some(lane) => {
            cold_path();
            post_send_others(lane, first, bad)
        }
        None => post_send_slowly(shadow, first, bad),
    }
}

/// A separate function, so that [`post_send`] saves no more registers than the common request needs. This function and
/// the slow ways have C's calling convention and do not unwind, so the caller can end with a jump.
#[inline(never)]
unsafe extern "C" fn post_send_others(
    mut lane: Inside<'_, QpLane>,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    lane.post(first, bad, windows::key_of)
}

#[inline]
unsafe fn is_single(first: *const ibv_send_wr) -> bool {
    !first.is_null() && (*first).next.is_null()
}

#[cold]
unsafe extern "C" fn post_send_slowly(
    shadow: &ShadowQp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let mut lane = shadow.lane.lock();
    if lane.is_behind() {
        return lane.keep(&shadow.init.cap, first, bad, windows::key_of);
    }
    let result = lane.send(first, bad, windows::key_of);
    lane.own();
    result
}

impl QpLane {
    /// Gives requests to the device in the quickest possible way. Requires a queue pair that is neither suspended nor
    /// has kept requests.
    #[inline]
    pub(super) unsafe fn post(
        &mut self,
        first: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
        key_of: windows::KeyOf,
    ) -> c_int {
        if self.plain && is_single(first) {
            self.pass_on_one(first, bad)
        } else if self.plain {
            self.pass_on(first, bad)
        } else if self.is_simple(first) {
            self.send_one(first, bad)
        } else {
            self.send(first, bad, key_of)
        }
    }

    /// Gives one request to the device unchanged.
    #[inline]
    unsafe fn pass_on_one(
        &mut self,
        request: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> c_int {
        // Evaluated before the call, so that the request's pointer need not be kept across the call.
        let two_sided = u32::from((*request).is_two_sided());
        let result = (self.post_send)(self.real, request, bad);
        if result == 0 {
            self.sent = self.sent.wrapping_add(two_sided);
        } else {
            cold_path();
        }
        result
    }

    /// Gives requests to the device unchanged.
    #[cold]
    unsafe fn pass_on(&mut self, first: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
        let result = (self.post_send)(self.real, first, bad);
        // The list is the caller's until the call returns, so reading after the post is allowed.
        let refused = if result == 0 { ptr::null_mut() } else { *bad };
        self.sent = self.sent.wrapping_add(two_sided(first, refused));
        result
    }

    /// Returns true if [`QpLane::send_one`] can send this.
    #[inline]
    unsafe fn is_simple(&self, first: *const ibv_send_wr) -> bool {
        !self.datagrams
            && is_single(first)
            && (*first).num_sge == 1
            && (*first).opcode <= IBV_WR_ATOMIC_FETCH_AND_ADD
    }

    /// As [`QpLane::send`] for one request with one piece and an opcode that uses no field behind the union: the most
    /// common request.
    #[inline]
    unsafe fn send_one(&mut self, request: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
        const USED: usize = std::mem::offset_of!(ibv_send_wr, bind_mw);
        let mut copy = MaybeUninit::<ibv_send_wr>::uninit();
        let copied = copy.as_mut_ptr();
        ptr::copy_nonoverlapping(request.cast::<u8>(), copied.cast(), USED);
        let mut piece = *(*request).sg_list;
        piece.lkey = KEYS.physical(piece.lkey);
        (*copied).sg_list = &raw mut piece;
        let key = match (*request).opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => None,
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                Some(&raw mut (*copied).wr.atomic.rkey)
            }
            _ => Some(&raw mut (*copied).wr.rdma.rkey),
        };
        if let Some(key) = key {
            *key = self.remote_keys.physical(*key);
        }
        let mut refused = ptr::null_mut();
        let posted = (self.post_send)(self.real, copied, &raw mut refused);
        let result = self.rung(posted, refused);
        if result == 0 {
            self.sent = self.sent.wrapping_add(u32::from((*request).is_two_sided()));
        } else {
            *bad = request;
        }
        result
    }

    /// Returns the result of posted requests, given the library's result and the first refused request. If the doorbell
    /// was refused, the library reports this alone: the accepted requests are in the queue and need a doorbell, and a
    /// refused request means a full queue.
    #[inline]
    unsafe fn rung(&self, result: c_int, refused: *const ibv_send_wr) -> c_int {
        if result != libc::EACCES {
            return result;
        }
        cold_path();
        match doorbell::ring(self.real) {
            0 if refused.is_null() => 0,
            0 => libc::ENOMEM,
            errno => errno,
        }
    }

    /// Translates requests and posts them to the device.
    #[inline]
    pub(super) unsafe fn send(
        &mut self,
        first: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
        key_of: windows::KeyOf,
    ) -> c_int {
        let plain = self.plain;
        let mut next = first;
        while !next.is_null() {
            if (*next).is_local() {
                let result = match key_of(next) {
                    Some(has) => self.send_local(&*next, has),
                    None => libc::EINVAL,
                };
                if result != 0 {
                    *bad = next;
                    return result;
                }
                next = (*next).next;
                continue;
            }
            let batch_first = next;
            let (mut count, mut pieces, mut two_sided) = (0, 0, 0);
            while !next.is_null() && count < BATCH_REQUESTS {
                let request = &*next;
                let wanted = usize::try_from(request.num_sge).unwrap_or(0);
                if pieces + wanted > BATCH_PIECES || request.is_local() {
                    break;
                }
                let copy = self.sends.as_mut_ptr().add(count);
                copy.write(*request);
                let target = self.pieces.as_mut_ptr().add(pieces);
                for piece in 0..wanted {
                    let original = &*request.sg_list.add(piece);
                    target.add(piece).write(ibv_sge {
                        lkey: if plain {
                            original.lkey
                        } else {
                            KEYS.physical(original.lkey)
                        },
                        ..*original
                    });
                }
                (*copy).sg_list = target;
                (*copy).next = copy.add(1);
                self.translate_remote(&mut *copy);
                two_sided += u32::from(request.is_two_sided());
                pieces += wanted;
                count += 1;
                next = request.next;
            }
            if count == 0 {
                // More pieces than any device takes.
                *bad = next;
                return libc::EINVAL;
            }
            self.sends[count - 1].next = ptr::null_mut();
            let mut refused = ptr::null_mut();
            let copies = self.sends.as_mut_ptr();
            let posted = (self.post_send)(self.real, copies, &raw mut refused);
            let result = self.rung(posted, refused);
            if result != 0 {
                let place = if refused.is_null() {
                    0
                } else {
                    refused.offset_from(copies).clamp(0, count as isize - 1)
                };
                let mut reached = batch_first;
                for _ in 0..place {
                    self.sent = self.sent.wrapping_add(u32::from((*reached).is_two_sided()));
                    reached = (*reached).next;
                }
                *bad = reached;
                return result;
            }
            self.sent = self.sent.wrapping_add(two_sided);
        }
        0
    }

    #[inline]
    unsafe fn translate_remote(&self, request: &mut ibv_send_wr) {
        if self.datagrams {
            datagrams::address(&mut request.wr.ud);
            return;
        }
        match request.opcode {
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                request.wr.rdma.rkey = self.remote_keys.physical(request.wr.rdma.rkey);
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                request.wr.atomic.rkey = self.remote_keys.physical(request.wr.atomic.rkey);
            }
            IBV_WR_SEND_WITH_INV => request.imm_data = self.remote_keys.physical(request.imm_data),
            _ => {}
        }
    }

    /// Gives one request of the shim to the device.
    pub(in crate::shim) unsafe fn give(&mut self, request: &mut ibv_send_wr) -> Result<(), c_int> {
        let mut bad = ptr::null_mut();
        let posted = (self.post_send)(self.real, request, &raw mut bad);
        let result = self.rung(posted, bad);
        if result == 0 { Ok(()) } else { Err(result) }
    }

    /// Gives one receive to the device unchanged and records the receive. Requires room for the record.
    #[inline]
    unsafe fn pass_on_receive(
        &mut self,
        shadow: &ShadowQp,
        request: *mut ibv_recv_wr,
        bad: *mut *mut ibv_recv_wr,
    ) -> c_int {
        let result = (self.post_recv)(self.real, request, bad);
        if result == 0 {
            shadow.note_receive(&*request);
        } else {
            cold_path();
        }
        result
    }

    /// Gives receives to the device unchanged and records the accepted ones.
    #[cold]
    unsafe fn pass_on_receives(
        &mut self,
        shadow: &ShadowQp,
        first: *mut ibv_recv_wr,
        bad: *mut *mut ibv_recv_wr,
    ) -> c_int {
        if !shadow.has_room_for(first) {
            return self.receive(Some(shadow), first, bad);
        }
        let result = (self.post_recv)(self.real, first, bad);
        // As for sends, reading the list is still allowed.
        let refused = if result == 0 { ptr::null_mut() } else { *bad };
        shadow.note_receives(first, refused);
        result
    }

    /// Translates receives, posts them to the device if there is one, and records them in `noted_by`.
    #[inline]
    pub(in crate::shim) unsafe fn receive(
        &mut self,
        noted_by: Option<&ShadowQp>,
        first: *mut ibv_recv_wr,
        bad: *mut *mut ibv_recv_wr,
    ) -> c_int {
        let plain = self.plain;
        let mut next = first;
        while !next.is_null() {
            let request = &*next;
            let count = usize::try_from(request.num_sge).unwrap_or(0);
            if count > BATCH_PIECES {
                *bad = next;
                return libc::EINVAL;
            }
            if let Some(shadow) = noted_by
                && let Err(errno) = shadow.takes_receive(count, !self.real.is_null())
            {
                *bad = next;
                return errno;
            }
            let target = self.pieces.as_mut_ptr();
            for piece in 0..count {
                let original = &*request.sg_list.add(piece);
                target.add(piece).write(ibv_sge {
                    lkey: if plain {
                        original.lkey
                    } else {
                        KEYS.physical(original.lkey)
                    },
                    ..*original
                });
            }
            let copy = self.recvs.as_mut_ptr();
            copy.write(ibv_recv_wr {
                sg_list: target,
                next: ptr::null_mut(),
                ..*request
            });
            if !self.real.is_null() {
                let mut refused = ptr::null_mut();
                let result = (self.post_recv)(self.real, copy, &raw mut refused);
                if result != 0 {
                    *bad = next;
                    return result;
                }
            }
            if let Some(shadow) = noted_by {
                shadow.note_receive(request);
            }
            next = request.next;
        }
        0
    }
}

/// Counts the two-sided requests in the list before `end`.
#[inline]
unsafe fn two_sided(first: *const ibv_send_wr, end: *const ibv_send_wr) -> u32 {
    let (mut count, mut next) = (0, first);
    while !next.is_null() && !ptr::eq(next, end) {
        count += u32::from((*next).is_two_sided());
        next = (*next).next;
    }
    count
}

impl ShadowQp {
    #[inline]
    unsafe fn note_receive(&self, request: &ibv_recv_wr) {
        let pieces = match usize::try_from(request.num_sge) {
            Ok(count) if count > 0 => std::slice::from_raw_parts(request.sg_list, count),
            _ => &[],
        };
        self.receives.push(request.wr_id, pieces);
    }

    /// Records the receives before `end`.
    #[cold]
    unsafe fn note_receives(&self, first: *const ibv_recv_wr, end: *const ibv_recv_wr) {
        let mut next = first;
        while !ptr::eq(next, end) && !next.is_null() {
            self.note_receive(&*next);
            next = (*next).next;
        }
    }

    /// Returns true if there is room to record the whole list.
    #[cold]
    unsafe fn has_room_for(&self, first: *const ibv_recv_wr) -> bool {
        let (mut room, mut next) = (self.receives.room(), first);
        while !next.is_null() && room > 0 {
            room -= 1;
            next = (*next).next;
        }
        next.is_null()
    }

    /// Checks if one more receive may be posted; without a device, as a device would. A receive that cannot be recorded
    /// would be lost in a move. So a device with more room than the application was granted must not get such a
    /// receive.
    fn takes_receive(&self, pieces: usize, has_device: bool) -> Result<(), c_int> {
        let told = &self.init.cap;
        let full = if has_device {
            self.receives.room() == 0
        } else {
            self.receives.waiting() >= told.max_recv_wr
        };
        if pieces > told.max_recv_sge as usize {
            Err(libc::EINVAL)
        } else if full {
            Err(libc::ENOMEM)
        } else {
            Ok(())
        }
    }
}

/// `ibv_post_recv`
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let shadow = &*qp.cast::<ShadowQp>();
    match shadow.lane.enter() {
        Some(mut lane)
            if lane.plain
                && !first.is_null()
                && (*first).next.is_null()
                && shadow.receives.room() > 0 =>
        {
            lane.pass_on_receive(shadow, first, bad)
        }
        Some(lane) => {
            cold_path();
            post_recv_others(lane, shadow, first, bad)
        }
        None => post_recv_slowly(shadow, first, bad),
    }
}

/// As [`post_send_others`].
#[inline(never)]
unsafe extern "C" fn post_recv_others(
    mut lane: Inside<'_, QpLane>,
    shadow: &ShadowQp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    if lane.plain {
        lane.pass_on_receives(shadow, first, bad)
    } else {
        let noted_by = lane.notes.then_some(shadow);
        lane.receive(noted_by, first, bad)
    }
}

#[cold]
unsafe extern "C" fn post_recv_slowly(
    shadow: &ShadowQp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let mut lane = shadow.lane.lock();
    // A suspended queue pair still receives: messages that the peer sent before need a place.
    let noted_by = lane.notes.then_some(shadow);
    let result = lane.receive(noted_by, first, bad);
    // An owner's next request to send would overtake the kept ones.
    if !lane.suspended && lane.kept.is_empty() {
        lane.own();
    }
    result
}
