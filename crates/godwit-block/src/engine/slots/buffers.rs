//! The memory for the data of one class's requests.

use std::collections::VecDeque;
use std::io;

use godwit_io::page_buffers::{Arena, Block, SMALLEST};

/// The blocks of an arena. A freed block rests before its next use: data that a disk has just read from the block may
/// still lie in the caches of another processor, often a hypervisor's, and overwriting the block then takes several
/// times as long.
pub(in crate::engine) struct Buffers {
    arena: Arena,
    /// Freed blocks, the longest resting first.
    resting: VecDeque<Block>,
    /// Bytes of the resting blocks.
    bytes: usize,
    /// Most bytes that rest.
    most: usize,
    /// Bytes of unused blocks, resting or not.
    unused: usize,
}

impl Buffers {
    /// Maps as much memory as [`Arena::new`] for `length`, of which up to `rest` bytes rest.
    pub(in crate::engine) fn new(length: usize, rest: usize) -> io::Result<Self> {
        let arena = Arena::new(length)?;
        Ok(Self {
            unused: arena.length(),
            arena,
            resting: VecDeque::with_capacity(rest / SMALLEST),
            bytes: 0,
            most: rest,
        })
    }

    /// Allocates a block of at least `length` bytes; `None` if there is none.
    pub(in crate::engine) fn allocate(&mut self, length: usize) -> Option<Block> {
        loop {
            if let Some(block) = self.arena.allocate(length) {
                self.unused -= block.length();
                return Some(block);
            }
            self.wake()?;
        }
    }

    pub(in crate::engine) fn free(&mut self, block: Block) {
        self.unused += block.length();
        if block.length() > self.most {
            return self.arena.free(block);
        }
        self.bytes += block.length();
        while self.bytes > self.most && self.wake().is_some() {}
        self.resting.push_back(block);
    }

    /// Returns the unused bytes, which need not be contiguous.
    pub(in crate::engine) const fn unused(&self) -> usize {
        self.unused
    }

    /// Returns the longest resting block to the arena; `None` if none rests.
    fn wake(&mut self) -> Option<()> {
        let block = self.resting.pop_front()?;
        self.bytes -= block.length();
        self.arena.free(block);
        Some(())
    }

    pub(in crate::engine) fn address(&self, block: &Block) -> *mut u8 {
        self.arena.address(block)
    }

    /// Commits on a new thread the `length` bytes that are allocated first.
    pub(in crate::engine) fn commit_in_background(&mut self, length: usize) {
        self.arena.commit_in_background(length);
    }

    /// Returns the memory to the system if no block is in use. The memory is committed anew on use.
    pub(in crate::engine) fn decommit(&mut self) {
        while self.wake().is_some() {}
        self.arena.decommit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_io::page_buffers::LARGEST;

    const REST: usize = 1 << 20;

    fn buffers() -> Buffers {
        Buffers::new(LARGEST, REST).expect("memory")
    }

    #[test]
    fn a_freed_block_is_not_the_next_one() {
        let mut buffers = buffers();
        let length = 64 << 10;
        let mut recent = VecDeque::new();
        for _ in 0..1000 {
            let block = buffers.allocate(length).expect("a block");
            let address = buffers.address(&block);
            assert!(!recent.contains(&address), "it was used a moment ago");
            recent.push_back(address);
            if recent.len() > REST / length - 1 {
                recent.pop_front();
            }
            buffers.free(block);
        }
    }

    #[test]
    fn what_rests_is_there_when_it_is_needed() {
        let mut buffers = buffers();
        for length in [SMALLEST, 3 * SMALLEST, 100 << 10, REST, 2 * REST, LARGEST] {
            let blocks: Vec<_> = std::iter::from_fn(|| buffers.allocate(length)).collect();
            assert_eq!(blocks.len(), LARGEST / length.next_power_of_two());
            blocks.into_iter().for_each(|block| buffers.free(block));
            assert!(buffers.bytes <= REST);
        }
        buffers.decommit();
        assert_eq!((buffers.bytes, buffers.resting.len()), (0, 0));
    }
}
