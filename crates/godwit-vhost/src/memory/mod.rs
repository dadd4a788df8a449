//! The guest's memory, as the front end shares it.
//!
//! Whoever holds the file of a region can make it shorter afterwards, and then touching the lost
//! part ends this process with SIGBUS. QEMU never does; a front end that is not trusted that far
//! must share memory whose size is sealed (`F_SEAL_SHRINK` on a memfd).

mod device;
pub mod dirty_log;
pub mod live;
pub(crate) mod peer_memory;
pub(crate) mod post_copy;
pub mod relocated;
mod userfault;

use std::fs::File;
use std::io;
use std::sync::Arc;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio_queue::desc::RawDescriptor;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion, Permissions,
};

use crate::memory::device::DeviceMapping;
use crate::memory::live::LiveMapping;
use crate::memory::post_copy::Arrival;
use crate::memory::relocated::{FileId, Home, Mapped, Part};

/// Why the guest's memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The file's size or type could not be found out.
    #[error("cannot inspect a file of guest memory")]
    Inspect(#[source] io::Error),
    /// Not something that has a size.
    #[error("guest memory must be a regular file, such as a memfd, or a DAX device")]
    Kind,
    /// The file ends before the region does.
    #[error("a file of guest memory has {size} bytes, and the region ends at byte {end}")]
    Short {
        /// Bytes in the file.
        size: u64,
        /// Where the region ends in it.
        end: u64,
    },
    /// Parts of it that are in another file.
    #[error("cannot map guest memory that has moved")]
    Moved(#[source] io::Error),
    /// The kernel refused, or regions overlap.
    #[error("cannot map guest memory: {0}")]
    Map(String),
    /// Only shared memory's pages can be waited for.
    #[error(
        "cannot wait for pages of guest memory, which must come from a memfd, tmpfs or hugetlbfs"
    )]
    Faults(#[source] io::Error),
}

/// A contiguous part of guest memory: guest-physical address and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address of the first byte.
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// Where a region lies in the front end's address space.
struct Translation {
    user: u64,
    guest: u64,
    /// Where it is in this process.
    here: u64,
    length: u64,
}

/// The guest's memory, mapped.
pub struct GuestRam {
    memory: GuestMemoryMmap,
    /// In the front end's order.
    translations: Vec<Translation>,
    /// Which part of which file each region is.
    mapped: Vec<Mapped>,
    arrival: Arc<Arrival>,
    /// What regions of devices lie in: unmapped after the memory.
    _devices: Vec<DeviceMapping>,
    /// Ends when nothing of it is mapped any more.
    _live: LiveMapping,
}

impl GuestRam {
    /// Maps the regions, each from its file, and touches nothing.
    pub fn new(
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        arrival: Arc<Arrival>,
    ) -> Result<Self, MemoryError> {
        let homes = regions.iter().zip(&files).map(|(region, file)| {
            let part = Part {
                offset: region.mmap_offset,
                bytes: region.memory_size,
            };
            Home::of(file, part).map_err(MemoryError::Inspect)
        });
        let live = LiveMapping::of(homes.collect::<Result<_, _>>()?);
        let mut mapped = Vec::with_capacity(regions.len());
        let mut translations = Vec::with_capacity(regions.len());
        let mut files_mapped = Vec::with_capacity(regions.len());
        let mut devices = Vec::new();
        for (region, file) in regions.iter().zip(files) {
            let id = FileId::of(&file).map_err(MemoryError::Inspect)?;
            let (offset, length) = (region.mmap_offset, region.memory_size);
            let mapping = match DeviceMapping::of(&file, offset, length)? {
                Some((device, mapping)) => {
                    devices.push(device);
                    mapping
                }
                None => map_file(file, offset, length)?,
            };
            let base = GuestAddress(region.guest_phys_addr);
            let mapping = GuestRegionMmap::new(mapping, base)
                .ok_or_else(|| MemoryError::Map("the region ends past all addresses".into()))?;
            translations.push(Translation {
                user: region.user_addr,
                guest: region.guest_phys_addr,
                here: mapping.as_ptr() as u64,
                length: region.memory_size,
            });
            files_mapped.push(Mapped {
                file: id,
                part: Part {
                    offset: region.mmap_offset,
                    bytes: region.memory_size,
                },
                here: mapping.as_ptr() as u64,
            });
            mapped.push(mapping);
        }
        mapped.sort_by_key(GuestMemoryRegion::start_addr);
        let memory = GuestMemoryMmap::from_regions(mapped)
            .map_err(|error| MemoryError::Map(error.to_string()))?;
        Ok(Self {
            memory,
            translations,
            mapped: files_mapped,
            arrival,
            _devices: devices,
            _live: live,
        })
    }

