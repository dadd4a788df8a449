//! A request as the guest lays it out: a chain of descriptors.
//!
//! Anything in a chain may be wrong. A chain without a reachable end stops its ring.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use crate::memory::{DESCRIPTOR, Segment};

/// Descriptors followed in a chain, and so pieces of data in a request.
pub const MOST_SEGMENTS: usize = 256;

/// The reason for the end of a ring's service.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The next descriptor does not exist, or lies outside of memory.
    #[error("descriptor {0} of a chain does not exist")]
    Missing(u16),
    /// More descriptors than a request can have, or a loop.
    #[error("a chain has more than {MOST_SEGMENTS} descriptors, or is a loop")]
    Endless,
    /// A table within a table, or a table of a wrong length.
    #[error("a chain has an invalid table of descriptors")]
    Table,
    /// The request has no byte for the status.
    #[error("a request has no place for its status")]
    NoStatus,
}

/// The descriptors of a chain. The memory is reused for the next chain.
#[derive(Debug, Default)]
pub struct Chain {
    /// Segments that the device may read.
    pub readable: Vec<Segment>,
    /// Segments that the device may write.
    pub writable: Vec<Segment>,
    /// True if a descriptor is empty or out of order: the request must fail.
    pub malformed: bool,
}

impl Chain {
    /// Follows the chain that starts at `head` of the table at `table`, which has `size` descriptors.
    ///
    /// # Errors
    /// The chain has no reachable end.
    pub fn follow(
        &mut self,
        memory: &impl GuestMemory,
        table: GuestAddress,
        size: u16,
        head: u16,
    ) -> Result<(), ChainError> {
        self.readable.clear();
        self.writable.clear();
        self.malformed = false;
        let (mut table, mut size, mut next) = (table, size, head);
        let mut indirect = false;
        for _ in 0..=MOST_SEGMENTS {
            let missing = ChainError::Missing(next);
            if next >= size {
                return Err(missing);
            }
            let Some(address) = table.0.checked_add(u64::from(next) * DESCRIPTOR) else {
                return Err(missing);
            };
            let Ok(descriptor) = memory.read_obj::<Descriptor>(GuestAddress(address)) else {
                return Err(missing);
            };
            if descriptor.refers_to_indirect_table() {
                let length = u64::from(descriptor.len());
                let entries = length / DESCRIPTOR;
                // The last descriptor of a chain, and the only table in the chain.
                let fits = length.is_multiple_of(DESCRIPTOR)
                    && (1..=u64::from(u16::MAX)).contains(&entries);
                if indirect || descriptor.has_next() || !fits {
                    return Err(ChainError::Table);
                }
                indirect = true;
                (table, size, next) = (descriptor.addr(), entries as u16, 0);
                continue;
            }
            let segment = Segment {
                address: descriptor.addr().0,
                length: descriptor.len(),
            };
            if descriptor.is_write_only() {
                self.writable.push(segment);
            } else {
                self.malformed |= !self.writable.is_empty();
                self.readable.push(segment);
            }
            self.malformed |= segment.length == 0;
            if !descriptor.has_next() {
                return Ok(());
            }
            next = descriptor.next();
        }
        Err(ChainError::Endless)
    }

    /// Drops the first `length` bytes of the readable part. Returns false if there are fewer.
    pub fn skip(&mut self, mut length: u32) -> bool {
        let mut used = 0;
        for segment in &mut self.readable {
            if segment.length > length {
                segment.address = segment.address.wrapping_add(u64::from(length));
                segment.length -= length;
                length = 0;
                break;
            }
            length -= segment.length;
            used += 1;
        }
        self.readable.drain(..used);
        length == 0
    }
}

/// Returns the first `N` bytes of the segments, each read once: the guest may change them at any time. `None` if there
/// are fewer, or some are not memory.
pub fn copy<const N: usize>(memory: &impl GuestMemory, segments: &[Segment]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    for segment in segments {
        let length = (segment.length as usize).min(N - filled);
        memory
            .read_slice(
                &mut bytes[filled..filled + length],
                GuestAddress(segment.address),
            )
            .ok()?;
        filled += length;
    }
    (filled == N).then_some(bytes)
}

/// Returns true if all segments lie in the guest's memory.
pub fn are_memory(memory: &impl GuestMemory, segments: &[Segment]) -> bool {
    segments
        .iter()
        .all(|segment| is_memory(memory, segment.address, segment.length))
}

/// Returns true if the range lies in the guest's memory.
pub fn is_memory(memory: &impl GuestMemory, address: u64, length: u32) -> bool {
    let access = vm_memory::Permissions::ReadWrite;
    memory.check_range(GuestAddress(address), length as usize, access)
}
