//! Replies: up to 28 bytes, followed by the data of a read.

use super::RequestHeader;
use crate::nbd::Errno;
use crate::nbd::constants::{
    REPLY_FLAG_DONE, REPLY_TYPE_ERROR, REPLY_TYPE_OFFSET_DATA, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC,
};

/// The bytes that answer a request. The data of a successful read follows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    bytes: [u8; Self::MAX_SIZE],
    length: u8,
}

impl ReplyHeader {
    /// Longest reply without data, in bytes.
    pub const MAX_SIZE: usize = 28;

    /// Returns the reply to `request`. With structured replies negotiated, reads get one in a single piece, even
    /// unasked, and so do failed queries for block status, which [`block_status`](super::block_status) answers on
    /// success. Everything else gets a simple reply, as the protocol requires.
    pub fn new(request: &RequestHeader, structured: bool, result: Result<(), Errno>) -> Self {
        let chunked = request.is_read() || request.is_block_status() && result.is_err();
        match (chunked && structured, result) {
            (false, result) => Self::simple(request.cookie, result),
            (true, Ok(())) => Self::offset_data(request),
            (true, Err(errno)) => Self::structured_error(request.cookie, errno),
        }
    }

    /// Returns the header for a part of a read's data, `length` bytes from `offset`, for a client that [takes
    /// chunks](RequestHeader::takes_chunks). `last` is true if nothing else follows.
    pub fn chunk(request: &RequestHeader, offset: u64, length: u32, last: bool) -> Self {
        let part = RequestHeader {
            offset,
            length,
            ..*request
        };
        let mut reply = Self::offset_data(&part);
        let flags = if last { REPLY_FLAG_DONE } else { 0 };
        reply.bytes[4..6].copy_from_slice(&flags.to_be_bytes());
        reply
    }

    /// Returns the bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        // `length` is 16, 26 or 28 by construction.
        &self.bytes[..usize::from(self.length)]
    }

    fn simple(cookie: u64, result: Result<(), Errno>) -> Self {
        let error = match result {
            Ok(()) => 0,
            Err(errno) => errno.code(),
        };
        let mut bytes = [0; Self::MAX_SIZE];
        bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&error.to_be_bytes());
        bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
        Self { bytes, length: 16 }
    }

    fn offset_data(request: &RequestHeader) -> Self {
        // Reads longer than 32 MiB were refused, so the offset's 8 bytes still fit.
        let length = request.length.saturating_add(8);
        let mut bytes = chunk(request.cookie, REPLY_TYPE_OFFSET_DATA, length);
        bytes[20..28].copy_from_slice(&request.offset.to_be_bytes());
        Self { bytes, length: 28 }
    }

    fn structured_error(cookie: u64, errno: Errno) -> Self {
        // The number, then the length of a message that is left out.
        let mut bytes = chunk(cookie, REPLY_TYPE_ERROR, 6);
        bytes[20..24].copy_from_slice(&errno.code().to_be_bytes());
        Self { bytes, length: 26 }
    }
}

fn chunk(cookie: u64, kind: u16, length: u32) -> [u8; ReplyHeader::MAX_SIZE] {
    let mut bytes = [0; ReplyHeader::MAX_SIZE];
    bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&REPLY_FLAG_DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..20].copy_from_slice(&length.to_be_bytes());
    bytes
}
