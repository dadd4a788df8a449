//! Writes that leave out blocks of zeroes over holes of the file, so that a thin disk is as thin at its destination.

use std::ops::Range;

use godwit_io::zeroes::{BLOCK, is_zero};

/// The next part of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Run {
    /// Bytes that are already zeroes in the file.
    pub(in crate::engine) skipped: u64,
    /// End of the part to write, from the start of the data.
    pub(in crate::engine) until: u64,
}

/// Returns the next run of `data`, destined for `offset` of the file, after its first `done` bytes. `is_zeroes` returns
/// true if a range of the file, in bytes, reads as zeroes.
pub(in crate::engine) fn next_run(
    is_zeroes: impl Fn(Range<u64>) -> bool,
    offset: u64,
    data: &[u8],
    done: usize,
) -> Run {
    let leaves_out = |at: usize| {
        let zeroes = zeroes_at(offset, data, at);
        let (start, end) = (offset + at as u64, offset + (at + zeroes) as u64);
        let hole = zeroes > 0 && is_zeroes(start..end);
        if hole { (zeroes, 0) } else { (0, zeroes) }
    };
    let (skipped, written) = leaves_out(done);
    let mut until = done + skipped + written;
    while until < data.len() {
        match leaves_out(until) {
            (0, 0) => until = data.len().min(next_block(offset, until)),
            (0, zeroes) => until += zeroes,
            _ => break,
        }
    }
    Run {
        skipped: skipped as u64,
        until: until as u64,
    }
}

/// Returns the bytes of whole zero blocks from `at` on.
fn zeroes_at(offset: u64, data: &[u8], at: usize) -> usize {
    if !(offset + at as u64).is_multiple_of(BLOCK as u64) {
        return 0;
    }
    let (blocks, _) = data[at..].as_chunks::<BLOCK>();
    let zeroes = blocks.iter().take_while(|block| is_zero(*block));
    zeroes.count() * BLOCK
}

/// Returns the position in the data of the file's next block after `at`.
fn next_block(offset: u64, at: usize) -> usize {
    let within = (offset + at as u64) % BLOCK as u64;
    at + BLOCK - within as usize
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::image::extents::hole_end;

    /// Returns blocks, each full of one byte.
    fn blocks(bytes: &[u8]) -> Vec<u8> {
        bytes.iter().flat_map(|&byte| [byte; BLOCK]).collect()
    }

    fn runs(file: &File, offset: u64, data: &[u8]) -> Vec<(usize, usize)> {
        let (mut done, mut runs) = (0, Vec::new());
        while done < data.len() {
            let hole = |part: Range<u64>| hole_end(file.as_fd(), part.start, part.end) == part.end;
            let run = next_run(hole, offset, data, done);
            let start = done + run.skipped as usize;
            done = run.until as usize;
            if start < done {
                runs.push((start, done));
            }
        }
        runs
    }

    #[test]
    fn zeroes_are_left_out_only_where_the_file_has_a_hole() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("a length");
        let data = blocks(&[0, 1, 1, 0, 0, 1, 0]);
        let at = |block: usize| block * BLOCK;
        let thin = [(at(1), at(3)), (at(5), at(6))];
        assert_eq!(runs(&file, 8192, &data), thin);
        // Data written before must become zeroes.
        file.write_all_at(&[7; BLOCK], 8192 + at(3) as u64)
            .expect("a write");
        assert_eq!(runs(&file, 8192, &data), [(at(1), at(6))]);
        assert_eq!(
            runs(&file, 1 << 20, &data),
            [(0, data.len())],
            "behind the end"
        );
        // Blocks are aligned to the file.
        let within = runs(&file, 65536 + 512, &data);
        assert_eq!(within[0].0, 0, "{within:?}");
        assert_eq!(runs(&file, 65536, &blocks(&[1; 4])), [(0, at(4))]);
        assert_eq!(runs(&file, 65536, &blocks(&[0; 4])), []);
    }
}
