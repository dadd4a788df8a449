//! Requests as the guest lays them out: a chain of descriptors, in it a header, data and a status.
//!
//! Everything in a chain is the guest's to get wrong. What can be answered is answered with an
//! error; a chain without a place for the answer stops its ring.

use godwit_core::units::{Extent, Lba, SECTOR_SIZE, Sectors};
use virtio_bindings::bindings::virtio_blk as blk;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::memory::{DESCRIPTOR, Segment};

/// Descriptors followed in one chain, and so pieces of data in a request.
pub const MOST_SEGMENTS: usize = 256;

/// Bytes of the header: type, reserved, sector.
const HEADER: u32 = 16;

/// Bytes of a discard's or write-zeroes' range: sector, sectors, flags.
const RANGE: u32 = 16;

/// Bytes of the disk's serial number.
pub const SERIAL: usize = 20;

/// The range's space may be released.
const UNMAP: u32 = 1;

/// Done.
pub const STATUS_OK: u8 = blk::VIRTIO_BLK_S_OK as u8;
/// Failed.
pub const STATUS_ERROR: u8 = blk::VIRTIO_BLK_S_IOERR as u8;
/// Not something that this device does.
pub const STATUS_UNSUPPORTED: u8 = blk::VIRTIO_BLK_S_UNSUPP as u8;

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
    fn skip(&mut self, mut length: u32) -> bool {
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

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Fill the data from the extent.
    Read(Extent),
    /// Store the data.
    Write(Extent),
    /// Make everything durable.
    Flush,
    /// Make the extent read as zeroes.
    Zero {
        /// Where.
        extent: Extent,
        /// The space may be released.
        unmap: bool,
    },
    /// Put the serial number into the data.
    Identify,
    /// Nothing that can be done: answer with this status.
    Refused(u8),
}

/// A request that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// What is asked.
    pub asked: Asked,
    /// Guest-physical address of the status byte.
    pub status: u64,
}

/// Understands the request in `chain` for a disk of `capacity` sectors, and leaves its data in
/// `data`: guest memory of exactly the extent's length for reads and writes.
///
/// # Errors
/// When it cannot even be answered.
pub fn parse(
    memory: &impl GuestMemory,
    chain: &mut Chain,
    capacity: Sectors,
    data: &mut Vec<Segment>,
) -> Result<Parsed, ChainError> {
    data.clear();
    let status = take_status(memory, chain)?;
    let asked = understand(memory, chain, capacity, data).unwrap_or_else(Asked::Refused);
    Ok(Parsed { asked, status })
}

/// Takes the last byte that the device may write off the chain.
fn take_status(memory: &impl GuestMemory, chain: &mut Chain) -> Result<u64, ChainError> {
    let last = chain.writable.last_mut().ok_or(ChainError::NoStatus)?;
    last.length = last.length.checked_sub(1).ok_or(ChainError::NoStatus)?;
    let status = last
        .address
        .checked_add(u64::from(last.length))
        .ok_or(ChainError::NoStatus)?;
    if last.length == 0 {
        chain.writable.pop();
    }
    if !is_memory(memory, status, 1) {
        return Err(ChainError::NoStatus);
    }
    Ok(status)
}

