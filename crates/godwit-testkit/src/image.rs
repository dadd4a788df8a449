//! Raw images: filled, compared and hashed.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use crate::client::DiskReader;
use crate::random::{Random, mix};

const STEP: u64 = 4 << 20;
const BLOCK: usize = 4096;

/// Writes a file of random data, without zeroes, repetitions or any compressible part.
pub fn write_random(path: &Path, bytes: u64, seed: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(STEP as usize, File::create(path)?);
    let mut random = Random::new(seed);
    let mut block = [0; BLOCK];
    let mut left = bytes;
    while left > 0 {
        let take = left.min(block.len() as u64);
        random.fill(&mut block);
        file.write_all(&block[..take as usize])?;
        left -= take;
    }
    file.into_inner()?.sync_all()
}

/// Fills a file with the contents of other files: the files below `root` in the order of their names, each aligned to a
/// block as on a disk, over and over again.
pub fn write_files(path: &Path, bytes: u64, root: &Path) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(STEP as usize, File::create(path)?);
    let mut left = bytes;
    while left > 0 {
        let before = left;
        append_files(root, &mut file, &mut left)?;
        if left == before {
            let why = format!("there are no files to read below {}", root.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
    }
    file.into_inner()?.sync_all()
}

/// Appends the readable files below `directory` as far as there is room.
fn append_files(directory: &Path, to: &mut impl Write, left: &mut u64) -> io::Result<()> {
    let Ok(entries) = directory.read_dir() else {
        return Ok(());
    };
    let mut entries: Vec<_> = entries.filter_map(Result::ok).collect();
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => append_files(&entry.path(), to, left)?,
            Ok(kind) if kind.is_file() => {
                let Ok(mut data) = std::fs::read(entry.path()) else {
                    continue;
                };
                data.resize(data.len().next_multiple_of(BLOCK), 0);
                data.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                to.write_all(&data)?;
                *left -= data.len() as u64;
            }
            _ => {}
        }
        if *left == 0 {
            break;
        }
    }
    Ok(())
}

/// Returns a fingerprint of a range of a disk, in bytes. Equal content gives an equal fingerprint; different content
/// gives a different one for all but 1 in 2^64.
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

/// Returns the offset of the first byte in which two disks differ within a range.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_full_of_files_over_and_over() {
        let dir = tempfile::tempdir().unwrap();
        let (root, image) = (dir.path().join("root"), dir.path().join("image"));
        std::fs::create_dir_all(root.join("a")).unwrap();
        assert!(
            write_files(&image, 4096, &root).is_err(),
            "nothing is there"
        );
        std::fs::write(root.join("a/one"), [1; 5000]).unwrap();
        std::fs::write(root.join("two"), [2; 4096]).unwrap();
        std::os::unix::fs::symlink(&root, root.join("three")).unwrap();
        write_files(&image, 5 * 4096, &root).unwrap();
        let zeroes = 2 * 4096 - 5000;
        let once = [vec![1; 5000], vec![0; zeroes], vec![2; 4096]].concat();
        let twice = once.repeat(2);
        assert!(std::fs::read(&image).unwrap() == twice[..5 * 4096]);
    }
}
