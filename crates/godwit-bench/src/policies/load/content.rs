//! The content of a disk's blocks. Each block identifies the write that produced it.

use std::io;
use std::sync::Arc;

use godwit_testkit::client::DiskReader;
use godwit_testkit::random::{Random, mix};

/// Bytes of a block, the unit of the loads' reads and writes.
pub(crate) const BLOCK: usize = 256 << 10;
/// Bytes between two stamps.
const PAGE: usize = 4096;
/// Bytes of random data from which blocks are cut.
const POOL: usize = 4 << 20;

/// The origin of a block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// The block was never written.
    Zeroes,
    /// The base image's content.
    Base,
    /// The load's write of this number.
    Written(u32),
}

/// Makes the content of blocks: incompressible random data, different for each write.
#[derive(Clone, Debug)]
pub(crate) struct Content(Arc<[u8]>);

impl Content {
    pub(crate) fn new(seed: u64) -> Self {
        let mut pool = vec![0; POOL + BLOCK];
        Random::new(seed).fill(&mut pool);
        Self(pool.into())
    }

    /// Fills a block of the disk with this number.
    pub(crate) fn fill(&self, disk: u32, block: usize, held: Held, into: &mut [u8; BLOCK]) {
        // All disks share the base image's blocks.
        let (disk, version) = match held {
            Held::Zeroes => return into.fill(0),
            Held::Base => (0, 0),
            Held::Written(version) => (disk, version),
        };
        let name = (u64::from(disk) << 32) ^ ((block as u64) << 40) ^ u64::from(version);
        let from = (mix(name) % (POOL as u64 / 8)) as usize * 8;
        into.copy_from_slice(&self.0[from..from + BLOCK]);
        for (page, bytes) in into.chunks_exact_mut(PAGE).enumerate() {
            let stamp = [disk, block as u32, version, page as u32];
            for (word, at) in stamp.iter().zip(bytes.chunks_exact_mut(4)) {
                at.copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

/// The expected content of a disk, block by block.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    content: Content,
    disk: u32,
    held: Vec<Held>,
}

impl Model {
    /// Returns the model of a disk of `bytes` bytes, of which the first `base` come from the base image.
    pub(crate) fn new(content: Content, disk: u32, bytes: u64, base: u64) -> Self {
        let blocks = |bytes: u64| (bytes / BLOCK as u64) as usize;
        let held = |block| match block < blocks(base) {
            true => Held::Base,
            false => Held::Zeroes,
        };
        Self {
            content,
            disk,
            held: (0..blocks(bytes)).map(held).collect(),
        }
    }

    pub(crate) fn expected(&self, block: usize, into: &mut [u8; BLOCK]) {
        self.content.fill(self.disk, block, self.held[block], into);
    }

    /// Records a write and fills the block with the content to write.
    pub(crate) fn write(&mut self, block: usize, into: &mut [u8; BLOCK]) {
        self.held[block] = match self.held[block] {
            Held::Written(version) => Held::Written(version + 1),
            _ => Held::Written(1),
        };
        self.expected(block, into);
    }

    /// Reads the whole disk and returns its number of bytes.
    pub(crate) fn verify(&self, disk: &mut dyn DiskReader) -> io::Result<u64> {
        let (mut read, mut expected) = (boxed(), boxed());
        for block in 0..self.held.len() {
            disk.read_disk((block * BLOCK) as u64, &mut read[..])?;
            self.expected(block, &mut expected);
            same(block, &read, &expected)?;
        }
        Ok((self.held.len() * BLOCK) as u64)
    }
}

/// Compares a block with its expected content.
pub(crate) fn same(block: usize, read: &[u8; BLOCK], expected: &[u8; BLOCK]) -> io::Result<()> {
    if read == expected {
        return Ok(());
    }
    let at = read.iter().zip(expected).position(|(one, two)| one != two);
    Err(io::Error::other(format!(
        "block {block} is wrong from its byte {} on",
        at.unwrap_or(0)
    )))
}

pub(crate) fn boxed() -> Box<[u8; BLOCK]> {
    vec![0; BLOCK]
        .try_into()
        .unwrap_or_else(|_| unreachable!("it has the length of a block"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk in memory.
    struct InMemory(Vec<u8>);

    impl DiskReader for InMemory {
        fn read_disk(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            let from = offset as usize;
            into.copy_from_slice(&self.0[from..from + into.len()]);
            Ok(())
        }
    }

    #[test]
    fn an_older_write_the_image_and_zeroes_are_told_from_the_last_write() {
        let mut model = Model::new(Content::new(1), 7, 4 * BLOCK as u64, 2 * BLOCK as u64);
        let mut disk = InMemory(Vec::new());
        let mut block = boxed();
        for number in 0..4 {
            model.expected(number, &mut block);
            disk.0.extend_from_slice(&block[..]);
        }
        assert_eq!(model.verify(&mut disk).unwrap(), 4 * BLOCK as u64);
        for number in [1, 3] {
            let before = disk.0.clone();
            model.write(number, &mut block);
            assert!(model.verify(&mut disk).is_err(), "the write is missing");
            disk.0[number * BLOCK..][..BLOCK].copy_from_slice(&block[..]);
            model.verify(&mut disk).unwrap();
            model.write(number, &mut block);
            disk.0[number * BLOCK..][..BLOCK].copy_from_slice(&block[..]);
            let newer = std::mem::replace(&mut disk.0, before);
            assert!(model.verify(&mut disk).is_err(), "an older one is there");
            disk.0 = newer;
        }
    }
}