fn understand(
    memory: &impl GuestMemory,
    chain: &mut Chain,
    capacity: Sectors,
    data: &mut Vec<Segment>,
) -> Result<Asked, u8> {
    if chain.malformed {
        return Err(STATUS_ERROR);
    }
    let header: [u8; HEADER as usize] = copy(memory, &chain.readable)?;
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    if !chain.skip(HEADER) {
        return Err(STATUS_ERROR);
    }
    match u32::from_le_bytes([k0, k1, k2, k3]) {
        blk::VIRTIO_BLK_T_IN => {
            std::mem::swap(data, &mut chain.writable);
            extent_of(memory, data, sector, capacity).map(Asked::Read)
        }
        blk::VIRTIO_BLK_T_OUT => {
            std::mem::swap(data, &mut chain.readable);
            extent_of(memory, data, sector, capacity).map(Asked::Write)
        }
        blk::VIRTIO_BLK_T_FLUSH => Ok(Asked::Flush),
        blk::VIRTIO_BLK_T_GET_ID => {
            std::mem::swap(data, &mut chain.writable);
            if data.is_empty() || !are_memory(memory, data) {
                return Err(STATUS_ERROR);
            }
            Ok(Asked::Identify)
        }
        blk::VIRTIO_BLK_T_DISCARD => range_of(memory, chain, capacity, false),
        blk::VIRTIO_BLK_T_WRITE_ZEROES => range_of(memory, chain, capacity, true),
        _ => Err(STATUS_UNSUPPORTED),
    }
}

/// The extent at `sector` that is as long as the data.
fn extent_of(
    memory: &impl GuestMemory,
    data: &[Segment],
    sector: u64,
    capacity: Sectors,
) -> Result<Extent, u8> {
    let bytes: u64 = data.iter().map(|segment| u64::from(segment.length)).sum();
    if !bytes.is_multiple_of(SECTOR_SIZE) || !are_memory(memory, data) {
        return Err(STATUS_ERROR);
    }
    checked(sector, bytes / SECTOR_SIZE, capacity)
}

/// The one range of a discard or write-zeroes.
fn range_of(
    memory: &impl GuestMemory,
    chain: &Chain,
    capacity: Sectors,
    may_unmap: bool,
) -> Result<Asked, u8> {
    let length: u64 = chain.readable.iter().map(|s| u64::from(s.length)).sum();
    if length != u64::from(RANGE) {
        // More than one range is more than the configuration offers.
        return Err(if length > u64::from(RANGE) {
            STATUS_UNSUPPORTED
        } else {
            STATUS_ERROR
        });
    }
    let range: [u8; RANGE as usize] = copy(memory, &chain.readable)?;
    let [s0, s1, s2, s3, s4, s5, s6, s7, c0, c1, c2, c3, flags @ ..] = range;
    let flags = u32::from_le_bytes(flags);
    let allowed = if may_unmap { UNMAP } else { 0 };
    if flags & !allowed != 0 {
        return Err(STATUS_UNSUPPORTED);
    }
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let count = u32::from_le_bytes([c0, c1, c2, c3]);
    let extent = checked(sector, u64::from(count), capacity)?;
    Ok(Asked::Zero {
        extent,
        unmap: !may_unmap || flags & UNMAP != 0,
    })
}

fn checked(sector: u64, count: u64, capacity: Sectors) -> Result<Extent, u8> {
    u32::try_from(count)
        .ok()
        .and_then(|count| Extent::new(Lba(sector), count))
        .filter(|extent| extent.within(capacity))
        .ok_or(STATUS_ERROR)
}

/// The first bytes of the segments, each read once: the guest may change them at any time.
fn copy<const N: usize>(memory: &impl GuestMemory, segments: &[Segment]) -> Result<[u8; N], u8> {
    let mut bytes = [0; N];
    let mut filled = 0;
    for segment in segments {
        let length = (segment.length as usize).min(N - filled);
        memory
            .read_slice(
                &mut bytes[filled..filled + length],
                GuestAddress(segment.address),
            )
            .map_err(|_| STATUS_ERROR)?;
        filled += length;
    }
    if filled < N {
        Err(STATUS_ERROR)
    } else {
        Ok(bytes)
    }
}

fn are_memory(memory: &impl GuestMemory, segments: &[Segment]) -> bool {
    segments
        .iter()
        .all(|segment| is_memory(memory, segment.address, segment.length))
}

fn is_memory(memory: &impl GuestMemory, address: u64, length: u32) -> bool {
    let access = vm_memory::Permissions::ReadWrite;
    memory.check_range(GuestAddress(address), length as usize, access)
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
