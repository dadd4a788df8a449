//! Requests of virtio-blk: a header, data and a status in a chain of descriptors.
//!
//! Anything in a chain may be wrong. A wrong request gets an error where an answer is possible; a chain without a place
//! for the answer stops its ring.

use godwit_core::units::{Extent, Lba, SECTOR_SIZE, Sectors};
use virtio_bindings::bindings::virtio_blk as blk;
use vm_memory::GuestMemory;

use godwit_vhost::memory::Segment;
use godwit_vhost::rings::chain::{Chain, ChainError, are_memory, copy, is_memory};

/// Bytes of the header: type, reserved, sector.
const HEADER: u32 = 16;

/// Bytes of the range in a discard or write-zeroes: sector, sectors, flags.
const RANGE: u32 = 16;

/// Bytes of the disk's serial number.
pub const SERIAL: usize = 20;

/// Returns the serial number of a disk of this name: the first 20 bytes of the name, padded with zeroes.
pub(crate) fn serial_number(name: &str) -> [u8; SERIAL] {
    let mut number = [0; SERIAL];
    let length = name.len().min(SERIAL);
    number[..length].copy_from_slice(&name.as_bytes()[..length]);
    number
}

/// The range's space may be released.
const UNMAP: u32 = 1;

/// Done.
pub const STATUS_OK: u8 = blk::VIRTIO_BLK_S_OK as u8;
/// Failed.
pub const STATUS_ERROR: u8 = blk::VIRTIO_BLK_S_IOERR as u8;
/// Not supported by this device.
pub const STATUS_UNSUPPORTED: u8 = blk::VIRTIO_BLK_S_UNSUPP as u8;

/// The operation of a request.
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
        /// Extent to zero.
        extent: Extent,
        /// True if the space may be released.
        unmap: bool,
    },
    /// Put the serial number into the data.
    Identify,
    /// An impossible request: answer with this status.
    Refused(u8),
}

/// A request that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Operation of the request.
    pub asked: Asked,
    /// Guest-physical address of the status byte.
    pub status: u64,
}

/// Parses the request in `chain` for a disk of `capacity` sectors. Leaves the data in `data`: guest memory of exactly
/// the extent's length for reads and writes.
///
/// # Errors
/// The request cannot even be answered.
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

/// Takes the last writable byte off the chain.
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
    let header: [u8; HEADER as usize] = copy(memory, &chain.readable).ok_or(STATUS_ERROR)?;
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

/// Returns the extent at `sector` with the length of the data.
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

/// Returns the single range of a discard or write-zeroes.
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
    let range: [u8; RANGE as usize] = copy(memory, &chain.readable).ok_or(STATUS_ERROR)?;
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

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
