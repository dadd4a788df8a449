//! The default promise, `--sla auto`, under 40 MB/s of checked writes.

use std::io;
use std::time::Duration;

use godwit_testkit::fio::{FioLoad, Requests};
use godwit_testkit::report::add_fields;
use serde_json::{Value, json};

use super::stage::{Moved, Neighbour, Run, Stage};

/// Quiet time, long enough for a window as long as the migration.
const QUIET: Duration = Duration::from_secs(15);

/// Milliseconds of a sampling period of the node's promise.
const PERIOD_MS: u64 = 10;

const FIGURES: &str = "lm_seconds s, pauses, iops_before, iops_during, p9999_us_before µs, p9999_us_during µs, \
    throughput_ratio, p9999_ratio, breach_fraction_before, breach_fraction";

/// Moves the guest's disk; with `control` also a neighbour's disk as fast after each run, while the guest's stays: the
/// effect of any transfer on the machine beside the guest.
pub(super) fn run(rounds: usize, bytes: u64, in_memory: bool, control: bool) -> io::Result<()> {
    let mut report = super::report("auto.json")?;
    // True if the source's images were in memory.
    report.fact("in_memory", in_memory);
    report.table("runs", "moved", FIGURES, "");
    let load = FioLoad {
        requests: Requests::CheckedWrites,
        region: bytes / 2..bytes,
        rate: Some(40_000_000),
        ..FioLoad::default()
    };
    let stage = Stage::loopback(bytes, load, QUIET, in_memory)?;
    let neighbour = control.then(|| Neighbour::new(bytes)).transpose()?;
    for number in 1..=rounds {
        let run = row(
            &stage.run(&format!("auto-{number}"), &["--sla", "auto"])?,
            None,
        );
        report.add("runs", run.clone())?;
        if let Some(neighbour) = &neighbour {
            // At the average speed of this run, right after the run.
            let rate = (bytes as f64 / run["lm_seconds"].as_f64().unwrap_or(1.0)) as u64;
            let moved = Moved::Neighbours(neighbour, rate);
            let limit = Duration::from_micros(run["promise"]["limit_us"].as_u64().unwrap_or(0));
            let beside = stage.run_while(&format!("beside-{number}"), moved)?;
            report.add("runs", row(&beside, Some(limit)))?;
        }
    }
    report.conclude()
}

/// Judges the promise as reported by the node. With `limit`, judges the guest's latencies against the limit instead.
///
/// A breach fraction is the part of the sampling periods with requests in which a request took longer than promised.
/// Before the disk moves it is by the guest's latencies: the baseline of the machine.
fn row(run: &Run, limit: Option<Duration>) -> Value {
    let during = run.during();
    let length = run.lm.end - run.lm.start;
    let from = run.quiet.end.saturating_sub(length).max(run.quiet.start);
    let before = run.guest.window(from, run.quiet.end);
    let count = |name: &str| run.promise()[name].as_u64().unwrap_or(0) as f64;
    let moved = if limit.is_some() {
        "a neighbour's disk"
    } else {
        "the guest's disk"
    };
    let (limit, breached) = match limit {
        Some(limit) => {
            let breached = run
                .guest
                .breached(run.lm.start, run.lm.end, PERIOD_MS, limit);
            (limit, breached)
        }
        None => {
            let limit = Duration::from_micros(count("limit_us") as u64);
            (limit, count("breached_periods") / count("periods").max(1.0))
        }
    };
    let mut row = json!({
        "moved": moved, "throughput_ratio": during.iops / before.iops.max(1.0),
        "p9999_ratio": during.p9999_us as f64 / (before.p9999_us as f64).max(1.0), "breach_fraction": breached,
        "breach_fraction_before": run.guest.breached(from, run.quiet.end, PERIOD_MS, limit),
        "lm_seconds": run.lm_seconds(), "pauses": run.pauses(), "promise": run.promise(),
    });
    add_fields(&mut row, &before, "_before");
    add_fields(&mut row, &during, "_during");
    row
}
