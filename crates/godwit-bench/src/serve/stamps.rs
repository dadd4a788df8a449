//! The expected content of every block of an image.
//!
//! The stamp of each sector identifies its place and its write. The rest is the same noise everywhere, so that nothing
//! compresses. Stamping and checking cost a client next to nothing.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, OFlags, fadvise};

use super::device::Device;
use godwit_testkit::SECTOR;
use godwit_testkit::random::Random;

/// Unit of the recorded writes in bytes.
const BLOCK: usize = 4096;
/// Bytes of a sector's stamp.
const STAMP: usize = 16;
/// Bytes read at once by the checking pass.
const STEP: usize = 1 << 20;
const STEP_BLOCKS: usize = STEP / BLOCK;

/// An image, and the number of the last write to each of its blocks.
#[derive(Debug)]
pub(crate) struct Stamps {
    image: PathBuf,
    written: Vec<u64>,
    /// True for each block with a write in flight.
    busy: Vec<bool>,
    last: u64,
    noise: [u8; SECTOR],
}

impl Stamps {
    /// Writes an image with a stamp in every sector.
    pub(crate) fn create(image: &Path, bytes: u64) -> io::Result<Self> {
        assert!(bytes.is_multiple_of(STEP as u64), "whole MiB");
        let mut noise = [0; SECTOR];
        Random::new(42).fill(&mut noise);
        let blocks = bytes as usize / BLOCK;
        let stamps = Self {
            image: image.to_owned(),
            written: vec![0; blocks],
            busy: vec![false; blocks],
            last: 0,
            noise,
        };
        let mut file = BufWriter::with_capacity(STEP, File::create(image)?);
        for sector in 0..bytes / SECTOR as u64 {
            file.write_all(&stamp(sector, 0))?;
            file.write_all(&stamps.noise[STAMP..])?;
        }
        file.into_inner()?.sync_all()?;
        Ok(stamps)
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.written.len() * BLOCK) as u64
    }

    /// Fills a place with the noise.
    pub(crate) fn prepare(&self, device: &mut dyn Device, place: usize, bytes: usize) {
        for at in (0..bytes).step_by(SECTOR) {
            device.put(place, at, &self.noise);
        }
    }

    /// Stamps a place for a new write. Returns false and changes nothing if a write to one of its blocks is in flight.
    pub(crate) fn begin(
        &mut self,
        device: &mut dyn Device,
        place: usize,
        offset: u64,
        bytes: usize,
    ) -> bool {
        let first = offset as usize / BLOCK;
        let blocks = first..first + bytes / BLOCK;
        if self.busy[blocks.clone()].contains(&true) {
            return false;
        }
        self.last += 1;
        self.busy[blocks.clone()].fill(true);
        self.written[blocks].fill(self.last);
        for at in (0..bytes).step_by(SECTOR) {
            let sector = (offset + at as u64) / SECTOR as u64;
            device.put(place, at, &stamp(sector, self.last));
        }
        true
    }

    /// Records the end of a write.
    pub(crate) fn end(&mut self, offset: u64, bytes: usize) {
        let first = offset as usize / BLOCK;
        self.busy[first..first + bytes / BLOCK].fill(false);
    }

    /// Checks the first stamp of every block that was read.
    pub(crate) fn check_read(
        &self,
        device: &dyn Device,
        place: usize,
        offset: u64,
        bytes: usize,
    ) -> io::Result<()> {
        let mut found = [0; STAMP];
        for at in (0..bytes).step_by(BLOCK) {
            device.get(place, at, &mut found);
            self.expect(offset + at as u64, &found)?;
        }
        Ok(())
    }

    /// Writes back a server's dirty pages of the image, and drops them from the page cache.
    pub(crate) fn leave_page_cache(&self) -> io::Result<()> {
        let file = File::open(&self.image)?;
        rustix::fs::fdatasync(&file)?;
        Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
    }

    /// Reads the whole image from the disk, bypassing the server, and checks every byte.
    pub(crate) fn check_image(&self) -> io::Result<()> {
        let direct = OFlags::DIRECT.bits() as i32;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(direct)
            .open(&self.image)?;
        // Direct I/O needs memory aligned to a page.
        let mut memory = vec![0; STEP + BLOCK];
        let aligned = memory.as_ptr().align_offset(BLOCK);
        let buffer = &mut memory[aligned..aligned + STEP];
        for step in 0..self.written.len() / STEP_BLOCKS {
            let start = (step * STEP) as u64;
            file.read_exact_at(buffer, start)?;
            for (number, sector) in buffer.chunks_exact(SECTOR).enumerate() {
                let offset = start + (number * SECTOR) as u64;
                self.expect(offset, &sector[..STAMP])?;
                if sector[STAMP..] != self.noise[STAMP..] {
                    return Err(io::Error::other(format!("wrong data at byte {offset}")));
                }
            }
        }
        Ok(())
    }

    fn expect(&self, offset: u64, found: &[u8]) -> io::Result<()> {
        let write = self.written[offset as usize / BLOCK];
        if found == stamp(offset / SECTOR as u64, write) {
            return Ok(());
        }
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&found[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        Err(io::Error::other(format!(
            "the sector at byte {offset} should be of write {write}, and says that it is number {} \
             of write {}",
            word(0),
            word(8)
        )))
    }
}

fn stamp(sector: u64, write: u64) -> [u8; STAMP] {
    let mut stamp = [0; STAMP];
    stamp[..8].copy_from_slice(&sector.to_le_bytes());
    stamp[8..].copy_from_slice(&write.to_le_bytes());
    stamp
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with places and without a disk.
    struct Places(Vec<u8>);

    impl Device for Places {
        fn submit(&mut self, _place: usize, _write: bool, _offset: u64) -> io::Result<()> {
            Ok(())
        }

        fn notify(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn done(&mut self, _places: &mut Vec<usize>) -> io::Result<()> {
            Ok(())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn put(&mut self, _place: usize, at: usize, bytes: &[u8]) {
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }

        fn get(&self, _place: usize, at: usize, into: &mut [u8]) {
            into.copy_from_slice(&self.0[at..at + into.len()]);
        }
    }

    #[test]
    fn a_lost_a_misplaced_and_a_torn_write_are_found() {
        let dir = godwit_testkit::process::scratch_dir().expect("a directory");
        let image = dir.path().join("image");
        let mut stamps = Stamps::create(&image, 2 << 20).expect("an image");
        stamps.check_image().expect("as created");

        let mut places = Places(vec![0; BLOCK]);
        stamps.prepare(&mut places, 0, BLOCK);
        let offset = 5 * BLOCK as u64;
        assert!(stamps.begin(&mut places, 0, offset, BLOCK));
        assert!(!stamps.begin(&mut places, 0, offset, BLOCK), "it is busy");
        stamps.end(offset, BLOCK);
        stamps.check_image().expect_err("the write was lost");

        let file = OpenOptions::new().write(true).open(&image).expect("it");
        file.write_all_at(&places.0[..SECTOR], offset).expect("it");
        stamps.check_image().expect_err("only a sector was written");
        file.write_all_at(&places.0, offset).expect("it");
        stamps.check_image().expect("all of it was written");
        stamps
            .check_read(&places, 0, offset, BLOCK)
            .expect("as read");
        stamps
            .check_read(&places, 0, offset + BLOCK as u64, BLOCK)
            .expect_err("another block was read");
        file.write_all_at(&places.0, 0).expect("it");
        stamps
            .check_image()
            .expect_err("it was written elsewhere, too");
    }
}
