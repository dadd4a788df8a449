//! The scene `disk-limit`: a plain copy of the image beside the same guest, without computation, encryption or network.
//! Source and destination share the disk, so no mover can beat this copy here.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use godwit_testkit::fio::{RunningFio, now_ms};
use godwit_testkit::image::write_random;
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::{Report, add_fields};
use rustix::fs::OFlags;
use serde_json::{Value, json};

use super::noise::{AGREE, await_quiet, disagree};
use super::rest::Rest;
use super::{Extent, Options};
use crate::common::{GUEST, in_turns, interrupt};
use crate::migrate::random_writes;

const GIB: u64 = 1 << 30;

/// Numbers of pieces in flight.
const IN_FLIGHT: [usize; 5] = [1, 2, 4, 8, 16];
/// Write rate of the guest in MB/s.
const MBPS: f64 = 40.0;
/// Times of the guest's load before the copy: warm-up, then measured.
const WARM_UP: Duration = Duration::from_secs(1);
const BEFORE: Duration = Duration::from_secs(3);
/// Bytes that are read and then written at once.
const PIECE: usize = 256 << 10;

/// Buffer alignment for direct I/O.
const ALIGNMENT: usize = 4096;

/// Copies the first `bytes` of an image, in whole pieces, to another existing image. Both use direct I/O, with
/// `in_flight` pieces in flight. Returns the duration.
fn copy(source: &Path, to: &Path, bytes: u64, in_flight: usize) -> io::Result<Duration> {
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

/// Copies with each number of pieces in flight.
pub(crate) fn run(options: &Options, extent: Extent, report: &mut Report) -> io::Result<()> {
    let bytes = extent.of(GIB, 4 * GIB);
    let rounds = options.rounds.unwrap_or(extent.of(2, 5));
    println!("disk limit: filling two images of {} GiB", bytes / GIB);
    let disk = Disk::create(bytes, options.settle(extent))?;
    let about = "An image is copied to another by nobody who computes, encrypts or sends anything, so many pieces of 256 KiB \
        at a time, beside random writes at 40 MB/s to the one and half of that to the other. Source and destination share \
        the disk in every other scene, too, unless it says otherwise.";
    let figures = format!("copy_seconds s, {GUEST}");
    report.table("disk-limit", "in_flight", &figures, about);
    in_turns(rounds, IN_FLIGHT.len(), |_, turn| {
        rustix::fs::sync();
        let disk_at_rest = disk.rest.wait()?;
        await_quiet()?;
        let mut run = disk.copy(IN_FLIGHT[turn])?;
        run["disk_at_rest"] = disk_at_rest.into();
        report.add("disk-limit", run)
    })?;
    report.mark_noisy("disk-limit", |cell, _| {
        disagree(&cell.values("mbps_before"), AGREE)
    });
    Ok(())
}

/// Two images on the same disk.
struct Disk {
    source: PathBuf,
    copy: PathBuf,
    bytes: u64,
    rest: Rest,
    dir: tempfile::TempDir,
}

impl Disk {
    fn create(bytes: u64, settle: Duration) -> io::Result<Self> {
        let dir = scratch_dir()?;
        let disk = Self {
            source: dir.path().join("source.img"),
            copy: dir.path().join("copy.img"),
            bytes,
            rest: Rest::new(dir.path(), settle),
            dir,
        };
        for image in [&disk.source, &disk.copy] {
            write_random(image, bytes, 42)?;
        }
        Ok(disk)
    }

    fn copy(&self, in_flight: usize) -> io::Result<Value> {
        // On average, half of the guest's writes hit copied data and go to both images.
        let mut guest = self.load("guest", MBPS, &self.source)?;
        let mut doubled = self.load("doubled", MBPS / 2.0, &self.copy)?;
        interrupt::sleep(WARM_UP)?;
        let quiet_from = now_ms();
        interrupt::sleep(BEFORE)?;
        let from = now_ms();
        let took = copy(&self.source, &self.copy, self.bytes, in_flight)?;
        let to = now_ms();
        guest.check()?;
        doubled.check()?;
        let (guest, doubled) = (guest.stop()?, doubled.stop()?);
        guest.succeeded()?;
        doubled.succeeded()?;
        let mut run = json!({
            "in_flight": in_flight, "rate_mbps": MBPS, "image_bytes": self.bytes,
            "copy_seconds": took.as_secs_f64(),
        });
        add_fields(&mut run, &guest.window(quiet_from, from), "_before");
        add_fields(&mut run, &guest.window(from, to), "_during");
        Ok(run)
    }

    fn load(&self, name: &str, mbps: f64, image: &Path) -> io::Result<RunningFio> {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir)?;
        random_writes(mbps, self.bytes).start_on_image(image, &dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_beside_a_guest_is_measured() {
        let disk = Disk::create(16 << 20, Duration::ZERO).expect("two images");
        let run = disk.copy(4).expect("a copy");
        let above = |figure: &str, least| run[figure].as_f64() > Some(least);
        assert!(
            above("copy_seconds", 0.0) && above("mbps_before", 1.0),
            "{run}"
        );
    }

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
