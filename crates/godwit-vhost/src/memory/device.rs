//! Guest memory in a part of a DAX device. Mappings of a DAX device begin and end at multiples of its alignment, which
//! are larger than pages. A region of guest memory need not, so the smallest enclosing part is mapped.

use std::fs::File;

use godwit_memory::dax::Geometry;
use godwit_memory::mapping::SharedMapping;

use crate::memory::MemoryError;

/// Maps `length` bytes from `offset` if the file is a DAX device. Returns the mapping, and the offset of the bytes in
/// the mapping.
pub(super) fn map(
    file: &File,
    offset: u64,
    length: u64,
) -> Result<Option<(SharedMapping, usize)>, MemoryError> {
    let geometry = Geometry::of(file).map_err(MemoryError::Inspect)?;
    match geometry.filter(|geometry| geometry.is_device) {
        Some(geometry) => map_part(file, geometry, offset, length).map(Some),
        None => Ok(None),
    }
}

fn map_part(
    file: &File,
    geometry: Geometry,
    offset: u64,
    length: u64,
) -> Result<(SharedMapping, usize), MemoryError> {
    let end = offset.saturating_add(length);
    let short = MemoryError::Short {
        size: geometry.bytes,
        end,
    };
    let Some((first, bytes)) = geometry.around(offset, length) else {
        return Err(short);
    };
    if end > geometry.bytes || first.saturating_add(bytes) > geometry.bytes {
        return Err(short);
    }
    let refused = |why: &dyn std::fmt::Display| MemoryError::Map(why.to_string());
    let size = |bytes: u64| usize::try_from(bytes).map_err(|error| refused(&error));
    let (bytes, skipped) = (size(bytes)?, size(offset - first)?);
    let mapping = SharedMapping::map(file, first, bytes).map_err(|error| refused(&error))?;
    Ok((mapping, skipped))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// A file stands for the device: mappings of a file may be finer, but are not here.
    #[test]
    fn a_region_is_mapped_that_begins_and_ends_inside_of_what_can_be_mapped() {
        const MIB: u64 = 1 << 20;
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8 * MIB).expect("grows");
        let geometry = Geometry {
            bytes: 8 * MIB,
            align: 2 * MIB,
            is_device: true,
        };
        let (offset, length) = (2 * MIB + 0xc_0000, 3 * MIB);
        file.write_all_at(&[7], offset).expect("writes");
        file.write_all_at(&[9], offset + length - 1)
            .expect("writes");
        let (mapping, skipped) = map_part(&file, geometry, offset, length).expect("is mapped");
        assert_eq!(mapping.bytes() as u64, 4 * MIB);
        // SAFETY: both are inside of the mapping.
        let ends = unsafe {
            let first = mapping.as_ptr().add(skipped);
            let last = first.add(length as usize - 1);
            [first.read_volatile(), last.read_volatile()]
        };
        assert_eq!(ends, [7, 9]);
        for (offset, length) in [(6 * MIB, 3 * MIB), (9 * MIB, 1), (u64::MAX, 4096)] {
            let refused = map_part(&file, geometry, offset, length);
            assert!(
                matches!(refused, Err(MemoryError::Short { .. })),
                "{offset}"
            );
        }
        assert!(map(&file, 0, 4096).expect("is looked at").is_none());
    }

    /// A real device, named by the environment: `make test-slow` boots a machine with a DAX device.
    #[test]
    #[ignore = "needs a DAX device: make test-slow"]
    fn a_region_of_a_dax_device_is_mapped() {
        let path = std::env::var_os("GODWIT_DAX_DEVICE").expect("a device");
        let file = File::options().read(true).write(true).open(path);
        let file = file.expect("opens");
        let (offset, length) = ((2 << 20) + 0xc_0000, 1 << 20);
        for value in [7, 9] {
            let byte = |offset, length, at| {
                let mapped = map(&file, offset, length).expect("is mapped");
                let (mapping, skipped) = mapped.expect("a device");
                // SAFETY: the byte is inside of the region, which stays mapped.
                let byte = unsafe { mapping.as_ptr().add(skipped + at) };
                (mapping, byte)
            };
            let (_mapping, written) = byte(offset, length, 0);
            // SAFETY: as above.
            unsafe { written.write_volatile(value) };
            let (_again, read) = byte(offset - 4096, 8192, 4096);
            // SAFETY: as above.
            let seen = unsafe { read.read_volatile() };
            assert_eq!(seen, value);
        }
        map(&file, 1 << 50, 4096).expect_err("is past its end");
    }
}
