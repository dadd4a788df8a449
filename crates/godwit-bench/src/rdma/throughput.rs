//! Figure 5: throughput of the partner while its peer moves. A shell in the partner's virtual machine reads the byte
//! counters of the network device every 20 ms without starting other programs.

use std::io;
use std::time::Duration;

use godwit_testkit::rdma::{ALIAS, AtWork, Bed, Program, RdmaGuest, Side, move_process, write_bw};
use godwit_testkit::report::median;
use serde_json::{Value, json};

use super::{Bench, role};

/// Width of a point of the figure, in seconds.
const BIN: f64 = 0.1;
/// Time to watch the program before the move and after.
const WATCH: Duration = Duration::from_secs(4);
/// Bytes of a message.
const MESSAGE: u32 = 65_536;

/// A reading of the partner's clock and of its bytes in both directions.
type Sample = (f64, f64);

/// Shell script that reads the counters until /run/samples-end exists.
const SAMPLER: &str = r#"exec 9<><(:); while [ ! -e /run/samples-end ]; do
read -r r </sys/class/net/eth0/statistics/rx_bytes; read -r t </sys/class/net/eth0/statistics/tx_bytes;
echo "$EPOCHREALTIME $((r + t))"; read -r -t 0.02 -u 9 _; done"#;

impl Bench<'_> {
    /// Moves either side, without pre-setup and with it.
    pub(super) fn throughput(&mut self) -> io::Result<()> {
        let qps = self.plan.throughput_qps;
        for &side in self.plan.sides {
            for pre_setup in self.ways() {
                let run = json!({"side": role(side), "qps": qps, "pre_setup": pre_setup});
                self.measure("throughput", run, |bed, run| {
                    watch(bed, side, (qps, pre_setup), run)
                })?;
            }
        }
        Ok(())
    }
}

/// Returns a program that outlasts the watch and is ended then.
fn program(qps: u32) -> Program {
    write_bw(qps, 4, MESSAGE, 1_000_000)
}

fn watch(bed: &Bed, side: Side, (qps, pre_setup): (u32, bool), run: &mut Value) -> io::Result<()> {
    let (there, partner) = (bed.guest(2), bed.guest(3));
    let at_work = AtWork::start(bed, &program(qps), side)?;
    partner.must(&format!(
        "rm -f /run/samples-end; cat >/run/sampler <<'END'\n{SAMPLER}\nEND\n"
    ))?;
    partner.background("samples", "bash /run/sampler")?;
    std::thread::sleep(WATCH);
    let began = clock(partner)?;
    let result = move_process(at_work.mover, there, ALIAS, at_work.log, pre_setup);
    let ended = clock(partner)?;
    run["moved"] = json!(result?);
    std::thread::sleep(WATCH);
    let text = partner.must("touch /run/samples-end; cat /run/samples.log")?;
    let samples = samples(&text)?;
    let first = samples[0].0;
    let points = points(&samples);
    let after = rate(&points, ended - first..f64::MAX);
    run["move_seconds"] = json!([began - first, ended - first]);
    run["before"] = rate(&points, 0.0..began - first).into();
    run["after"] = after.into();
    run["longest_gap_ms"] = (longest_gap(&samples) * 1e3).into();
    run["points"] = json!(points);
    // The moved program still works: no request failed.
    at_work.works(there)?;
    if after.is_none_or(|after| after == 0.0) {
        return Err(io::Error::other("nothing was sent after the move"));
    }
    Ok(())
}

fn clock(guest: &RdmaGuest) -> io::Result<f64> {
    let said = guest.must("echo $EPOCHREALTIME")?;
    let parsed = said.trim().parse();
    parsed.map_err(|_| io::Error::other(format!("{said:?} is no time")))
}

fn samples(text: &str) -> io::Result<Vec<Sample>> {
    let parsed = text.lines().filter_map(|line| {
        let (time, bytes) = line.split_once(' ')?;
        Some((time.parse().ok()?, bytes.parse().ok()?))
    });
    let found: Vec<Sample> = parsed.collect();
    if found.len() < 2 {
        return Err(io::Error::other(format!("the partner noted {text:?}")));
    }
    Ok(found)
}

