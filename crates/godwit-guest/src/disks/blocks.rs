//! The load on a disk: self-describing blocks of one file, written and read past the page cache. The last acknowledged
//! content of every block is known, so any other content is a mismatch.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags};

use crate::orders::options::Options;
use crate::random::{Random, mix};
use crate::stats::Stats;

pub(super) const BLOCK: usize = 4096;
/// Blocks that the last check reads at once.
const BATCH: usize = 16;
/// Writes between two syncs, and between two checked reads.
const WRITES_A_SYNC: u64 = 32;
const WRITES_A_READ: u64 = 4;
/// Time that the disk gets after an error before the next attempt.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// A buffer with O_DIRECT's alignment.
#[repr(C, align(4096))]
pub(super) struct Buffer(pub(super) [u8; BLOCK * BATCH]);

impl Buffer {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; BLOCK * BATCH]))
    }
}

/// The known state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Never written: zeroes.
    Zero,
    /// Sequence number of the last acknowledged write.
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
    /// The number of the last write.
    sequence: u64,
    stats: &'a Stats,
    buffer: Box<Buffer>,
    expected: Box<Buffer>,
}

impl<'a> Blocks<'a> {
    /// Creates the file, allocated but never written. With `reboots` the file is filled with zeroes, because only then
    /// is an acknowledged write durable. A load with an existing file continues where the previous boot ended.
    pub(crate) fn open(
        directory: &Path,
        disk: usize,
        options: &Options,
        stats: &'a Stats,
    ) -> io::Result<Self> {
        let size = options.file_mb << 20;
        let file = create(&directory.join("blocks"), !options.reboots)?;
        let is_of_an_earlier_boot = file.metadata()?.len() == size;
        if !is_of_an_earlier_boot {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size)?;
            if options.reboots {
                fill_with_zeroes(&file, size)?;
            }
            file.sync_all()?;
            File::open(directory)?.sync_all()?;
        }
        let blocks = usize::try_from(size / BLOCK as u64).map_err(io::Error::other)?;
        let seed = mix(options.seed ^ (disk as u64).rotate_left(32));
        let mut load = Self {
            file,
            disk,
            seed,
            model: vec![Known::Zero; blocks],
            random: Random::new(seed),
            sequence: 0,
            stats,
            buffer: Buffer::new(),
            expected: Buffer::new(),
        };
        if is_of_an_earlier_boot {
            load.resume()?;
        }
        Ok(load)
    }

    /// Finds the last write on the disk, and checks that all earlier ones are there.
    fn resume(&mut self) -> io::Result<()> {
        let last = self.last_write()?;
        while self.sequence < last {
            self.sequence += 1;
            let block = self.next_block();
            self.model[block] = Known::Written(self.sequence);
            if self.reads_now() {
                self.next_block();
            }
        }
        self.check_all();
        self.stats.resumed(self.disk, last);
        Ok(())
    }

    /// Returns the highest sequence number of any block; 0 if none was written.
    fn last_write(&mut self) -> io::Result<u64> {
        let mut last = 0;
        for first in (0..self.model.len()).step_by(BATCH) {
            let count = BATCH.min(self.model.len() - first);
            let found = &mut self.buffer.0[..count * BLOCK];
            self.file.read_exact_at(found, (first * BLOCK) as u64)?;
            for (index, block) in found.chunks_exact(BLOCK).enumerate() {
                let [disk, number, sequence, sum] = [0, 1, 2, 3].map(|index| word(block, index));
                let is_own = (disk, number) == (self.disk as u64, (first + index) as u64);
                if is_own && sum == checksum(self.seed, disk, number, sequence) {
                    last = last.max(sequence);
                }
            }
        }
        Ok(last)
    }

    fn next_block(&mut self) -> usize {
        self.random.below(self.model.len() as u64) as usize
    }

    const fn reads_now(&self) -> bool {
        self.sequence.is_multiple_of(WRITES_A_READ)
    }

    /// Writes, reads and syncs until told to stop.
    pub(crate) fn run(&mut self, rate: u64, stop: &AtomicBool) {
        let pause = Duration::from_nanos(1_000_000_000u64.checked_div(rate).unwrap_or(0));
        let mut next = Instant::now();
        self.stats.disk_begins(self.disk);
        while !stop.load(Relaxed) {
            self.sequence += 1;
            self.write();
            if self.reads_now() {
                let block = self.next_block();
                self.check(block, 1);
            }
            if self.sequence.is_multiple_of(WRITES_A_SYNC) {
                match self.timed(File::sync_all) {
                    Ok(()) => self.stats.synced(),
                    Err(error) => self.failed("sync", 0, &error),
                }
            }
            // A late load goes on at the rate from here, without catching up in a burst.
            next = (next + pause).max(Instant::now());
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        self.stats.disk_ends(self.disk);
    }

    fn write(&mut self) {
        let sequence = self.sequence;
        let block = self.next_block() as u64;
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

    /// Reads blocks and compares them with the last acknowledged content.
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
        self.check_all();
    }

    fn check_all(&mut self) {
        for first in (0..self.model.len()).step_by(BATCH) {
            self.check(first, BATCH.min(self.model.len() - first));
        }
    }
}

/// Opens a file past the page cache, and creates the file if there is none.
pub(super) fn create(path: &Path, truncate: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(truncate)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(path)
}

pub(super) fn fill_with_zeroes(file: &File, size: u64) -> io::Result<()> {
    let zeroes = Buffer::new();
    let mut offset = 0;
    while offset < size {
        let bytes = (size - offset).min((BLOCK * BATCH) as u64);
        file.write_all_at(&zeroes.0[..bytes as usize], offset)?;
        offset += bytes;
    }
    Ok(())
}

/// Fills a block: disk, block number, sequence, checksum of these three, and noise derived from the checksum.
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

/// Returns one of a block's 64-bit words.
fn word(block: &[u8], index: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&block[index * 8..][..8]);
    u64::from_le_bytes(bytes)
}

/// Describes the origin of an unexpected block.
fn describe(found: &[u8], seed: u64) -> String {
    if found.iter().all(|byte| *byte == 0) {
        return "zeroes".into();
    }
    let [disk, block, sequence, sum] = [0, 1, 2, 3].map(|index| word(found, index));
    let mut whole = vec![0; found.len()];
    fill(&mut whole, seed, disk as usize, block, sequence);
    if sum != checksum(seed, disk, block, sequence) {
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
