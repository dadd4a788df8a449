//! Verification of a measured move of a disk.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use godwit_testkit::client::{DiskReader, RawImage};
use godwit_testkit::fio::Sample;

/// Unit of the load's requests.
const BLOCK: u64 = 4096;
/// Blocks read at once.
const STEP: u64 = 1024;

/// Compares the source's last image with the destination's, block by block, and returns the number of blocks compared.
///
/// After the move the guest writes at the destination alone. Blocks written since `moved_ms` may therefore differ and
/// are left out. All other blocks were written at both sides, or at the source alone and copied.
pub(crate) fn compare_images(
    source: &Path,
    destination: &Path,
    samples: &[Sample],
    moved_ms: u64,
) -> io::Result<u64> {
    let later: HashSet<u64> = samples
        .iter()
        .filter(|sample| sample.write && sample.at_ms >= moved_ms)
        .map(|sample| sample.offset / BLOCK)
        .collect();
    let blocks = source.metadata()?.len() / BLOCK;
    let (mut left, mut right) = (RawImage::open(source)?, RawImage::open(destination)?);
    let mut compared = 0;
    let mut pieces = [0, 1].map(|_| vec![0; (STEP * BLOCK) as usize]);
    for first in (0..blocks).step_by(STEP as usize) {
        let count = STEP.min(blocks - first);
        let bytes = (count * BLOCK) as usize;
        let [one, two] = &mut pieces;
        left.read_disk(first * BLOCK, &mut one[..bytes])?;
        right.read_disk(first * BLOCK, &mut two[..bytes])?;
        let pairs = one[..bytes]
            .chunks(BLOCK as usize)
            .zip(two[..bytes].chunks(BLOCK as usize));
        for (block, (one, two)) in (first..).zip(pairs) {
            if later.contains(&block) {
                continue;
            }
            compared += 1;
            if one != two {
                return Err(io::Error::other(format!(
                    "the images differ at byte {}, which the guest did not write after the move: \
                     {} and {}",
                    block * BLOCK,
                    source.display(),
                    destination.display()
                )));
            }
        }
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(offset: u64, at_ms: u64) -> Sample {
        Sample {
            at_ms,
            nanoseconds: 1000,
            write: true,
            offset,
        }
    }

    #[test]
    fn only_what_was_written_after_the_move_may_differ() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::fs::write(&one, vec![1; 4 * BLOCK as usize]).unwrap();
        let mut other = vec![1; 4 * BLOCK as usize];
        other[2 * BLOCK as usize] = 9;
        std::fs::write(&two, other).unwrap();
        let after = [write(2 * BLOCK, 500)];
        assert_eq!(compare_images(&one, &two, &after, 500).unwrap(), 3);
        let before = [write(2 * BLOCK, 499)];
        let error = compare_images(&one, &two, &before, 500).unwrap_err();
        assert!(error.to_string().contains("byte 8192"), "{error}");
    }
}
