//! The disk-limit scene: a plain copy of the image beside the same guest, without computation, encryption or network.
//! Source and destination share the disk, so no mover can beat this copy here.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_bench::interrupt;
use godwit_bench::plain_copy::copy;
use godwit_testkit::fio::{RunningFio, now_ms};
use godwit_testkit::image::write_random;
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::median;

use crate::noise::{AGREE, await_quiet, disagree};
use crate::options::{Extent, Options};
use crate::report::{DiskLimit, DiskLimitRound, Guest, Seen, spread};
use crate::rest::Rest;
use crate::scenes::migrate::random_writes;
use crate::suite::Suite;

const GIB: u64 = 1 << 30;

/// Numbers of pieces in flight.
const IN_FLIGHT: [usize; 5] = [1, 2, 4, 8, 16];
/// Write rate of the guest in MB/s.
const MBPS: f64 = 40.0;
/// Times of the guest's load before the copy: warm-up, then measured.
const WARM_UP: Duration = Duration::from_secs(1);
const BEFORE: Duration = Duration::from_secs(3);

/// Copies with each number of pieces in flight, in an order that rotates from round to round.
pub(crate) fn run(options: &Options, suite: &mut Suite) -> io::Result<()> {
    let full = suite.report.extent == Extent::Full;
    let bytes = if full { 4 * GIB } else { GIB };
    let rounds = options.rounds.unwrap_or(if full { 5 } else { 2 });
    println!("disk limit: filling two images of {} GiB", bytes / GIB);
    let disk = Disk::create(bytes, options.settle(suite.report.extent))?;
    println!(
        "{:<12} {:>9} {:>8} {:>9} {:>9} {:>12} {:>12}",
        "disk limit", "in flight", "copy s", "MB/s bef.", "MB/s dur.", "p99.99 bef.", "p99.99 dur."
    );
    let mut all: Vec<Vec<DiskLimitRound>> = vec![Vec::new(); IN_FLIGHT.len()];
    for number in 0..rounds {
        for turn in 0..IN_FLIGHT.len() {
            let which = (number + turn) % IN_FLIGHT.len();
            let round = disk.copy(IN_FLIGHT[which])?;
            print(number, IN_FLIGHT[which], &round);
            all[which].push(round);
            suite.report.disk_limit = IN_FLIGHT
                .iter()
                .zip(&all)
                .filter(|(_, rounds)| !rounds.is_empty())
                .map(|(in_flight, rounds)| DiskLimit::new(*in_flight, bytes, rounds.clone()))
                .collect();
            suite.save()?;
        }
    }
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

    fn copy(&self, in_flight: usize) -> io::Result<DiskLimitRound> {
        rustix::fs::sync();
        let disk_at_rest = self.rest.wait()?;
        await_quiet()?;
        // On average, half of the guest's writes hit copied data and go to both images.
        let mut guest = self.load("guest", MBPS, &self.source)?;
        let mut doubled = self.load("doubled", MBPS / 2.0, &self.copy)?;
        interrupt::sleep(WARM_UP)?;
        let quiet_from = now_ms();
        interrupt::sleep(BEFORE)?;
        let from = now_ms();
        let took = copy(&self.source, &self.copy, self.bytes, in_flight)?;
        let to = now_ms();
        interrupt::check()?;
        for fio in [&mut guest, &mut doubled] {
            if !fio.alive() {
                return Err(io::Error::other(fio.explain()));
            }
        }
        let (guest, doubled) = (guest.stop()?, doubled.stop()?);
        guest.succeeded()?;
        doubled.succeeded()?;
        let seen = |from, to| Some(Seen::of(&guest.window(from, to)));
        Ok(DiskLimitRound {
            copy_seconds: took.as_secs_f64(),
            guest: Guest {
                before: seen(quiet_from, from),
                during: seen(from, to),
            },
            disk_at_rest,
        })
    }

    fn load(&self, name: &str, mbps: f64, image: &Path) -> io::Result<RunningFio> {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir)?;
        random_writes(mbps, self.bytes).start_on_image(image, &dir)
    }
}

impl DiskLimit {
    fn new(in_flight: usize, image_bytes: u64, rounds: Vec<DiskLimitRound>) -> Self {
        let of = |pick: fn(&Guest) -> Option<Seen>| -> Vec<Seen> {
            rounds
                .iter()
                .filter_map(|round| pick(&round.guest))
                .collect()
        };
        let (before, during) = (of(|guest| guest.before), of(|guest| guest.during));
        let seconds: Vec<f64> = rounds.iter().map(|round| round.copy_seconds).collect();
        let rates: Vec<f64> = before.iter().map(|seen| seen.mbps).collect();
        Self {
            in_flight: in_flight as u32,
            rate_mbps: MBPS,
            image_bytes,
            copy_seconds: median(&seconds),
            copy_seconds_spread: spread(&seconds),
            guest: Guest {
                before: Seen::median(&before),
                during: Seen::median(&during),
            },
            noisy: disagree(&rates, AGREE),
            rounds,
        }
    }
}

fn print(number: usize, in_flight: usize, round: &DiskLimitRound) {
    let of = |seen: Option<Seen>| seen.unwrap_or_default();
    let (before, during) = (of(round.guest.before), of(round.guest.during));
    println!(
        "{:<12} {in_flight:>9} {:>8.2} {:>9.1} {:>9.1} {:>12.0} {:>12.0}",
        format!("round {}", number + 1),
        round.copy_seconds,
        before.mbps,
        during.mbps,
        before.p9999_us,
        during.p9999_us,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_allows_is_the_median_of_the_rounds() {
        let round = |copy_seconds, mbps| {
            let seen = |mbps| {
                Some(Seen {
                    mbps,
                    ..Seen::default()
                })
            };
            DiskLimitRound {
                copy_seconds,
                guest: Guest {
                    before: seen(40.0),
                    during: seen(mbps),
                },
                disk_at_rest: None,
            }
        };
        let rounds = vec![round(3.0, 40.0), round(2.0, 10.0), round(2.5, 39.0)];
        let limit = DiskLimit::new(2, GIB, rounds);
        assert!((limit.copy_seconds - 2.5).abs() < 1e-9 && !limit.noisy);
        assert_eq!(limit.copy_seconds_spread, [2.0, 3.0]);
        let during = limit.guest.during.expect("a guest");
        assert!((during.mbps - 39.0).abs() < 1e-9);
    }

    #[test]
    fn a_copy_beside_a_guest_is_measured() {
        let disk = Disk::create(16 << 20, Duration::ZERO).expect("two images");
        let round = disk.copy(4).expect("a copy");
        let before = round.guest.before.expect("a guest");
        assert!(round.copy_seconds > 0.0 && before.mbps > 1.0, "{round:?}");
    }
}
