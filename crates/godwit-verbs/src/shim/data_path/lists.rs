//! The memory in which an application puts requests together, call by call. It is allocated with the queue pair, for as
//! many requests as fit there.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};
use std::hint::cold_path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::windows;
use crate::abi::*;
use crate::shim::objects::BATCH_PIECES;

/// The list of a queue pair.
pub(in crate::shim) struct RequestList {
    /// Whether a thread is between `wr_start` and the end of its list.
    taken: AtomicBool,
    requests: UnsafeCell<Requests>,
}

/// One request of a list.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Listed {
    request: ibv_send_wr,
    /// The key that the window's structure had when the application asked to bind it. It may change the structure before the
    /// list is posted.
    window_key: u32,
}

/// As [`windows::key_of`], for a request of a list.
pub(super) unsafe fn key_of(request: *const ibv_send_wr) -> Option<u32> {
    windows::key_of(request)?;
    Some((*request.cast::<Listed>()).window_key)
}

/// What was put together. None of these grows beyond what it was allocated with, so what requests point to stays.
pub(super) struct Requests {
    max_requests: usize,
    max_pieces: usize,
    max_data: usize,
    requests: Vec<Listed>,
    pieces: Vec<ibv_sge>,
    /// Data that was to be taken at once.
    data: Vec<u8>,
    /// Where the pieces and the data of the last request begin.
    pieces_before: usize,
    data_before: usize,
    /// The first error; 0 for none.
    error: c_int,
}

impl RequestList {
    /// A list for a queue pair with this room. Nothing if there is no memory for it.
    pub(in crate::shim) fn new(room: &ibv_qp_cap) -> Option<Self> {
        fn reserved<T>(requests: usize, each: usize) -> Option<Vec<T>> {
            let mut all = Vec::new();
            all.try_reserve_exact(requests.checked_mul(each)?).ok()?;
            Some(all)
        }
        let max_requests = room.max_send_wr as usize;
        let max_pieces = (room.max_send_sge as usize).min(BATCH_PIECES);
        let max_data = room.max_inline_data as usize;
        Some(Self {
            taken: AtomicBool::new(false),
            requests: UnsafeCell::new(Requests {
                max_requests,
                max_pieces,
                max_data,
                requests: reserved(max_requests, 1)?,
                pieces: reserved(max_requests, max_pieces)?,
                data: reserved(max_requests, max_data)?,
                pieces_before: 0,
                data_before: 0,
                error: 0,
            }),
        })
    }

    /// Begins a list. Another thread's is waited for.
    #[inline]
    pub(super) fn take(&self) {
        while self.taken.swap(true, Ordering::Acquire) {
            cold_path();
            while self.taken.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
    }

    /// What the list has; only for the thread that has taken it.
    #[inline]
    pub(super) fn requests(&self) -> *mut Requests {
        self.requests.get()
    }

    /// Empties the list and lets another thread begin one.
    #[inline]
    pub(super) unsafe fn let_go(&self) {
        (*self.requests()).clear();
        self.taken.store(false, Ordering::Release);
    }
}

impl Requests {
    /// The first request, if there is any; or the error that was made on the way.
    #[inline]
    pub(super) fn whole(&mut self) -> Result<Option<*mut ibv_send_wr>, c_int> {
        if self.error != 0 {
            return Err(self.error);
        }
        // Not of the first element alone: the others are reached from it.
        let first = self.requests.as_mut_ptr();
        Ok((!self.requests.is_empty()).then_some(first.cast()))
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.pieces.clear();
        self.data.clear();
        (self.pieces_before, self.data_before, self.error) = (0, 0, 0);
    }

    fn fails(&mut self, error: c_int) {
        cold_path();
        if self.error == 0 {
            self.error = error;
        }
    }

    /// Adds a request without data, which `fill` completes.
    #[inline]
    pub(super) unsafe fn add(
        &mut self,
        wr_id: u64,
        flags: c_uint,
        opcode: c_int,
        fill: impl FnOnce(&mut ibv_send_wr),
    ) {
        let count = self.requests.len();
        if self.error != 0 || count == self.max_requests {
            return self.fails(libc::ENOMEM);
        }
        // SAFETY: integers, null pointers and a union of both.
        let mut listed: Listed = std::mem::zeroed();
        let request = &mut listed.request;
        (request.wr_id, request.opcode) = (wr_id, opcode);
        // Whether data is taken at once is said by how it is attached.
        request.send_flags = flags & !IBV_SEND_INLINE;
        fill(request);
        if opcode == IBV_WR_BIND_MW {
            listed.window_key = (*request.bind_mw.mw).rkey;
        }
        self.requests.push(listed);
        (self.pieces_before, self.data_before) = (self.pieces.len(), self.data.len());
        if count > 0 {
            let all = self.requests.as_mut_ptr();
            // SAFETY: both are in the list.
            (*all.add(count - 1)).request.next = all.add(count).cast();
        }
    }

    /// The last request, to be changed.
    #[inline]
    pub(super) fn change(&mut self, change: impl FnOnce(&mut ibv_send_wr)) {
        match self.requests.last_mut() {
            Some(last) if self.error == 0 => change(&mut last.request),
            _ => self.fails(libc::EINVAL),
        }
    }

    /// Has the last request send these pieces, or receive into them.
    #[inline]
    pub(super) fn attach(&mut self, pieces: &[ibv_sge]) {
        self.data.truncate(self.data_before);
        self.attach_with(0, pieces);
    }

    #[inline]
    fn attach_with(&mut self, flags: c_uint, pieces: &[ibv_sge]) {
        let fits = pieces.len() <= self.max_pieces;
        match self.requests.last_mut() {
            Some(last) if self.error == 0 && fits && !last.request.is_local() => {
                let request = &mut last.request;
                self.pieces.truncate(self.pieces_before);
                self.pieces.extend_from_slice(pieces);
                // SAFETY: that many are there.
                request.sg_list = unsafe { self.pieces.as_mut_ptr().add(self.pieces_before) };
                request.num_sge = pieces.len() as c_int;
                request.send_flags = request.send_flags & !IBV_SEND_INLINE | flags;
            }
            _ => self.fails(libc::EINVAL),
        }
    }

    /// Has the last request send a copy of this data.
    #[inline]
    pub(super) unsafe fn attach_copy(&mut self, parts: &[ibv_data_buf]) {
        let lengths = parts.iter().map(|part| part.length);
        let length = lengths.fold(0, usize::saturating_add);
        if self.error != 0 || self.requests.is_empty() || length > self.max_data {
            return self.fails(libc::EINVAL);
        }
        self.data.truncate(self.data_before);
        for part in parts.iter().filter(|part| part.length > 0) {
            let bytes = std::slice::from_raw_parts(part.addr.cast::<u8>(), part.length);
            self.data.extend_from_slice(bytes);
        }
        let copy = ibv_sge {
            addr: self.data.as_ptr().add(self.data_before) as u64,
            length: length as u32,
            lkey: 0,
        };
        self.attach_with(IBV_SEND_INLINE, &[copy]);
    }
}
