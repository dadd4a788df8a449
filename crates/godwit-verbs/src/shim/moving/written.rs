//! Memory that the device could write, for an incremental image.
//!
//! An incremental image relies on the kernel's soft-dirty bits, which the processor sets. A device sets no such bits.
//! Linux leaves the bits of memory that a device has pinned set if the memory is private and in small pages, and clears
//! all others.

use std::ops::Range;
use std::ptr;

use crate::abi::IBV_ACCESS_LOCAL_WRITE;
use crate::shim::world::{Phase, World, world};
use crate::tables::{Call, ObjectId};

/// Begins to mark the memory of regions that the application gives back, until the process resumes after its move.
pub fn track_written() {
    world().written = Some(Ok(()));
}

/// Marks all memory of regions that the device could write as changed.
///
/// # Errors
/// One sentence if the process has its objects, [`track_written`] was not called, or the kernel refuses, as Linux
/// before 5.14 does.
pub fn mark_written() -> Result<(), String> {
    let world = world();
    if world.phase != Phase::Released {
        return Err("this process has not given its objects back".to_owned());
    }
    match &world.written {
        Some(Ok(())) => {}
        Some(Err(why)) => return Err(why.clone()),
        None => return Err("nobody has asked to track what the device writes".to_owned()),
    }
    let mut written = writable(&world).map(|(_, memory)| memory);
    written.try_for_each(mark)
}

/// Returns the memory of a region that the device could write, before the application gives the region back; none
/// unless tracked.
pub(in crate::shim) fn tracked(world: &World, region: ObjectId) -> Option<Range<usize>> {
    world.written.as_ref()?;
    let mut regions = writable(world);
    regions.find_map(|(id, memory)| (id == region).then_some(memory))
}

/// Marks the memory of a region that has been given back: the device's writes stay in memory.
pub(in crate::shim) fn mark_given_back(world: &mut World, memory: Range<usize>) {
    if let (Some(written @ Ok(())), Err(why)) = (&mut world.written, mark(memory)) {
        *written = Err(why);
    }
}

/// Returns the memory of regions that the device could write.
fn writable(world: &World) -> impl Iterator<Item = (ObjectId, Range<usize>)> {
    world.roadmap.calls().filter_map(|(id, call)| match call {
        Call::MemoryRegion {
            address,
            length,
            access,
            ..
        } if access & IBV_ACCESS_LOCAL_WRITE != 0 => {
            let start = *address as usize;
            Some((id, start..start.saturating_add(*length as usize)))
        }
        _ => None,
    })
}

fn page_size() -> usize {
    // SAFETY: takes no pointer.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Returns the pages that contain the memory.
fn whole_pages(memory: Range<usize>, page: usize) -> Range<usize> {
    let end = memory.end.div_ceil(page).saturating_mul(page);
    memory.start / page * page..end
}

/// Marks each page of this memory as written without changing the content.
fn mark(memory: Range<usize>) -> Result<(), String> {
    let pages = whole_pages(memory, page_size());
    if pages.is_empty() {
        return Ok(());
    }
    let start = ptr::without_provenance_mut(pages.start);
    loop {
        // SAFETY: this changes no content, and an unmapped address is an error.
        if unsafe { libc::madvise(start, pages.len(), libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(format!(
                "memory at {:#x}, which the device could write, cannot be marked as changed: {error}",
                pages.start
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lies_in_whole_pages() {
        assert_eq!(whole_pages(4096..8192, 4096), 4096..8192);
        assert_eq!(whole_pages(4097..4098, 4096), 4096..8192);
        assert_eq!(whole_pages(8191..8193, 4096), 4096..12288);
        assert!(whole_pages(4096..4096, 4096).is_empty());
    }

    #[test]
    fn pages_are_marked_and_keep_what_they_have() {
        let page = page_size();
        let memory = vec![7u8; 8 * page];
        let within = memory.as_ptr().addr() + 1..memory.as_ptr().addr() + 7 * page;
        mark(within).expect("marks");
        assert!(memory.iter().all(|byte| *byte == 7));
        // Unmapped memory does not end the process.
        mark(page..2 * page).expect_err("is not there");
    }
}