/// Returns the bytes a second in each tenth of a second. A late reading is spread over the time since the previous one.
fn points(samples: &[Sample]) -> Vec<(f64, f64)> {
    let (first, last) = (samples[0].0, samples[samples.len() - 1].0);
    let count = ((last - first) / BIN).floor() as usize;
    let mut bytes = vec![0.0; count];
    for pair in samples.windows(2) {
        let ((from, before), (to, after)) = (pair[0], pair[1]);
        if to <= from {
            continue;
        }
        let (from, to) = (from - first, to - first);
        for (bin, sum) in bytes.iter_mut().enumerate() {
            let (start, end) = (bin as f64 * BIN, (bin + 1) as f64 * BIN);
            let shared = (to.min(end) - from.max(start)).max(0.0);
            *sum += (after - before) * shared / (to - from);
        }
    }
    let point = |(bin, bytes): (usize, f64)| ((bin as f64 + 0.5) * BIN, bytes / BIN);
    bytes.into_iter().enumerate().map(point).collect()
}

fn rate(points: &[(f64, f64)], within: std::ops::Range<f64>) -> Option<f64> {
    let inside = points.iter().filter(|point| within.contains(&point.0));
    let values: Vec<f64> = inside.map(|point| point.1).collect();
    (!values.is_empty()).then(|| median(&values))
}

/// Bytes a second that count as no traffic: nodes and others send some packets, too.
const NOTHING: f64 = 200_000.0;

/// Returns the longest time without traffic, in seconds.
fn longest_gap(samples: &[Sample]) -> f64 {
    let (mut longest, mut began) = (0.0_f64, None);
    for pair in samples.windows(2) {
        let ((from, before), (to, after)) = (pair[0], pair[1]);
        if after - before > NOTHING * (to - from) {
            began = None;
        } else {
            let since = *began.get_or_insert(from);
            longest = longest.max(to - since);
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10 MB/s for a second, nothing for half a second, then 5 MB/s.
    fn readings() -> Vec<Sample> {
        let at = |time: f64| match time {
            t if t < 1.0 => 1e7 * t,
            t if t < 1.5 => 1e7,
            t => 1e7 + 5e6 * (t - 1.5),
        };
        (0..=100)
            .map(|step| f64::from(step) * 0.02)
            .map(|time| (1000.0 + time, at(time)))
            .collect()
    }

    #[test]
    fn rates_are_those_of_the_readings() {
        let points = points(&readings());
        assert_eq!(points.len(), 20);
        let near = |found: Option<f64>, wanted: f64| {
            let found = found.unwrap();
            assert!((found - wanted).abs() < 0.02 * wanted + 1.0, "{found}");
        };
        near(rate(&points, 0.0..0.9), 1e7);
        near(rate(&points, 1.05..1.4), 0.0);
        near(rate(&points, 1.6..f64::MAX), 5e6);
        assert_eq!(rate(&points, 7.0..8.0), None);
    }

    #[test]
    fn the_gap_is_where_nothing_was_sent() {
        let gap = longest_gap(&readings());
        assert!((0.45..0.56).contains(&gap), "{gap}");
    }

    #[test]
    fn a_late_reading_is_spread() {
        let points = points(&[(0.0, 0.0), (1.0, 100.0), (1.0, 100.0)]);
        assert_eq!(points.len(), 10);
        assert!(points.iter().all(|point| (point.1 - 100.0).abs() < 1e-6));
    }

    #[test]
    fn a_line_that_is_no_reading_is_left_out() {
        let found = samples("12.5 100\nbash: no\n13.0 200\n").unwrap();
        assert_eq!(found, [(12.5, 100.0), (13.0, 200.0)]);
        assert!(samples("bash: not found\n").is_err());
    }
}
