//! Answers to clients about allocated ranges of the disk, and about cheap zeroes.

use crate::engine::connections::ConnectionKey;
use crate::engine::run::Engine;
use crate::image::extents::extent_at;
use crate::nbd::{Allocation, RequestHeader, block_status};
use godwit_io::stream::{Frame, Keep, Payload};

/// Most ranges in one answer: each costs two system calls, for which the disk's other clients wait.
const MOST_RANGES: usize = 64;

impl Engine {
    /// Returns true if the local image is the whole disk. False while the disk moves, here or away, and while another
    /// node owns the disk.
    fn image_is_the_disk(&self) -> bool {
        self.cx.core.is_alone()
    }

    /// Returns true if zeroes are made faster here than by writing them.
    pub(in crate::engine) fn zeroes_fast(&mut self) -> bool {
        self.image_is_the_disk() && self.disk.zeroes_fast()
    }

    /// Tells a client the allocated parts of a range, in bytes. Parts not known to be holes are reported as data, which
    /// is always safe: the client reads them.
    pub(in crate::engine) fn tell_allocation(
        &mut self,
        key: ConnectionKey,
        request: &RequestHeader,
        range: (u64, u32),
        one: bool,
    ) {
        let ranges = self.allocation(range, if one { 1 } else { MOST_RANGES });
        let reply = block_status(request, &ranges);
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let (bytes, length) = (reply.as_ptr(), reply.len());
        // SAFETY: the bytes of a vector stay in place when the vector moves, and no code changes them.
        let payload = unsafe { Payload::new(bytes, length, Keep::Packed(reply)) };
        connection.stream.queue(Frame::new(&[], Some(payload)));
        self.connections.mark(key);
    }

    /// Returns the parts of a range from its start, at least one and at most `most`.
    fn allocation(&self, (offset, length): (u64, u32), most: usize) -> Vec<Allocation> {
        let end = offset + u64::from(length);
        if !self.image_is_the_disk() {
            return vec![Allocation {
                length,
                hole: false,
            }];
        }
        let mut ranges: Vec<Allocation> = Vec::new();
        let mut at = offset;
        // Neighbours may be merged, so the number of ranges alone does not bound the work.
        for _ in 0..most {
            if at >= end {
                break;
            }
            let found = extent_at(self.disk.file(), at, end);
            // A reader may already have seen a pending write, which must not be denied afterwards.
            let hole = found.hole && !self.disk.is_changing(at, found.end);
            // Within the request, whose length fits.
            let length = (found.end - at) as u32;
            match ranges.last_mut() {
                Some(last) if last.hole == hole => last.length += length,
                _ => ranges.push(Allocation { length, hole }),
            }
            at = found.end;
        }
        ranges
    }
}
