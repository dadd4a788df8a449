//! The default promise: the load of the demo, `--sla auto`.

use std::io;
use std::time::Duration;

use godwit_testkit::fio::{FioLoad, Requests, Window};
use godwit_testkit::report::{median, write_report_as};
use serde::Serialize;
use serde_json::Value;

use crate::sla::stage::{Moved, Neighbour, Run, Stage};

/// Quiet time, long enough for a window as long as the migration.
const QUIET: Duration = Duration::from_secs(15);

/// Milliseconds of a sampling period of the node's promise.
const PERIOD_MS: u64 = 10;

#[derive(Debug, Serialize)]
struct Report {
    /// True if the source's images were in memory.
    in_memory: bool,
    runs: Vec<Measured>,
    throughput_ratio: f64,
    p9999_ratio: f64,
    breach_fraction: f64,
    breach_fraction_before: f64,
    lm_seconds: f64,
    /// The same guest with its disk at rest while a neighbour's disk moves as fast.
    #[serde(skip_serializing_if = "Option::is_none")]
    control: Option<Control>,
}

/// Effect of any transfer on the machine beside the guest.
#[derive(Debug, Serialize)]
struct Control {
    runs: Vec<Measured>,
    throughput_ratio: f64,
    p9999_ratio: f64,
    breach_fraction: f64,
}

#[derive(Debug, Serialize)]
struct Measured {
    /// Requests per second during / before.
    throughput_ratio: f64,
    /// p99.99 during / before.
    p9999_ratio: f64,
    /// Fraction of the sampling periods with requests in which a request took longer than promised.
    breach_fraction: f64,
    /// The same fraction before the disk moved, by the guest's latencies: the baseline of the machine.
    breach_fraction_before: f64,
    lm_seconds: f64,
    pauses: u64,
    promise: Value,
    before: Window,
    during: Window,
}

/// Runs the scene and reports medians.
pub(crate) fn run(rounds: usize, bytes: u64, in_memory: bool, control: bool) -> io::Result<()> {
    let load = FioLoad {
        requests: Requests::CheckedWrites,
        region: bytes / 2..bytes,
        rate: Some(40_000_000),
        depth: 16,
        runtime: Duration::from_secs(600),
        compressible: false,
    };
    let stage = Stage::loopback(bytes, load, QUIET, in_memory)?;
    let neighbour = control.then(|| Neighbour::new(bytes)).transpose()?;
    println!(
        "{:<10} {:>6} {:>7} {:>11} {:>11} {:>12} {:>12} {:>9} {:>9}",
        "run",
        "LM s",
        "pauses",
        "IOPS before",
        "IOPS during",
        "p99.99 bef.",
        "p99.99 dur.",
        "br. bef.",
        "br. dur."
    );
    let (mut runs, mut controls) = (Vec::new(), Vec::new());
    for number in 1..=rounds {
        let disk = format!("auto-{number}");
        let run = Measured::new(&stage.run(&disk, &["--sla", "auto"])?, None);
        run.print(&number.to_string());
        if let Some(neighbour) = &neighbour {
            // At the average speed of this run, right after the run.
            let rate = (bytes as f64 / run.lm_seconds) as u64;
            let moved = Moved::Neighbours(neighbour, rate);
            let limit = Duration::from_micros(run.promise["limit_us"].as_u64().unwrap_or(0));
            let beside = stage.run_while(&format!("beside-{number}"), moved)?;
            let beside = Measured::new(&beside, Some(limit));
            beside.print(&format!("{number} beside"));
            controls.push(beside);
        }
        runs.push(run);
    }
    let medians = |runs: &[Measured], pick: fn(&Measured) -> f64| {
        median(&runs.iter().map(pick).collect::<Vec<_>>())
    };
    let control = (!controls.is_empty()).then(|| Control {
        throughput_ratio: medians(&controls, |run| run.throughput_ratio),
        p9999_ratio: medians(&controls, |run| run.p9999_ratio),
        breach_fraction: medians(&controls, |run| run.breach_fraction),
        runs: controls,
    });
    let of = |pick: fn(&Measured) -> f64| medians(&runs, pick);
    let report = Report {
        in_memory,
        throughput_ratio: of(|run| run.throughput_ratio),
        p9999_ratio: of(|run| run.p9999_ratio),
        breach_fraction: of(|run| run.breach_fraction),
        breach_fraction_before: of(|run| run.breach_fraction_before),
        lm_seconds: of(|run| run.lm_seconds),
        runs,
        control,
    };
    println!(
        "medians: throughput {:.3} of before, p99.99 {:.2} times before, {:.2} % of the periods \
         breached ({:.2} % before)",
        report.throughput_ratio,
        report.p9999_ratio,
        report.breach_fraction * 100.0,
        report.breach_fraction_before * 100.0
    );
    if let Some(control) = &report.control {
        println!(
            "while a neighbour's disk moves as fast: throughput {:.3} of before, p99.99 {:.2} times \
             before, {:.2} % of the periods breached",
            control.throughput_ratio,
            control.p9999_ratio,
            control.breach_fraction * 100.0
        );
    }
    println!(
        "{}",
        write_report_as("bench-sla", "auto.json", &report)?.display()
    );
    Ok(())
}

impl Measured {
    /// Judges the promise as reported by the node. With `limit`, judges the guest's latencies against the limit
    /// instead.
    fn new(run: &Run, limit: Option<Duration>) -> Self {
        let during = run.during();
        let length = run.lm.end - run.lm.start;
        let from = run.quiet.end.saturating_sub(length).max(run.quiet.start);
        let before = run.guest.window(from, run.quiet.end);
        let count = |name: &str| run.promise()[name].as_u64().unwrap_or(0) as f64;
        let (limit, breach_fraction) = match limit {
            Some(limit) => {
                let (from, to) = (run.lm.start, run.lm.end);
                (limit, run.guest.breached(from, to, PERIOD_MS, limit))
            }
            None => {
                let limit = Duration::from_micros(count("limit_us") as u64);
                (limit, count("breached_periods") / count("periods").max(1.0))
            }
        };
        Self {
            throughput_ratio: during.iops / before.iops.max(1.0),
            p9999_ratio: during.p9999_us as f64 / (before.p9999_us as f64).max(1.0),
            breach_fraction,
            breach_fraction_before: run.guest.breached(from, run.quiet.end, PERIOD_MS, limit),
            lm_seconds: run.lm_seconds(),
            pauses: run.pauses(),
            promise: run.promise().clone(),
            before,
            during,
        }
    }

    fn print(&self, name: &str) {
        println!(
            "{name:<10} {:>6.1} {:>7} {:>11.0} {:>11.0} {:>12} {:>12} {:>8.2}% {:>8.2}%",
            self.lm_seconds,
            self.pauses,
            self.before.iops,
            self.during.iops,
            self.before.p9999_us,
            self.during.p9999_us,
            self.breach_fraction_before * 100.0,
            self.breach_fraction * 100.0
        );
    }
}
