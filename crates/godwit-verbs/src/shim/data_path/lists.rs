//! The memory in which an application builds requests, call by call. The memory is allocated with the queue pair, for
//! the queue pair's capacity.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};
use std::hint::cold_path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::windows;
use crate::abi::*;
use crate::shim::objects::BATCH_PIECES;

/// The list of a queue pair.
pub(in crate::shim) struct RequestList {
    /// True while a thread is between `wr_start` and the end of its list.
    taken: AtomicBool,
    requests: UnsafeCell<Requests>,
}

/// A request of a list.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Listed {
    request: ibv_send_wr,
    /// The key in the window's structure when the application asked for the binding. The application may change the
    /// structure before the list is posted.
    window_key: u32,
}

/// As [`windows::key_of`], for a request of a list.
pub(super) unsafe fn key_of(request: *const ibv_send_wr) -> Option<u32> {
    windows::key_of(request)?;
    Some((*request.cast::<Listed>()).window_key)
}

/// The requests of a list. No vector grows beyond its allocation, so pointers in requests stay valid.
pub(super) struct Requests {
    max_requests: usize,
    max_pieces: usize,
    max_data: usize,
    requests: Vec<Listed>,
    pieces: Vec<ibv_sge>,
    /// Inline data.
    data: Vec<u8>,
    /// Begin of the last request's pieces and data.
    pieces_before: usize,
    data_before: usize,
    /// The first error; 0 for none.
    error: c_int,
}

impl RequestList {
    /// Returns a list for a queue pair with these capacities; none without enough memory.
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

    /// Begins a list, after the end of another thread's list.
    #[inline]
    pub(super) fn take(&self) {
        while self.taken.swap(true, Ordering::Acquire) {
            cold_path();
            while self.taken.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
    }

    /// Returns the requests, only for the thread that has taken the list.
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
    /// Returns the first request, if any, or the first error of the list.
    #[inline]
    pub(super) fn whole(&mut self) -> Result<Option<*mut ibv_send_wr>, c_int> {
        if self.error != 0 {
            return Err(self.error);
        }
        // Derived from the whole vector: the other elements are reached from this pointer.
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
        // The way in which data is attached decides about inline data.
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

    /// Changes the last request.
    #[inline]
    pub(super) fn change(&mut self, change: impl FnOnce(&mut ibv_send_wr)) {
        match self.requests.last_mut() {
            Some(last) if self.error == 0 => change(&mut last.request),
            _ => self.fails(libc::EINVAL),
        }
    }

    /// Sets the pieces of the last request.
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

    /// Sets a copy of this data as the inline data of the last request.
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
