//! Detects a disk at rest. Writes of one mover can keep a disk busy for half a minute, at the expense of the next
//! mover.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::interrupt;
use godwit_testkit::process::run;
use serde_json::Value;

/// Limit of the 99.99th percentile of a probe's writes to a disk at rest.
const AT_REST: Duration = Duration::from_millis(5);
/// Consecutive probes that must find the disk at rest.
const PROBES: u32 = 2;
/// Duration of a probe.
const PROBE: Duration = Duration::from_secs(3);

/// Watches the disk of a directory.
#[derive(Debug)]
pub(crate) struct Rest {
    probe: PathBuf,
    longest: Duration,
}

/// Parses the longest wait in seconds: 0, or enough for the probes.
pub(crate) fn settle_seconds(text: &str) -> Result<u64, String> {
    let least = (PROBE * (PROBES + 1)).as_secs();
    let seconds = text.parse().ok().filter(|&it| it == 0 || it >= least);
    seconds.ok_or_else(|| format!("'{text}' is neither 0 nor a number from {least} on"))
}

impl Rest {
    /// Returns a watch of the disk of `dir`, with a longest wait.
    pub(crate) fn new(dir: &Path, longest: Duration) -> Self {
        Self {
            probe: dir.join("probe.img"),
            longest,
        }
    }

    /// Waits until the disk is at rest. Returns true if it is, and `None` if no wait was requested.
    pub(crate) fn wait(&self) -> io::Result<Option<bool>> {
        if self.longest.is_zero() {
            return Ok(None);
        }
        let began = Instant::now();
        let mut calm = 0;
        while calm < PROBES && began.elapsed() + PROBE <= self.longest {
            let slowest = self.slowest();
            // Ctrl-C ends a probe, too, without a fault of the disk.
            interrupt::check()?;
            let at_rest = slowest? <= AT_REST;
            calm = if at_rest { calm + 1 } else { 0 };
        }
        Ok(Some(calm == PROBES))
    }

    /// Returns the 99.99th percentile of a guest's writes to a probe file.
    fn slowest(&self) -> io::Result<Duration> {
        let output = run(Command::new("fio")
            .args(["--name=probe", "--rw=randwrite", "--bs=4k", "--direct=1"])
            .args(["--ioengine=io_uring", "--iodepth=16", "--rate=40m"])
            .args(["--size=256m", "--time_based", "--output-format=json"])
            .arg(format!("--runtime={}", PROBE.as_secs()))
            .arg(format!("--filename={}", self.probe.display())))?;
        slowest(&output.stdout)
    }
}

/// Parses the 99.99th percentile from fio's report.
fn slowest(report: &[u8]) -> io::Result<Duration> {
    let report: Value = serde_json::from_slice(report)?;
    let latency = &report["jobs"][0]["write"]["clat_ns"]["percentile"]["99.990000"];
    let latency = latency.as_u64().map(Duration::from_nanos);
    latency.ok_or_else(|| io::Error::other("fio's report has no 99.99th percentile of writes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_says_how_slow_the_disk_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let rest = |longest| Rest::new(dir.path(), longest);
        assert_eq!(rest(Duration::ZERO).wait().expect("no wait"), None);
        assert!(rest(Duration::from_secs(1)).slowest().expect("a probe") > Duration::ZERO);
        let too_short = rest(PROBE * 2 - Duration::from_millis(1)).wait();
        assert_eq!(too_short.expect("a probe"), Some(false));
    }

    #[test]
    fn a_time_to_settle_is_none_or_enough() {
        assert_eq!(settle_seconds("0"), Ok(0));
        assert_eq!(settle_seconds("9"), Ok(9));
        assert!(settle_seconds("8").is_err() && settle_seconds("x").is_err());
    }

    #[test]
    fn a_report_without_writes_is_none() {
        let report = br#"{"jobs": [{"write": {"clat_ns": {"percentile": {"99.990000": 5000}}}}]}"#;
        assert_eq!(slowest(report).expect("5 µs"), Duration::from_micros(5));
        assert!(slowest(br#"{"jobs": []}"#).is_err());
        assert!(slowest(b"fio: error").is_err());
    }
}
