//! Raw images: filled, compared and hashed.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use crate::client::DiskReader;
use crate::random::{Random, mix};

const STEP: u64 = 4 << 20;

/// Writes a file of random data: nothing in it compresses, repeats or is zero.
///
/// # Errors
/// Those of the file.
pub fn write_random(path: &Path, bytes: u64, seed: u64) -> io::Result<()> {
    let mut random = Random::new(seed);
    write_blocks(path, bytes, |block| random.fill(block))
}

/// Writes a file of data that compresses to half: half of each block of 4 KiB is random, and the other
/// half is the same in all.
///
/// # Errors
/// Those of the file.
pub fn write_compressible(path: &Path, bytes: u64, seed: u64) -> io::Result<()> {
    let mut random = Random::new(seed);
    write_blocks(path, bytes, |block| {
        let (first, second) = block.split_at_mut(2048);
        random.fill(first);
        second.fill(0x5a);
    })
}

fn write_blocks(path: &Path, bytes: u64, mut fill: impl FnMut(&mut [u8; 4096])) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(STEP as usize, File::create(path)?);
    let mut block = [0; 4096];
    let mut left = bytes;
    while left > 0 {
        let take = left.min(block.len() as u64);
        fill(&mut block);
        file.write_all(&block[..take as usize])?;
        left -= take;
    }
    file.into_inner()?.sync_all()
}

/// A fingerprint of a range of a disk, in bytes: equal content gives an equal fingerprint, and
/// different content a different one for all but 1 in 2^64.
///
/// # Errors
/// When the disk cannot be read.
pub fn fingerprint(disk: &mut dyn DiskReader, range: Range<u64>) -> io::Result<u64> {
    let mut buffer = vec![0; STEP as usize];
    let mut state = range.end - range.start;
    let mut offset = range.start;
    while offset < range.end {
        let length = STEP.min(range.end - offset) as usize;
        let part = &mut buffer[..length];
        disk.read_disk(offset, part)?;
        for word in part.chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            state = mix(state ^ u64::from_le_bytes(bytes)).wrapping_add(state.rotate_left(23));
        }
        offset += length as u64;
    }
    Ok(state)
}

/// The first byte in which two disks differ within a range.
///
/// # Errors
/// When one of them cannot be read.
pub fn first_difference(
    left: &mut dyn DiskReader,
    right: &mut dyn DiskReader,
    range: Range<u64>,
) -> io::Result<Option<u64>> {
    let (mut one, mut two) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    let mut offset = range.start;
    while offset < range.end {
        let length = STEP.min(range.end - offset) as usize;
        left.read_disk(offset, &mut one[..length])?;
        right.read_disk(offset, &mut two[..length])?;
        if one[..length] != two[..length] {
            let within = one.iter().zip(&two).position(|(a, b)| a != b).unwrap_or(0);
            return Ok(Some(offset + within as u64));
        }
        offset += length as u64;
    }
    Ok(None)
}
