//! A plain copy of an image: the limit of the disk that source and copy share.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

/// Bytes that are read and then written at once.
pub const PIECE: usize = 256 << 10;

/// Buffer alignment for direct I/O.
const ALIGNMENT: usize = 4096;

/// Copies the first `bytes` of an image, in whole pieces, to another existing image. Both use direct I/O, with
/// `in_flight` pieces in flight. Returns the duration.
///
/// # Errors
/// I/O errors of the files.
pub fn copy(source: &Path, to: &Path, bytes: u64, in_flight: usize) -> io::Result<Duration> {
    let direct = OFlags::DIRECT.bits() as i32;
    let source = OpenOptions::new()
        .read(true)
        .custom_flags(direct)
        .open(source)?;
    let to = OpenOptions::new()
        .write(true)
        .custom_flags(direct)
        .open(to)?;
    let next = AtomicU64::new(0);
    let began = Instant::now();
    thread::scope(|scope| {
        let copiers: Vec<_> = (0..in_flight)
            .map(|_| scope.spawn(|| copy_pieces(&source, &to, bytes, &next)))
            .collect();
        copiers.into_iter().try_for_each(|copier| {
            let copied = copier.join();
            copied.unwrap_or_else(|_| Err(io::Error::other("a copier panicked")))
        })
    })?;
    Ok(began.elapsed())
}

fn copy_pieces(source: &File, to: &File, bytes: u64, next: &AtomicU64) -> io::Result<()> {
    let mut buffer = vec![0; PIECE + ALIGNMENT];
    let skipped = buffer.as_ptr().align_offset(ALIGNMENT);
    let piece = &mut buffer[skipped..skipped + PIECE];
    loop {
        let offset = next.fetch_add(PIECE as u64, Ordering::Relaxed);
        if offset >= bytes {
            return Ok(());
        }
        source.read_exact_at(piece, offset)?;
        to.write_all_at(piece, offset)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_testkit::image::write_random;
    use godwit_testkit::process::scratch_dir;

    #[test]
    fn every_piece_is_copied_however_many_are_on_their_way() {
        let dir = scratch_dir().expect("a directory");
        let (source, copy_of_it) = (dir.path().join("source"), dir.path().join("copy"));
        let bytes = 9 * PIECE as u64;
        write_random(&source, bytes, 7).expect("an image");
        for in_flight in [1, 4, 16] {
            write_random(&copy_of_it, bytes, 8).expect("an image");
            copy(&source, &copy_of_it, bytes, in_flight).expect("a copy");
            let read = |path| std::fs::read(path).expect("an image");
            assert!(read(&source) == read(&copy_of_it), "{in_flight} in flight");
        }
        let missing = dir.path().join("missing");
        assert!(copy(&missing, &copy_of_it, bytes, 2).is_err());
    }
}
