//! The load on a disk: blocks of one file, written and read past the page cache, each of which says
//! what it is. The last acknowledged content of every block is known, so any other is a mismatch.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags};

use crate::options::Options;
use crate::random::{Random, mix};
use crate::stats::Stats;

const BLOCK: usize = 4096;
/// Blocks that the last check reads at once.
const BATCH: usize = 16;
/// A sync follows this many writes, and a read that is checked every fourth.
const WRITES_A_SYNC: u64 = 32;
const WRITES_A_READ: u64 = 4;
/// After an error the disk gets this time before the next attempt.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// Aligned as O_DIRECT asks for.
#[repr(C, align(4096))]
struct Buffer([u8; BLOCK * BATCH]);

impl Buffer {
    fn new() -> Box<Self> {
        Box::new(Self([0; BLOCK * BATCH]))
    }
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Never written: zeroes.
    Zero,
    /// The write with this sequence was acknowledged last.
    Written(u64),
    /// A write failed: the old or the new content, until the next write.
    Unknown,
}

/// The load on one disk.
pub(crate) struct Blocks<'a> {
    file: File,
    disk: usize,
    seed: u64,
    model: Vec<Known>,
    random: Random,
    stats: &'a Stats,
    buffer: Box<Buffer>,
    expected: Box<Buffer>,
}

impl<'a> Blocks<'a> {
    /// Makes the file, allocated but never written.
    pub(crate) fn create(
        directory: &Path,
        disk: usize,
        options: &Options,
        stats: &'a Stats,
    ) -> io::Result<Self> {
        let size = options.file_mb << 20;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(directory.join("blocks"))?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size)?;
        file.sync_all()?;
        let blocks = usize::try_from(size / BLOCK as u64).map_err(io::Error::other)?;
        let seed = mix(options.seed ^ (disk as u64).rotate_left(32));
        Ok(Self {
            file,
            disk,
            seed,
            model: vec![Known::Zero; blocks],
            random: Random::new(seed),
            stats,
            buffer: Buffer::new(),
            expected: Buffer::new(),
        })
    }

    /// Writes, reads and syncs until told to stop.
    pub(crate) fn run(&mut self, rate: u64, stop: &AtomicBool) {
        let pause = Duration::from_nanos(1_000_000_000u64.checked_div(rate).unwrap_or(0));
        let mut next = Instant::now();
        self.stats.disk_begins(self.disk);
        let mut sequence = 0;
        while !stop.load(Relaxed) {
            sequence += 1;
            self.write(sequence);
            if sequence.is_multiple_of(WRITES_A_READ) {
                let block = self.random.below(self.model.len() as u64);
                self.check(block as usize, 1);
            }
            if sequence.is_multiple_of(WRITES_A_SYNC) {
                match self.timed(File::sync_all) {
                    Ok(()) => self.stats.synced(),
                    Err(error) => self.failed("sync", 0, &error),
                }
            }
            // Whoever is late goes on at the rate from here, without catching up in a burst.
            next = (next + pause).max(Instant::now());
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        self.stats.disk_ends(self.disk);
    }

    fn write(&mut self, sequence: u64) {
        let block = self.random.below(self.model.len() as u64);
        fill(
            &mut self.buffer.0[..BLOCK],
            self.seed,
            self.disk,
            block,
            sequence,
        );
        let offset = block * BLOCK as u64;
        match self.timed(|file| file.write_all_at(&self.buffer.0[..BLOCK], offset)) {
            Ok(()) => {
                self.model[block as usize] = Known::Written(sequence);
                self.stats.wrote(self.disk);
            }
            Err(error) => {
                self.model[block as usize] = Known::Unknown;
                self.failed("write", block, &error);
            }
        }
    }

    fn timed(&self, request: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let asked = Instant::now();
        let answer = request(&self.file);
        self.stats.answered(asked.elapsed());
        answer
    }

    fn failed(&self, what: &str, block: u64, error: &io::Error) {
        self.stats.error(&format!(
            "disk {}: {what} at block {block}: {error}",
            self.disk
        ));
        thread::sleep(PAUSE_AFTER_ERROR);
    }

    /// Reads blocks and compares them with what was acknowledged last.
    fn check(&mut self, first: usize, count: usize) {
        let bytes = count * BLOCK;
        let offset = (first * BLOCK) as u64;
        let asked = Instant::now();
        let answer = self.file.read_exact_at(&mut self.buffer.0[..bytes], offset);
        self.stats.answered(asked.elapsed());
        if let Err(error) = answer {
            self.failed("read", first as u64, &error);
            return;
        }
        self.stats.read();
        for (index, found) in self.buffer.0[..bytes].chunks_exact(BLOCK).enumerate() {
            let block = first + index;
            let expected = &mut self.expected.0[..BLOCK];
            match self.model[block] {
                Known::Unknown => continue,
                Known::Zero => expected.fill(0),
                Known::Written(sequence) => {
                    fill(expected, self.seed, self.disk, block as u64, sequence);
                }
            }
            if found != &*expected {
                self.stats.mismatch(&format!(
                    "disk {} block {block}: expected {:?}, found {}",
                    self.disk,
                    self.model[block],
                    describe(found, self.seed)
                ));
            }
        }
    }

    /// Makes everything durable and reads every block back.
    pub(crate) fn finish(&mut self) {
        if let Err(error) = self.file.sync_all() {
            self.failed("sync", 0, &error);
        }
        let mut first = 0;
        while first < self.model.len() {
            let count = BATCH.min(self.model.len() - first);
            self.check(first, count);
            first += count;
        }
    }
}

/// Fills a block: disk, block number, sequence, checksum of these three, and noise made of it.
fn fill(into: &mut [u8], seed: u64, disk: usize, block: u64, sequence: u64) {
    let sum = checksum(seed, disk as u64, block, sequence);
    for (index, word) in into.chunks_exact_mut(8).enumerate() {
        let value = match index {
            0 => disk as u64,
            1 => block,
            2 => sequence,
            3 => sum,
            _ => sum
                .rotate_left(index as u32 % 64)
                .wrapping_mul(index as u64 * 2 + 1),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

const fn checksum(seed: u64, disk: u64, block: u64, sequence: u64) -> u64 {
    mix(mix(mix(seed ^ disk) ^ block) ^ sequence)
}

/// What a block that should not be there says of itself.
fn describe(found: &[u8], seed: u64) -> String {
    if found.iter().all(|byte| *byte == 0) {
        return "zeroes".into();
    }
    let word = |index: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&found[index * 8..][..8]);
        u64::from_le_bytes(bytes)
    };
    let (disk, block, sequence) = (word(0), word(1), word(2));
    let mut whole = vec![0; found.len()];
    fill(&mut whole, seed, disk as usize, block, sequence);
    if word(3) != checksum(seed, disk, block, sequence) {
        "foreign data".into()
    } else if whole == found {
        format!("write {sequence} of block {block} of disk {disk}")
    } else {
        format!("parts of write {sequence} of block {block} of disk {disk}")
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, describe, fill};

    #[test]
    fn a_block_says_what_it_is() {
        let mut block = vec![0; BLOCK];
        assert_eq!(describe(&block, 5), "zeroes");
        fill(&mut block, 5, 1, 7, 9);
        assert_eq!(describe(&block, 5), "write 9 of block 7 of disk 1");
        block[BLOCK - 1] ^= 1;
        assert_eq!(describe(&block, 5), "parts of write 9 of block 7 of disk 1");
        block[0] ^= 1;
        assert_eq!(describe(&block, 5), "foreign data");
    }
}
