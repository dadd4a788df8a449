//! fio as a guest, and the latencies of any window of time from its logs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hdrhistogram::Histogram;
use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;

use crate::nbd::NbdTarget;
use crate::process::{Process, run};

/// Bytes of a request.
const BLOCK: f64 = 4096.0;

/// The request pattern of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// Random writes. All data is read back and its CRC checked.
    CheckedWrites,
    /// Random writes, this many in a hundred, and random reads.
    Mixed(u8),
    /// Random writes, most of them to few places: Zipf's law with the exponent 1.2.
    HotSet,
    /// Sequential writes, which start over at the end.
    Sequential,
}

/// A load of requests of 4 KiB.
#[derive(Clone, Debug)]
pub struct FioLoad {
    pub requests: Requests,
    /// Part of the disk that the load writes to, in bytes.
    pub region: Range<u64>,
    /// Bytes requested per second; without a limit for `None`. With checked writes, the same amount is read again.
    pub rate: Option<u64>,
    /// Requests in flight.
    pub depth: u32,
    /// Longest run time, unless the load is stopped.
    pub runtime: Duration,
    /// True if the written data compresses to half; otherwise nothing compresses.
    pub compressible: bool,
}

impl Default for FioLoad {
    /// Random writes without a region, at full speed, for longer than any test.
    fn default() -> Self {
        Self {
            requests: Requests::Mixed(100),
            region: 0..0,
            rate: None,
            depth: 16,
            runtime: Duration::from_secs(7200),
            compressible: false,
        }
    }
}

/// A running fio.
#[derive(Debug)]
pub struct RunningFio {
    process: Process,
    prefix: PathBuf,
}

/// An answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Time of the answer, in milliseconds since 1970.
    pub at_ms: u64,
    /// Latency in nanoseconds.
    pub nanoseconds: u64,
    /// True for a write.
    pub write: bool,
    /// Offset on the disk, in bytes.
    pub offset: u64,
}

/// fio's final report.
#[derive(Clone, Debug)]
pub struct FioReport {
    /// fio's error number; 0 if every request succeeded and every CRC was right.
    pub error: i64,
    /// Messages of fio on an error.
    pub messages: String,
    /// Every answered request, in the order of answers.
    pub samples: Vec<Sample>,
}

/// The guest's view of a window of time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Window {
    /// Length in seconds.
    pub seconds: f64,
    /// Requests answered per second: writes and the reads that check them.
    pub iops: f64,
    /// Writes answered per second.
    pub write_iops: f64,
    /// Megabytes per second of all requests.
    pub mbps: f64,
    /// Median latency in microseconds.
    pub p50_us: u64,
    /// 99th percentile in microseconds.
    pub p99_us: u64,
    /// 99.9th percentile in microseconds.
    pub p999_us: u64,
    /// 99.99th percentile in microseconds.
    pub p9999_us: u64,
    /// Longest latency in microseconds.
    pub max_us: u64,
    /// Failed or wrong requests.
    pub errors: u64,
}

impl FioLoad {
    /// Starts fio on a disk; the logs go into `dir`.
    pub fn start(&self, target: &NbdTarget, dir: &Path) -> io::Result<RunningFio> {
        let uri = format!("--uri={}", target.uri());
        self.start_with(&["--ioengine=nbd", &uri], dir)
    }

    /// Starts fio on an image file, with direct I/O; the logs go into `dir`.
    pub fn start_on_image(&self, image: &Path, dir: &Path) -> io::Result<RunningFio> {
        let file = format!("--filename={}", image.display());
        self.start_with(&["--ioengine=io_uring", "--direct=1", &file], dir)
    }

    fn start_with(&self, target: &[&str], dir: &Path) -> io::Result<RunningFio> {
        let prefix = dir.join("fio");
        let messages = File::create(prefix.with_extension("messages"))?;
        let mut command = Command::new("fio");
        command
            .current_dir(dir)
            .args(["--name=guest", "--bs=4k"])
            .args(target)
            .arg(format!("--offset={}", self.region.start))
            .arg(format!("--size={}", self.region.end - self.region.start))
            .arg(format!("--iodepth={}", self.depth))
            .arg(format!("--runtime={}", self.runtime.as_secs()))
            .args(["--time_based", "--write_lat_log=fio", "--log_unix_epoch=1"])
            .arg("--log_offset=1")
            .args(["--output-format=json", "--output=fio.json"])
            .stdout(messages.try_clone()?)
            .stderr(messages);
        if self.compressible {
            command.arg("--buffer_compress_percentage=50");
        }
        match self.requests {
            Requests::CheckedWrites => {
                command.args(["--rw=randwrite", "--verify=crc32c", "--verify_backlog=1024"]);
                command.args(["--verify_fatal=1", "--verify_state_save=0"]);
                command.args(self.rate.map(|rate| format!("--rate={rate}")));
            }
            Requests::HotSet => {
                command.args(["--rw=randwrite", "--random_distribution=zipf:1.2"]);
                command.args(self.rate.map(|rate| format!("--rate={rate}")));
            }
            Requests::Sequential => {
                // Otherwise fio would fill every write from one buffer, and neighbouring blocks could be compressed.
                command.args(["--rw=write", "--refill_buffers"]);
                command.args(self.rate.map(|rate| format!("--rate={rate}")));
            }
            Requests::Mixed(writes) => {
                command.args(["--rw=randrw", &format!("--rwmixwrite={writes}")]);
                command.args(self.rate.map(|rate| {
                    let written = rate * u64::from(writes) / 100;
                    format!("--rate={},{written}", rate - written)
                }));
            }
        }
        Ok(RunningFio {
            process: Process::spawn(&mut command)?,
            prefix,
        })
    }

