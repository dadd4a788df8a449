//! Guest memory in a part of a DAX device. Mappings of one begin and end at multiples of its alignment, which are larger
//! than pages, and a region of guest memory need not: so the least part that has the region is mapped.

use std::fs::File;
use std::os::fd::AsFd;

use godwit_memory::dax::Geometry;
use rustix::mm::{MapFlags, ProtFlags};
use vm_memory::MmapRegion;
use vm_memory::mmap::MmapRegionBuilder;

use crate::memory::MemoryError;

/// A mapping of a part of a device.
#[derive(Debug)]
pub(crate) struct DeviceMapping {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: only its end uses the address.
unsafe impl Send for DeviceMapping {}
// SAFETY: as above.
unsafe impl Sync for DeviceMapping {}

impl DeviceMapping {
    /// Maps `length` bytes from `offset` on, if the file is a DAX device; gives what is mapped, and the region in it, which
    /// must not be used any longer than that.
    pub(crate) fn of(
        file: &File,
        offset: u64,
        length: u64,
    ) -> Result<Option<(Self, MmapRegion)>, MemoryError> {
        let geometry = Geometry::of(file).map_err(MemoryError::Inspect)?;
        match geometry.filter(|geometry| geometry.is_device) {
            Some(geometry) => Self::map(file, geometry, offset, length).map(Some),
            None => Ok(None),
        }
    }

    fn map(
        file: &File,
        geometry: Geometry,
        offset: u64,
        length: u64,
    ) -> Result<(Self, MmapRegion), MemoryError> {
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
        let (bytes, length, skipped) = (size(bytes)?, size(length)?, size(offset - first)?);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a place that nothing else in this process uses.
        let mapped = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                prot,
                flags,
                file.as_fd(),
                first,
            )
        };
        let device = Self {
            at: mapped.map_err(|error| refused(&error))?.cast(),
            bytes,
        };
        let builder = MmapRegionBuilder::new(length)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: the region lies in the mapping, which the caller keeps for as long as it uses the region.
        let region = unsafe { builder.with_raw_mmap_pointer(device.at.add(skipped)) };
        let region = region.build().map_err(|error| refused(&error))?;
        Ok((device, region))
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is `self`'s, and regions in it are not used any more.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// A file stands for the device: its mappings may be finer, and are not.
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
        let mapped = DeviceMapping::map(&file, geometry, offset, length);
        let (device, region) = mapped.expect("is mapped");
        assert_eq!(
            (device.bytes as u64, region.size() as u64),
            (4 * MIB, length)
        );
        // SAFETY: both are inside of the region, which is mapped.
        let ends = unsafe {
            let last = region.as_ptr().add(region.size() - 1);
            [region.as_ptr().read_volatile(), last.read_volatile()]
        };
        assert_eq!(ends, [7, 9]);
        drop(region);
        drop(device);
        for (offset, length) in [(6 * MIB, 3 * MIB), (9 * MIB, 1), (u64::MAX, 4096)] {
            let refused = DeviceMapping::map(&file, geometry, offset, length);
            assert!(
                matches!(refused, Err(MemoryError::Short { .. })),
                "{offset}"
            );
        }
        assert!(
            DeviceMapping::of(&file, 0, 4096)
                .expect("is looked at")
                .is_none()
        );
    }

    /// A real one, which the environment names: `make test-dax` boots a machine that has one.
    #[test]
    #[ignore = "needs a DAX device: make test-dax"]
    fn a_region_of_a_dax_device_is_mapped() {
        let path = std::env::var_os("GODWIT_DAX_DEVICE").expect("a device");
        let file = File::options().read(true).write(true).open(path);
        let file = file.expect("opens");
        let (offset, length) = ((2 << 20) + 0xc_0000, 1 << 20);
        for value in [7, 9] {
            let mapped = DeviceMapping::of(&file, offset, length).expect("is mapped");
            let (_device, region) = mapped.expect("a device");
            // SAFETY: the byte is inside of the region, which is mapped.
            unsafe { region.as_ptr().write_volatile(value) };
            let again = DeviceMapping::of(&file, offset - 4096, 8192).expect("is mapped");
            let (_other, region) = again.expect("a device");
            // SAFETY: as above.
            let seen = unsafe { region.as_ptr().add(4096).read_volatile() };
            assert_eq!(seen, value);
        }
        DeviceMapping::of(&file, 1 << 50, 4096).expect_err("is past its end");
    }
}
