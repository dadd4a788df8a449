//! The frames of a connection: headers, and data that lies elsewhere.

use std::rc::Rc;

use godwit_core::action::SourceSlot;
use godwit_core::request::RequestTag;

use super::packing::{Packing, What};
use crate::page_buffers::Mapping;

/// Longest header, with the bytes behind the header inside a frame.
const HEADER: usize = 64;

/// The owner of a payload's memory, which stays in place until the payload has been sent.
#[derive(Debug)]
pub enum Keep {
    /// The buffer of a request's slot, on which a hold was taken.
    Slot(RequestTag),
    /// The buffer of a chunk's slot, on which a hold was taken, and the mapping it lies in.
    Chunk {
        /// The chunk's slot.
        slot: SourceSlot,
        /// Mapping around the buffer.
        memory: Rc<Mapping>,
    },
    /// The compressed data.
    Packed(Vec<u8>),
}

/// The bytes behind a frame's header.
#[derive(Debug)]
pub struct Payload {
    pointer: *const u8,
    pub(super) length: usize,
    /// Owner of the memory until the payload has left.
    pub keep: Keep,
}

impl Payload {
    /// # Safety
    /// The owner that `keep` names holds the `length` bytes at `pointer` in place, initialised and unchanged, until the
    /// payload is released.
    pub const unsafe fn new(pointer: *const u8, length: usize, keep: Keep) -> Self {
        Self {
            pointer,
            length,
            keep,
        }
    }

    /// Returns the data.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as `new` was promised.
        unsafe { std::slice::from_raw_parts(self.pointer, self.length) }
    }
}

/// A header and its payload.
#[derive(Debug)]
pub struct Frame {
    header: [u8; HEADER],
    header_length: usize,
    pub(super) payload: Option<Payload>,
    /// Progress of compression, if the frame must be compressed before it leaves.
    pub(super) packing: Option<Packing>,
}

impl Frame {
    /// Returns a frame that starts with the concatenation of `parts`, at most 64 bytes in all.
    pub fn new(parts: &[&[u8]], payload: Option<Payload>) -> Self {
        let mut header = [0; HEADER];
        let mut header_length = 0;
        for part in parts {
            header[header_length..header_length + part.len()].copy_from_slice(part);
            header_length += part.len();
        }
        Self {
            header,
            header_length,
            payload,
            packing: None,
        }
    }

    /// Returns the frame, marked to wait until its payload is compressed: see [`Outbox::pack`](super::Outbox::pack).
    /// The frame must begin with a [`Header`](godwit_core::wire::Header). A frame without a payload does not wait.
    pub fn packed_first(mut self, what: What) -> Self {
        self.packing = self.payload.is_some().then(|| Packing::new(what));
        self
    }

    /// Returns the bytes after the first `done`, up to the end of the header or of the payload.
    pub(super) fn rest(&self, done: usize) -> &[u8] {
        let header = &self.header[..self.header_length];
        match &self.payload {
            Some(payload) if done >= header.len() => &payload.bytes()[done - header.len()..],
            _ => &header[done..],
        }
    }

    pub(super) fn length(&self) -> usize {
        self.header_length + self.payload.as_ref().map_or(0, |payload| payload.length)
    }

    pub(super) fn header(&self) -> &[u8] {
        &self.header[..self.header_length]
    }

    pub(super) fn header_mut(&mut self) -> &mut [u8] {
        &mut self.header[..self.header_length]
    }
}