    /// Fills the region of an image file with blocks that carry fio's checksums.
    pub fn prepare(&self, image: &Path) -> io::Result<()> {
        let file = format!("--filename={}", image.display());
        self.whole_region(
            &["--ioengine=psync", "--rw=write", "--do_verify=0", &file],
            image,
        )
    }

    /// Reads the whole region of a disk and checks every block's checksum.
    pub fn check(&self, target: &NbdTarget, dir: &Path) -> io::Result<()> {
        let uri = format!("--uri={}", target.uri());
        self.whole_region(
            &["--ioengine=nbd", "--rw=read", "--iodepth=32", &uri],
            &dir.join("x"),
        )
    }

    fn whole_region(&self, args: &[&str], near: &Path) -> io::Result<()> {
        let mut command = Command::new("fio");
        command
            .current_dir(near.parent().unwrap_or(Path::new(".")))
            .args([
                "--name=region",
                "--bs=4k",
                "--verify=crc32c",
                "--verify_fatal=1",
            ])
            .arg("--verify_state_save=0")
            .arg(format!("--offset={}", self.region.start))
            .arg(format!("--size={}", self.region.end - self.region.start))
            .args(args);
        run(&mut command).map(drop)
    }
}

impl RunningFio {
    /// Returns true while fio runs.
    pub fn alive(&mut self) -> bool {
        self.process.ended().is_none()
    }

    /// Checks that fio runs.
    ///
    /// # Errors
    /// If fio has ended without being stopped.
    pub fn check(&mut self) -> io::Result<()> {
        match self.alive() {
            true => Ok(()),
            false => Err(io::Error::other(self.explain())),
        }
    }

    /// Lets the load run for a while.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn stay(&mut self, how_long: Duration) -> io::Result<()> {
        std::thread::sleep(how_long);
        self.check()
    }

    /// Returns a message for a fio that ended without being stopped.
    pub fn explain(&self) -> String {
        let read = |kind| std::fs::read_to_string(self.prefix.with_extension(kind));
        format!(
            "fio ended by itself: {}",
            read("messages").unwrap_or_default()
        )
    }

    /// Stops fio and collects the measurements.
    pub fn stop(mut self) -> io::Result<FioReport> {
        if self.alive() {
            self.process.signal(Signal::INT);
        }
        self.process.wait(Duration::from_secs(60))?;
        let text = std::fs::read_to_string(self.prefix.with_extension("json"))?;
        let messages = std::fs::read_to_string(self.prefix.with_extension("messages"))?;
        // A line about the signal may precede the document.
        let document = text.find('{').map_or("", |start| &text[start..]);
        let report: Value = serde_json::from_str(document)?;
        let error = report["jobs"][0]["error"].as_i64().unwrap_or(-1);
        let log = std::fs::read_to_string(self.prefix.with_file_name("fio_lat.1.log"))?;
        Ok(FioReport {
            error,
            messages,
            samples: log.lines().filter_map(sample).collect(),
        })
    }
}

impl FioReport {
    /// Checks that every request succeeded.
    pub fn succeeded(&self) -> io::Result<()> {
        match self.error {
            0 => Ok(()),
            error => Err(io::Error::other(format!(
                "the guest saw error {error}: {}",
                self.messages
            ))),
        }
    }

    /// Returns the windows of `step_ms` milliseconds between `from_ms` and `to_ms`.
    pub fn windows(&self, from_ms: u64, to_ms: u64, step_ms: u64) -> Vec<Window> {
        (from_ms..to_ms)
            .step_by(step_ms as usize)
            .map(|at| self.window(at, to_ms.min(at + step_ms)))
            .collect()
    }

    /// Returns the share of breached periods, from 0 to 1: of the periods of `period_ms` with an answered request,
    /// those with a request slower than `limit`.
    pub fn breached(&self, from_ms: u64, to_ms: u64, period_ms: u64, limit: Duration) -> f64 {
        let mut periods: BTreeMap<u64, bool> = BTreeMap::new();
        let inside = |sample: &&Sample| (from_ms..to_ms).contains(&sample.at_ms);
        for sample in self.samples.iter().filter(inside) {
            let late = u128::from(sample.nanoseconds) > limit.as_nanos();
            *periods
                .entry((sample.at_ms - from_ms) / period_ms)
                .or_default() |= late;
        }
        let breached = periods.values().filter(|&&late| late).count();
        breached as f64 / periods.len().max(1) as f64
    }

