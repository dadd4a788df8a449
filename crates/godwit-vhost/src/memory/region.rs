//! A region of guest memory, mapped from its file. Memory that changes keeps the regions that stay the same.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_memory::mapping::SharedMapping;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::memory::live::LiveMapping;
use crate::memory::relocated::{FileId, Home, Mapped, Part};
use crate::memory::{MemoryError, device, map_file};

/// A mapped region.
pub(crate) struct Region {
    map: Arc<GuestRegionMmap>,
    /// Address of the first byte in the front end.
    user: u64,
    /// File and part.
    origin: Mapped,
    /// True once a part was mapped from another file.
    relocated: AtomicBool,
    /// Unmapped after `map`.
    mapping: SharedMapping,
    /// Ends once the region is unmapped.
    _live: LiveMapping,
}

impl Region {
    /// Maps a region from its file, without touching a page.
    pub(crate) fn map(
        region: &VhostUserMemoryRegion,
        file: &File,
    ) -> Result<Arc<Self>, MemoryError> {
        let part = part_of(region);
        let live = LiveMapping::of(Home::of(file, part).map_err(MemoryError::Inspect)?);
        let id = FileId::of(file).map_err(MemoryError::Inspect)?;
        let (mapping, skipped) = match device::map(file, part.offset, part.bytes)? {
            Some(found) => found,
            None => (map_file(file, part.offset, part.bytes)?, 0),
        };
        let length =
            usize::try_from(part.bytes).map_err(|error| MemoryError::Map(error.to_string()))?;
        let base = GuestAddress(region.guest_phys_addr);
        let map = GuestRegionMmap::new(region_of(&mapping, skipped, length)?, base)
            .ok_or_else(|| MemoryError::Map("the region ends past all addresses".into()))?;
        Ok(Arc::new(Self {
            user: region.user_addr,
            origin: Mapped {
                file: id,
                part,
                here: map.as_ptr() as u64,
            },
            map: Arc::new(map),
            relocated: AtomicBool::new(false),
            mapping,
            _live: live,
        }))
    }

    /// Returns true if mapping this region of the front end again would change nothing.
    pub(crate) fn is(&self, region: &VhostUserMemoryRegion, file: &File) -> bool {
        let end = region.mmap_offset.saturating_add(region.memory_size);
        self.has_addresses(region)
            && self.origin.part == part_of(region)
            && !self.relocated.load(Ordering::Acquire)
            && !self.has_lost_pages()
            && file.metadata().is_ok_and(|metadata| {
                let is_whole = !metadata.is_file() || end <= metadata.len();
                is_whole && FileId::in_metadata(&metadata) == self.origin.file
            })
    }

    /// Returns true if the front end describes this region, whatever the file.
    pub(crate) fn has_addresses(&self, region: &VhostUserMemoryRegion) -> bool {
        self.user == region.user_addr
            && self.map.start_addr().0 == region.guest_phys_addr
            && self.origin.part.bytes == region.memory_size
    }

    /// Returns true if a region of the front end has addresses of this one, the guest's or the front end's.
    pub(crate) fn overlaps(&self, region: &VhostUserMemoryRegion) -> bool {
        let bytes = region.memory_size;
        let meets = |own: u64, other: u64| match own.checked_sub(other) {
            Some(distance) => distance < bytes,
            None => other - own < self.origin.part.bytes,
        };
        meets(self.user, region.user_addr) || meets(self.map.start_addr().0, region.guest_phys_addr)
    }

    /// Returns the mapping for the guest's addresses.
    pub(super) fn mapped(&self) -> Arc<GuestRegionMmap> {
        Arc::clone(&self.map)
    }

    /// Returns the address in this process, and the length.
    pub(crate) const fn place(&self) -> (u64, u64) {
        (self.origin.here, self.origin.part.bytes)
    }

    /// Translates an address of the front end to a guest-physical address.
    pub(super) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        let offset = user.checked_sub(self.user)?;
        let is_here = offset < self.origin.part.bytes;
        is_here.then(|| GuestAddress(self.map.start_addr().0 + offset))
    }

    /// Returns the part of `file` that holds `bytes` bytes from a guest-physical address, as far as they lie in this
    /// region. A part that is mapped from another file meanwhile counts as where the front end shares it.
    pub(super) fn part_in(&self, file: FileId, address: u64, bytes: u64) -> Option<Part> {
        let own = self.origin.part;
        let start = self.map.start_addr().0;
        let here = Part {
            offset: start,
            bytes: own.bytes,
        };
        let common = here.common(Part {
            offset: address,
            bytes,
        })?;
        (self.origin.file == file).then(|| Part {
            offset: own.offset + (common.offset - start),
            bytes: common.bytes,
        })
    }

    /// Returns true if the region includes a part of `home`.
    pub(super) fn is_of(&self, home: Home) -> bool {
        self.origin.is_of(home)
    }

    /// Maps a part of `home` from another file. `target` is the file and the beginning of the memory in the file. Users
    /// of the memory must stand still.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(super) fn remap(&self, home: Home, part: Part, target: (&File, u64)) -> io::Result<()> {
        if !self.is_of(home) {
            return Ok(());
        }
        self.relocated.store(true, Ordering::Release);
        self.origin.remap(home, part, target)
    }

    /// Returns true if the file does not back all of the region any more.
    pub(super) fn has_lost_pages(&self) -> bool {
        self.mapping.has_lost_pages()
    }

    /// Records that the kernel could not use the region for this process.
    pub(super) fn lose_pages(&self) {
        self.mapping.lose_pages();
    }
}

const fn part_of(region: &VhostUserMemoryRegion) -> Part {
    Part {
        offset: region.mmap_offset,
        bytes: region.memory_size,
    }
}

/// Returns `length` bytes of a mapping as a region. The caller keeps the mapping while the region is used.
fn region_of(
    mapping: &SharedMapping,
    skipped: usize,
    length: usize,
) -> Result<MmapRegion, MemoryError> {
    let refused = |why: &dyn std::fmt::Display| MemoryError::Map(why.to_string());
    if mapping.bytes().checked_sub(skipped) < Some(length) {
        return Err(refused(&"its region ends past its mapping"));
    }
    let builder = MmapRegionBuilder::new(length)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: the region lies in the mapping, as was checked above, and the caller keeps the mapping while the region
    // is used.
    let region = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr().add(skipped)) };
    region.build().map_err(|error| refused(&error))
}
