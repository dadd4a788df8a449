//! Random writes that keep many requests in flight on a disk. Their content is not checked.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use crate::disks::blocks::{BLOCK, Buffer, create, fill_with_zeroes};
use crate::random::{Random, mix};
use crate::stats::Stats;

/// Size of the file.
const BYTES: u64 = 16 << 20;

/// Writes to a file on a disk with this many writers until told to stop.
pub(crate) fn run(mount: &Path, writers: u64, seed: u64, stats: &Stats, stop: &AtomicBool) {
    let write = |file: &File, writer: u64| {
        let (buffer, mut random) = (Buffer::new(), Random::new(mix(seed ^ writer)));
        while !stop.load(Relaxed) {
            let block = random.below(BYTES / BLOCK as u64);
            file.write_all_at(&buffer.0[..BLOCK], block * BLOCK as u64)?;
        }
        io::Result::Ok(())
    };
    let written = create(&mount.join("writers"), true).and_then(|file| {
        // Writes to a part without storage would wait for each other.
        fill_with_zeroes(&file, BYTES)?;
        thread::scope(|scope| {
            let (file, write) = (&file, &write);
            let writers: Vec<_> = (0..writers)
                .map(|writer| scope.spawn(move || write(file, writer)))
                .collect();
            let mut ended = writers.into_iter().map(|writer| writer.join());
            ended.try_for_each(|ended| ended.unwrap_or_else(|_| Err(io::Error::other("a panic"))))
        })
    });
    if let Err(error) = written {
        stats.error(&format!("writers: {error}"));
    }
}
