//! The lines of the guest's console.

use std::time::Instant;

use serde::Deserialize;
use serde_json::Value;

use super::arrivals::Arrivals;
use super::windows::Windows;

/// Longest parsed line, and number of lines kept for error messages.
const LINE: usize = 4096;
const KEPT: usize = 200;

/// The guest's report of each second. Gaps are by the guest's clock, which stops with the machine.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    pub seq: u64,
    /// Milliseconds since the load began.
    pub uptime_ms: u64,
    /// Acknowledged writes of 4 KiB.
    pub writes: u64,
    pub reads: u64,
    pub syncs: u64,
    /// Small files made, renamed, removed or compared.
    pub file_operations: u64,
    /// Passes of rewriting and comparing the memory.
    pub memory_passes: u64,
    /// Failed operations.
    pub errors: u64,
    /// Blocks, files or memory pages with wrong content.
    pub mismatches: u64,
    /// Largest time between two writes since the last report.
    pub largest_gap_ms: f64,
    /// Largest time between two writes since the last mark.
    pub gap_since_mark_ms: f64,
    pub mark: u64,
    /// Latency of requests to the disks since the last mark.
    pub latency_since_mark: Latency,
}

/// The latency of a guest's writes, reads and syncs, in microseconds of the guest's clock.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Latency {
    pub p50_us: u64,
    /// The 99th percentile.
    pub p99_us: u64,
    /// The 99.9th percentile.
    pub p999_us: u64,
    pub max_us: u64,
}

/// The guest's last word: every block, file and page was compared, the disks are unmounted.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Finished {
    /// Acknowledged writes of 4 KiB in all.
    pub writes: u64,
    /// Failed operations.
    pub errors: u64,
    /// Blocks, files or memory pages with wrong content.
    pub mismatches: u64,
}

/// The state of the guest as far as the lines tell.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// The boots of the guest of which the load has begun.
    pub(super) boots: Vec<String>,
    /// The boot about to end.
    pub(super) ending: Option<String>,
    /// The number of the last write found on each disk by the last boot.
    pub(super) resumed: Vec<u64>,
    /// Writes acknowledged before a boot and missing afterwards.
    pub(super) lost_writes: u64,
    /// The outcome of the last command to the network card.
    pub(super) card: Option<String>,
    pub(super) report: Option<Report>,
    /// Reports with an old number: another copy of the guest runs.
    pub(super) repeated: u64,
    pub(super) marked: u64,
    pub(super) finished: Option<Finished>,
    /// Reason why the load could not begin or end.
    pub(super) fatal: Option<String>,
    /// Errors, mismatches and messages of the guest's kernel.
    pub(super) log: Vec<String>,
    pub(super) arrivals: Arrivals,
    /// Arrivals of the guest's beat, as if the beat were one disk.
    pub(super) beats: Arrivals,
    pub(super) windows: Windows,
}

impl Heard {
    fn line(&mut self, line: &str, at: Instant) {
        if let Some((disk, writes)) = line.strip_prefix('~').and_then(tick) {
            self.arrivals.tick(disk, writes, at);
            return;
        }
        if let Some(number) = line.strip_prefix('=').and_then(|text| text.parse().ok()) {
            self.beats.tick(0, number, at);
            return;
        }
        let object: Value = match serde_json::from_str(line) {
            Ok(object @ Value::Object(_)) => object,
            _ => return self.keep(line),
        };
        if self.windows.take(&object, at) {
            return;
        }
        if object.get("finished").is_some() {
            self.finished = serde_json::from_value(object).ok();
            self.arrivals.end();
            self.beats.end();
        } else if object.get("seq").is_some() {
            if let Ok(report) = serde_json::from_value::<Report>(object) {
                let known = |last: &Report| report.seq <= last.seq;
                self.repeated += u64::from(self.report.as_ref().is_some_and(known));
                self.report = Some(report);
            }
        } else if let Some(id) = object.get("marked").and_then(Value::as_u64) {
            if self.marked != id {
                self.marked = id;
                self.arrivals.mark();
                self.beats.mark();
            }
        } else if let Some(boot) = object.get("boot").and_then(Value::as_str) {
            if self.boots.last().is_none_or(|last| last != boot) && self.boots.len() < KEPT {
                self.boots.push(boot.to_owned());
                // Reports of a new boot are numbered from the beginning.
                self.report = None;
            }
        } else if let Some(boot) = object.get("ending").and_then(Value::as_str) {
            self.ending = Some(boot.to_owned());
        } else if let Some(outcome) = object.get("card").and_then(Value::as_str) {
            self.card = Some(outcome.to_owned());
        } else if let Some(resumed) = resumed(&object) {
            self.resume(resumed);
        } else {
            if let Some(why) = object.get("fatal").and_then(Value::as_str) {
                self.fatal = Some(why.into());
            }
            self.keep(line);
        }
    }

    /// Records the last write found on this disk by a boot.
    fn resume(&mut self, (disk, write): (usize, u64)) {
        let acknowledged = self.arrivals.writes_by_disk();
        let acknowledged = acknowledged.get(disk).copied().unwrap_or(0);
        self.lost_writes += acknowledged.saturating_sub(write);
        self.resumed.truncate(disk);
        self.resumed.push(write);
    }

