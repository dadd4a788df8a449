//! Block status: the allocated ranges.

use super::RequestHeader;
use crate::nbd::constants::{
    BASE_ALLOCATION_ID, REPLY_FLAG_DONE, REPLY_TYPE_BLOCK_STATUS, STATE_HOLE, STATE_ZERO,
    STRUCTURED_REPLY_MAGIC,
};

/// The allocation of a range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Length in bytes: not zero.
    pub length: u32,
    /// True if the range takes no space and reads as zeroes. Other ranges may hold anything.
    pub hole: bool,
}

/// Returns the whole reply to [`Command::BlockStatus`](super::Command::BlockStatus): consecutive ranges from the
/// request's offset. There must be at least one.
pub fn block_status(request: &RequestHeader, ranges: &[Allocation]) -> Vec<u8> {
    // The caller keeps the ranges few.
    let length = 4 + 8 * ranges.len() as u32;
    let mut bytes = Vec::with_capacity(20 + length as usize);
    bytes.extend_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&REPLY_FLAG_DONE.to_be_bytes());
    bytes.extend_from_slice(&REPLY_TYPE_BLOCK_STATUS.to_be_bytes());
    bytes.extend_from_slice(&request.cookie.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
    for range in ranges {
        let state = if range.hole {
            STATE_HOLE | STATE_ZERO
        } else {
            0
        };
        bytes.extend_from_slice(&range.length.to_be_bytes());
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes
}
