//! The configuration that a guest reads from the device, and the features that go with it.

use godwit_core::units::{MAX_EXTENT_SECTORS, Sectors};
use godwit_vhost::features::MOST_RINGS;
use virtio_bindings::bindings::virtio_blk as blk;

/// Most pieces of data in a request of the guest: the number that fits into the smallest usual ring, of 128
/// descriptors, with a header and a status.
const SEGMENTS: u32 = 126;

/// Longest configuration that a front end can ask for, in bytes.
const LONGEST: usize = 256;

/// The guest flushes; without this feature each write is durable before its answer.
pub(crate) const FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;

/// Features of the device beside the features of every device.
pub(crate) const FEATURES: u64 = 1 << blk::VIRTIO_BLK_F_SEG_MAX
    | 1 << blk::VIRTIO_BLK_F_BLK_SIZE
    | FLUSH
    | 1 << blk::VIRTIO_BLK_F_MQ
    | 1 << blk::VIRTIO_BLK_F_DISCARD
    | 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;

/// Returns `size` bytes from `offset` of a disk's configuration; `None` if the range ends past the longest possible
/// configuration. Fields unknown to this device read as zero.
pub(crate) fn read(capacity: Sectors, offset: u32, size: u32) -> Option<Vec<u8>> {
    let mut space = [0_u8; LONGEST];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    // Offsets of the fields of `struct virtio_blk_config`.
    put(0, &capacity.0.to_le_bytes());
    put(12, &SEGMENTS.to_le_bytes());
    put(20, &512_u32.to_le_bytes());
    put(34, &MOST_RINGS.to_le_bytes());
    put(36, &MAX_EXTENT_SECTORS.to_le_bytes()); // max_discard_sectors
    put(40, &1_u32.to_le_bytes()); // max_discard_seg
    put(44, &8_u32.to_le_bytes()); // discard_sector_alignment
    put(48, &MAX_EXTENT_SECTORS.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &1_u32.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[1]); // write_zeroes_may_unmap
    let end = offset.checked_add(size)? as usize;
    space.get(offset as usize..end).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_says_what_the_disk_can_do() {
        let space = read(Sectors(0x1_0000_0001), 0, 60).expect("it");
        assert_eq!(space.len(), 60);
        assert_eq!(space[..8], 0x1_0000_0001_u64.to_le_bytes());
        assert_eq!(space[8..12], [0; 4], "no limit on a segment's size");
        assert_eq!(space[20..24], 512_u32.to_le_bytes());
        assert_eq!(space[34..36], 16_u16.to_le_bytes());
    }

    #[test]
    fn only_what_exists_is_read() {
        assert_eq!(read(Sectors(1), 250, 6), Some(vec![0; 6]));
        assert_eq!(read(Sectors(1), 250, 7), None);
        assert_eq!(read(Sectors(1), u32::MAX, 1), None);
        assert_eq!(read(Sectors(1), 1, u32::MAX), None);
    }
}