    /// Whether it has a part of this memory.
    fn maps(&self, home: Home) -> bool {
        self.mapped.iter().any(|region| region.is_of(home))
    }

    /// Maps a part of this memory from another file, or from where in it the memory begins. Whoever touches it must stand
    /// still.
    ///
    /// # Errors
    /// The kernel's.
    fn remap(&self, home: Home, part: Part, target: (&File, u64)) -> io::Result<()> {
        let mut regions = self.mapped.iter();
        regions.try_for_each(|region| region.remap(home, part, target))
    }

    /// How much of it is there.
    pub fn arrival(&self) -> &Arrival {
        &self.arrival
    }

    /// Address in this process and bytes of each region, in the front end's order.
    pub(crate) fn places(&self) -> impl Iterator<Item = (u64, u64)> {
        self.translations
            .iter()
            .map(|region| (region.here, region.length))
    }

    /// The memory itself.
    pub const fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The guest-physical address of an address of the front end's.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.translations.iter().find_map(|region| {
            let offset = user.checked_sub(region.user)?;
            (offset < region.length).then(|| GuestAddress(region.guest + offset))
        })
    }

    /// Where the segments are in this process, appended to `places`. False when a part of them is
    /// not memory.
    pub fn locate(&self, segments: &[Segment], places: &mut Vec<libc::iovec>) -> bool {
        for segment in segments {
            let slices = self.memory.get_slices(
                GuestAddress(segment.address),
                segment.length as usize,
                Permissions::ReadWrite,
            );
            let Ok(slices) = slices else { return false };
            for slice in slices {
                let Ok(slice) = slice else { return false };
                places.push(libc::iovec {
                    iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                    iov_len: slice.len(),
                });
            }
        }
        true
    }

    /// Copies the segments' bytes to `into`, as many as fit. False when a part is not memory.
    pub fn gather(&self, segments: &[Segment], mut into: &mut [u8]) -> bool {
        for segment in segments {
            let length = (segment.length as usize).min(into.len());
            let (here, rest) = into.split_at_mut(length);
            if self
                .memory
                .read_slice(here, GuestAddress(segment.address))
                .is_err()
            {
                return false;
            }
            into = rest;
        }
        true
    }

    /// Copies `from` to the segments. False when a part is not memory.
    pub fn scatter(&self, mut from: &[u8], segments: &[Segment]) -> bool {
        for segment in segments {
            let length = (segment.length as usize).min(from.len());
            let (here, rest) = from.split_at(length);
            if self
                .memory
                .write_slice(here, GuestAddress(segment.address))
                .is_err()
            {
                return false;
            }
            from = rest;
        }
        true
    }
}

/// Maps `length` bytes of a file from `offset`, shared, after checking that it is that long.
pub(crate) fn map_file(file: File, offset: u64, length: u64) -> Result<MmapRegion, MemoryError> {
    let metadata = file.metadata().map_err(MemoryError::Inspect)?;
    if !metadata.is_file() {
        return Err(MemoryError::Kind);
    }
    let end = offset.saturating_add(length);
    if end > metadata.len() {
        return Err(MemoryError::Short {
            size: metadata.len(),
            end,
        });
    }
    let length = usize::try_from(length).map_err(|error| MemoryError::Map(error.to_string()))?;
    MmapRegion::from_file(FileOffset::new(file, offset), length)
        .map_err(|error| MemoryError::Map(error.to_string()))
}

/// Bytes of a descriptor.
pub const DESCRIPTOR: u64 = size_of::<RawDescriptor>() as u64;