    /// Returns the longest time in milliseconds without an answer between two instants in milliseconds since 1970.
    pub fn longest_silence(&self, from_ms: u64, to_ms: u64) -> u64 {
        let answers = self.samples.iter().map(|sample| sample.at_ms);
        let inside = answers.filter(|at_ms| (from_ms..to_ms).contains(at_ms));
        let mut last = from_ms;
        let mut longest = 0;
        for at_ms in inside.chain([to_ms]) {
            longest = longest.max(at_ms.saturating_sub(last));
            last = last.max(at_ms);
        }
        longest
    }

    /// Returns the window between two instants in milliseconds since 1970. An error, which ends fio, belongs to the
    /// window of the last answered request.
    pub fn window(&self, from_ms: u64, to_ms: u64) -> Window {
        let seconds = to_ms.saturating_sub(from_ms) as f64 / 1000.0;
        let mut histogram = latency_histogram();
        let mut writes = 0u64;
        let inside = |sample: &&Sample| (from_ms..to_ms).contains(&sample.at_ms);
        for sample in self.samples.iter().filter(inside) {
            histogram.saturating_record(sample.nanoseconds);
            writes += u64::from(sample.write);
        }
        let at = |quantile| histogram.value_at_quantile(quantile) / 1000;
        let ended_here = self.samples.last().as_ref().is_some_and(inside);
        Window {
            seconds,
            iops: histogram.len() as f64 / seconds.max(0.001),
            write_iops: writes as f64 / seconds.max(0.001),
            mbps: histogram.len() as f64 * BLOCK / 1e6 / seconds.max(0.001),
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            p9999_us: at(0.9999),
            max_us: histogram.max() / 1000,
            errors: u64::from(self.error != 0 && ended_here),
        }
    }
}

/// Returns the time in milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

fn latency_histogram() -> Histogram<u64> {
    // Three digits between 1 µs and 10 minutes; the constant bounds are always valid.
    Histogram::new_with_bounds(1000, 600_000_000_000, 3).expect("valid histogram bounds")
}

/// Parses a line of fio's latency log: time in ms, latency in ns, 1 for a write, size, offset, priority.
fn sample(line: &str) -> Option<Sample> {
    let mut fields = line.split(',').map(str::trim);
    Some(Sample {
        at_ms: fields.next()?.parse().ok()?,
        nanoseconds: fields.next()?.parse().ok()?,
        write: fields.next()? == "1",
        offset: fields.nth(1)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_take_what_was_answered_in_them() {
        let samples = (0..1000)
            .map(|at_ms| Sample {
                at_ms,
                nanoseconds: if at_ms == 500 { 90_000_000 } else { 100_000 },
                write: at_ms % 2 == 0,
                offset: 0,
            })
            .collect();
        let report = FioReport {
            error: 5,
            messages: String::new(),
            samples,
        };
        let first = report.window(0, 500);
        assert_eq!(
            (first.iops, first.write_iops, first.errors),
            (1000.0, 500.0, 0)
        );
        assert!((99..=101).contains(&first.p50_us) && first.max_us < 110);
        let second = report.window(500, 1000);
        assert!(second.max_us >= 89_000 && second.p50_us < 110);
        assert_eq!(second.errors, 1, "fio ended in this one");
    }

    #[test]
    fn silence_is_the_longest_time_without_an_answer() {
        let sample = |at_ms| Sample {
            at_ms,
            nanoseconds: 1000,
            write: true,
            offset: 0,
        };
        let report = FioReport {
            error: 0,
            messages: String::new(),
            samples: [100, 150, 450, 440, 500].map(sample).to_vec(),
        };
        assert_eq!(report.longest_silence(100, 500), 300);
        assert_eq!(report.longest_silence(0, 140), 100, "before the first");
        assert_eq!(report.longest_silence(450, 1000), 500, "after the last");
    }

    #[test]
    fn a_period_is_breached_by_one_late_request_or_more() {
        let late_at = [3, 4, 250, 999];
        let samples = (0..1000)
            .map(|at_ms| Sample {
                at_ms,
                nanoseconds: if late_at.contains(&at_ms) {
                    2_000_000
                } else {
                    1_000_000
                },
                write: true,
                offset: 0,
            })
            .collect();
        let report = FioReport {
            error: 0,
            messages: String::new(),
            samples,
        };
        let limit = Duration::from_millis(1);
        assert!((report.breached(0, 1000, 10, limit) - 0.03).abs() < 1e-9);
        assert!((report.breached(0, 100, 10, limit) - 0.1).abs() < 1e-9);
        assert!(report.breached(300, 900, 10, limit) < 1e-9);
    }

    #[test]
    fn log_lines_are_read() {
        let read = sample("1795224539708, 330385, 1, 4096, 1048576, 0");
        let expected = Sample {
            at_ms: 1_795_224_539_708,
            nanoseconds: 330_385,
            write: true,
            offset: 1 << 20,
        };
        assert_eq!(read, Some(expected));
        assert_eq!(sample("garbage"), None);
    }
}
