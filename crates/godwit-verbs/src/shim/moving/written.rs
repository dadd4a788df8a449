//! Memory that the device could write, for an image of what has changed since an earlier one.
//!
//! Such an image is made of the kernel's soft-dirty bits, which the processor sets. Linux leaves the bits of a private page set
//! that a device has pinned, and clears those of shared memory.

use std::ops::Range;
use std::ptr;

use crate::abi::IBV_ACCESS_LOCAL_WRITE;
use crate::shim::world::{Phase, World, world};
use crate::tables::Call;

/// Marks all memory of regions that the device could write as changed.
///
/// # Errors
/// One sentence if the process has its objects, or the kernel refuses, which Linux before 5.14 does.
pub fn mark_written() -> Result<(), String> {
    let world = world();
    if world.phase != Phase::Released {
        return Err("this process has not given its objects back".to_owned());
    }
    let page = page_size();
    written(&world).try_for_each(|memory| mark(whole_pages(memory, page)))
}

/// The memory of regions that the device could write.
fn written(world: &World) -> impl Iterator<Item = Range<usize>> {
    let calls = world.roadmap.calls();
    calls.filter_map(|(_, call)| match call {
        Call::MemoryRegion {
            address,
            length,
            access,
            ..
        } if access & IBV_ACCESS_LOCAL_WRITE != 0 => {
            let start = *address as usize;
            Some(start..start.saturating_add(*length as usize))
        }
        _ => None,
    })
}

fn page_size() -> usize {
    // SAFETY: takes no pointer.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// The pages in which some memory lies.
fn whole_pages(memory: Range<usize>, page: usize) -> Range<usize> {
    let end = memory.end.div_ceil(page).saturating_mul(page);
    memory.start / page * page..end
}

/// As if each page was written, with what it has.
fn mark(pages: Range<usize>) -> Result<(), String> {
    if pages.is_empty() {
        return Ok(());
    }
    let start = ptr::without_provenance_mut(pages.start);
    loop {
        // SAFETY: this changes no content, and what is not mapped is an error.
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
        mark(whole_pages(within, page)).expect("marks");
        assert!(memory.iter().all(|byte| *byte == 7));
        // What is not mapped is no end of the process.
        mark(page..2 * page).expect_err("is not there");
    }
}
