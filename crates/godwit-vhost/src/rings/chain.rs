//! A request as the guest lays it out: a chain of descriptors.
//!
//! Everything in a chain is the guest's to get wrong. A chain whose end cannot be found stops its ring.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use crate::memory::{DESCRIPTOR, Segment};

/// Descriptors followed in one chain, and so pieces of data in a request.
pub const MOST_SEGMENTS: usize = 256;

/// Why a ring cannot be served any further.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// A descriptor names one that does not exist, or lies outside of memory.
    #[error("descriptor {0} of a chain does not exist")]
    Missing(u16),
    /// More descriptors than a request can have, or a loop.
    #[error("a chain has more than {MOST_SEGMENTS} descriptors, or is a loop")]
    Endless,
    /// A table within a table, or one whose length is wrong.
    #[error("a chain has an invalid table of descriptors")]
    Table,
    /// There is no byte to answer in.
    #[error("a request has no place for its status")]
    NoStatus,
}

/// The descriptors of a chain, to be used again for the next.
#[derive(Debug, Default)]
pub struct Chain {
    /// What the device may read.
    pub readable: Vec<Segment>,
    /// What the device may write.
    pub writable: Vec<Segment>,
    /// An empty descriptor, or one in the wrong order: the request must fail.
    pub malformed: bool,
}

impl Chain {
    /// Follows the chain that starts at `head` of the table at `table`, which has `size`
    /// descriptors.
    ///
    /// # Errors
    /// When its end cannot be found.
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
                // The last of a chain, and the only table in it.
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

    /// Takes the first `length` bytes off the readable part. False when there are fewer.
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

/// The first `N` bytes of the segments, each read once: the guest may change them at any time. `None`
/// when there are fewer, or some are not memory.
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

/// Whether all of the segments lie in the guest's memory.
pub fn are_memory(memory: &impl GuestMemory, segments: &[Segment]) -> bool {
    segments
        .iter()
        .all(|segment| is_memory(memory, segment.address, segment.length))
}

/// Whether the range lies in the guest's memory.
pub fn is_memory(memory: &impl GuestMemory, address: u64, length: u32) -> bool {
    let access = vm_memory::Permissions::ReadWrite;
    memory.check_range(GuestAddress(address), length as usize, access)
}
