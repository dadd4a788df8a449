//! The guest's memory, as the front end shares it.
//!
//! The holder of a region's file can shorten the file after mapping. A file that can be sealed against this (a memfd)
//! is sealed when mapped. Lost pages of other files read as zeroes from then on ([`GuestRam::has_lost_pages`]).
//! Contents of such memory are never acted on, and its front end is disconnected.

mod device;
pub mod dirty_log;
pub mod live;
pub(crate) mod peer_memory;
pub(crate) mod post_copy;
pub(crate) mod region;
pub mod relocated;
mod userfault;
pub mod written;

use std::fs::File;
use std::io;
use std::sync::Arc;

use godwit_memory::mapping::SharedMapping;
use rustix::fs::SealFlags;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio_queue::desc::RawDescriptor;
use vm_memory::{
    Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, GuestMemoryRegion, Permissions,
};

use crate::memory::post_copy::Arrival;
use crate::memory::region::Region;

/// The reason for refusing the guest's memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The file's size or type could not be read.
    #[error("cannot inspect a file of guest memory")]
    Inspect(#[source] io::Error),
    /// The file has no size.
    #[error("guest memory must be a regular file, such as a memfd, or a DAX device")]
    Kind,
    /// The file ends before the region does.
    #[error("a file of guest memory has {size} bytes, and the region ends at byte {end}")]
    Short {
        /// Bytes in the file.
        size: u64,
        /// End of the region in the file.
        end: u64,
    },
    /// The file supports seals, but could not be sealed.
    #[error("cannot seal a file of guest memory so that it keeps its size")]
    Seal(#[source] io::Error),
    /// Relocated parts of the memory cannot be mapped.
    #[error("cannot map guest memory that has moved")]
    Moved(#[source] io::Error),
    /// The kernel refused the mapping, or regions overlap.
    #[error("cannot map guest memory: {0}")]
    Map(String),
    /// Pages can be waited for in shared memory only.
    #[error(
        "cannot wait for pages of guest memory, which must come from a memfd, tmpfs or hugetlbfs"
    )]
    Faults(#[source] io::Error),
    /// A slot has no bytes, or an end past all addresses.
    #[error("a slot of guest memory is empty, or ends past all addresses")]
    Slot,
    /// A slot shares addresses of the guest or of the front end with another.
    #[error("a slot of guest memory overlaps with another")]
    Overlap,
    /// All slots are taken.
    #[error("guest memory has more than {0} slots")]
    Slots(usize),
    /// No slot has these addresses.
    #[error("a slot of guest memory is to be removed that is not there")]
    NoSlot,
}

/// The reason for disconnecting a front end whose memory [has lost pages](GuestRam::has_lost_pages).
pub const LOST_PAGES: &str = "memory that it shares is lost: a file of it was made shorter, its file system is full, or \
     the hardware reports an error in it";

/// A contiguous part of guest memory: guest-physical address and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
}

/// The guest's memory, mapped.
pub struct GuestRam {
    memory: GuestMemoryMmap,
    /// In the front end's order. Unmapped after `memory`, unless other memory has them as well.
    regions: Vec<Arc<Region>>,
    arrival: Arc<Arrival>,
}

impl GuestRam {
    /// Maps the regions, each from its file, without touching a page.
    pub fn new(
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        arrival: Arc<Arrival>,
    ) -> Result<Self, MemoryError> {
        let mapped = regions.iter().zip(&files);
        let mapped = mapped.map(|(region, file)| Region::map(region, file));
        Self::of(mapped.collect::<Result<_, _>>()?, arrival)
    }

    /// Returns memory that consists of these regions.
    pub(crate) fn of(
        regions: Vec<Arc<Region>>,
        arrival: Arc<Arrival>,
    ) -> Result<Self, MemoryError> {
        let mut mapped: Vec<_> = regions.iter().map(|region| region.mapped()).collect();
        mapped.sort_by_key(|region| region.start_addr());
        let memory = match mapped.is_empty() {
            true => GuestMemoryMmap::new(),
            false => GuestMemoryMmap::from_arc_regions(mapped)
                .map_err(|error| MemoryError::Map(error.to_string()))?,
        };
        Ok(Self {
            memory,
            regions,
            arrival,
        })
    }