    fn keep(&mut self, line: &str) {
        if !line.is_empty() && self.log.len() < KEPT {
            self.log.push(line.into());
        }
    }
}

/// Returns the disk, and the number of the last write there.
fn resumed(object: &Value) -> Option<(usize, u64)> {
    let disk = object.get("resumed")?.as_u64()?;
    Some((usize::try_from(disk).ok()?, object.get("write")?.as_u64()?))
}

fn tick(text: &str) -> Option<(usize, u64)> {
    let (disk, writes) = text.split_once(' ')?;
    Some((disk.parse().ok()?, writes.parse().ok()?))
}

/// Assembles lines from the bytes of one connection.
#[derive(Debug, Default)]
pub(super) struct Lines {
    part: Vec<u8>,
}

impl Lines {
    /// Takes bytes that arrived at one moment.
    pub(super) fn take(&mut self, bytes: &[u8], at: Instant, heard: &mut Heard) {
        for byte in bytes {
            if *byte == b'\n' {
                let line = String::from_utf8_lossy(&self.part);
                heard.line(line.trim(), at);
                self.part.clear();
            } else if self.part.len() < LINE {
                self.part.push(*byte);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{Finished, Heard, KEPT, LINE, Lines};

    #[test]
    fn lines_in_pieces_and_noise() {
        let (mut heard, mut lines, now) = (Heard::default(), Lines::default(), Instant::now());
        let mut take = |heard: &mut Heard, text: &str| lines.take(text.as_bytes(), now, heard);
        take(
            &mut heard,
            "{\"started\":1,\"boot\":\"x\"}\r\n~0 1\n~0 x\n{\"mark",
        );
        assert_eq!(heard.boots, ["x"]);
        take(&mut heard, "ed\":4}\n[ 1.0] EXT4-fs error\n{\"seq\":1}\n");
        assert_eq!(heard.marked, 4);
        take(&mut heard, "=1\r\n=2\n");
        assert!(heard.report.is_none());
        assert_eq!(heard.beats.writes().map(|(number, _)| number), Some(2));
        assert_eq!(heard.log, ["~0 x", "[ 1.0] EXT4-fs error"]);
        take(&mut heard, "{\"fatal\":\"no disk\"}\n");
        assert_eq!(heard.fatal.as_deref(), Some("no disk"));
        take(
            &mut heard,
            "\n{\"finished\":true,\"writes\":9,\"errors\":0,\"mismatches\":2}\n",
        );
        let finished = Finished {
            writes: 9,
            errors: 0,
            mismatches: 2,
        };
        assert_eq!(heard.finished, Some(finished));
    }

    #[test]
    fn a_guest_that_runs_twice_is_noticed() {
        let (mut heard, now) = (Heard::default(), Instant::now());
        let [mut here, mut there] = [Lines::default(), Lines::default()];
        let report = |seq: u64| {
            format!(
                "{{\"seq\":{seq},\"uptime_ms\":1,\"writes\":1,\"reads\":1,\"syncs\":1,\
                 \"file_operations\":1,\"memory_passes\":1,\"errors\":0,\"mismatches\":0,\
                 \"largest_gap_ms\":1.0,\"gap_since_mark_ms\":1.0,\"mark\":0,\
                 \"latency_since_mark\":{{\"p50_us\":1,\"p99_us\":2,\"p999_us\":3,\"max_us\":4}}}}\n"
            )
        };
        for seq in 0..3 {
            here.take(report(seq).as_bytes(), now, &mut heard);
        }
        there.take(report(3).as_bytes(), now, &mut heard);
        assert_eq!(heard.repeated, 0);
        here.take(report(3).as_bytes(), now, &mut heard);
        assert_eq!(heard.repeated, 1);
    }

    #[test]
    fn a_write_that_a_boot_misses_is_noticed() {
        let (mut heard, mut lines, now) = (Heard::default(), Lines::default(), Instant::now());
        let mut take = |text: &str| lines.take(text.as_bytes(), now, &mut heard);
        take("{\"started\":2,\"boot\":\"x\"}\n~0 7\n~1 9\n{\"resumed\":0,\"write\":7}\n");
        take("{\"resumed\":1,\"write\":10}\n{\"started\":2,\"boot\":\"y\"}\n~1 11\n");
        take("{\"resumed\":1,\"write\":9}\n");
        assert_eq!(heard.lost_writes, 2);
        assert_eq!(heard.boots, ["x", "y"]);
    }

    #[test]
    fn a_mad_guest_makes_nothing_grow() {
        let (mut heard, mut lines, now) = (Heard::default(), Lines::default(), Instant::now());
        lines.take(&vec![b'x'; 1 << 20], now, &mut heard);
        lines.take("\ny\n".repeat(1 << 16).as_bytes(), now, &mut heard);
        assert_eq!(heard.log.len(), KEPT);
        assert_eq!(heard.log[0].len(), LINE);
    }
}