    /// Returns the regions, in the front end's order.
    pub(crate) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Returns true if `bytes` bytes from an address of the front end are memory.
    pub(crate) fn holds(&self, user: u64, bytes: usize) -> bool {
        let access = Permissions::ReadWrite;
        let place = self.guest_address(user);
        place.is_some_and(|place| self.memory.check_range(place, bytes, access))
    }

    /// Returns the state of the memory's arrival.
    pub const fn arrival(&self) -> &Arc<Arrival> {
        &self.arrival
    }

    /// Returns true if earlier reads may differ from the guest's writes: pages have not arrived and never will, or are
    /// lost.
    pub fn is_lost(&self) -> bool {
        self.arrival.is_lost() || self.has_lost_pages()
    }

    /// Returns true if the files do not back all of the memory any more.
    pub fn has_lost_pages(&self) -> bool {
        self.regions.iter().any(|region| region.has_lost_pages())
    }

    /// Records that the kernel could not use the memory for this process (`EFAULT`), which raises no signal.
    pub fn lose_pages(&self) {
        self.regions.iter().for_each(|region| region.lose_pages());
    }

    /// Returns the mapped regions.
    pub const fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Translates an address of the front end to a guest-physical address.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        let mut regions = self.regions.iter();
        regions.find_map(|region| region.guest_address(user))
    }

    /// Appends the segments' places in this process to `places`. Returns false if a part is not memory.
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

    /// Copies the segments' bytes to `into`, as many as fit. Returns false if a part is not memory.
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

    /// Copies `from` to the segments. Returns false if a part is not memory.
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

/// Maps `length` bytes of a file from `offset`, shared. Checks the length first, and seals the file against shrinking
/// where possible.
pub(crate) fn map_file(
    file: &File,
    offset: u64,
    length: u64,
) -> Result<SharedMapping, MemoryError> {
    // Files other than memfds have no seals, or a seal against further seals.
    if let Ok(seals) = rustix::fs::fcntl_get_seals(file)
        && !seals.intersects(SealFlags::SEAL | SealFlags::SHRINK)
    {
        rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)
            .map_err(|errno| MemoryError::Seal(errno.into()))?;
    }
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
    SharedMapping::map(file, offset, length).map_err(|error| MemoryError::Map(error.to_string()))
}

/// Bytes of a descriptor.
pub const DESCRIPTOR: u64 = size_of::<RawDescriptor>() as u64;

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const PAGE: u64 = 4096;
    const BASE: u64 = 0x10_0000;

    /// Returns two pages of memory in a file with these flags.
    fn shared(flags: MemfdFlags) -> (File, GuestRam) {
        let file = File::from(memfd_create(c"guest", flags).expect("a file"));
        file.set_len(2 * PAGE).expect("grows");
        let region = VhostUserMemoryRegion::new(BASE, 2 * PAGE, 0x7000_0000, 0);
        let files = vec![file.try_clone().expect("another")];
        let ram = GuestRam::new(&[region], files, Arc::default()).expect("is mapped");
        (file, ram)
    }

    #[test]
    fn memory_that_can_be_sealed_keeps_its_size() {
        let (file, ram) = shared(MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        file.set_len(PAGE).expect_err("it is sealed");
        file.set_len(3 * PAGE).expect("it may grow");
        drop(ram);
        file.set_len(PAGE).expect_err("for good");
    }

    #[test]
    fn memory_that_shrinks_is_lost_and_nothing_else() {
        let [(file, ram), (_other, beside)] = [(); 2].map(|()| shared(MemfdFlags::CLOEXEC));
        let mut byte = [9];
        let last = Segment {
            address: BASE + PAGE,
            length: 1,
        };
        assert!(ram.scatter(&[7], &[last]));
        file.set_len(PAGE).expect("shrinks");
        assert!(!ram.is_lost(), "nobody has touched what is missing");
        assert!(ram.gather(&[last], &mut byte));
        assert_eq!(byte, [0]);
        assert!(ram.is_lost());
        assert!(beside.gather(&[last], &mut byte));
        assert!(!beside.is_lost());
        let region = VhostUserMemoryRegion::new(BASE, 2 * PAGE, 0x7000_0000, 0);
        let again = GuestRam::new(&[region], vec![file], Arc::default());
        assert!(matches!(again, Err(MemoryError::Short { .. })));
    }
}
