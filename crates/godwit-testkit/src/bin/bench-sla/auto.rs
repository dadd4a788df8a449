//! The promise that nobody had to think about: the load of the demo, `--sla auto`.

use std::io;
use std::time::Duration;

use godwit_testkit::fio::{FioLoad, Requests, Window};
use godwit_testkit::report::{median, write_report_as};
use serde::Serialize;
use serde_json::Value;

use crate::stage::{Run, Stage};

/// Long enough that the window before is as long as the one during.
const QUIET: Duration = Duration::from_secs(15);

/// How often the node judges its promise.
const PERIOD_MS: u64 = 10;

#[derive(Debug, Serialize)]
struct Report {
    /// Whether the source's images were in memory.
    in_memory: bool,
    runs: Vec<Measured>,
    throughput_ratio: f64,
    p9999_ratio: f64,
    breach_fraction: f64,
    breach_fraction_before: f64,
    lm_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Measured {
    /// Requests per second during / before.
    throughput_ratio: f64,
    /// p99.99 during / before.
    p9999_ratio: f64,
    /// Of the sampling periods with requests, those in which one took longer than promised.
    breach_fraction: f64,
    /// The same before the disk moved, by what the guest saw: what the machine does by itself.
    breach_fraction_before: f64,
    lm_seconds: f64,
    pauses: u64,
    promise: Value,
    before: Window,
    during: Window,
}

/// Runs it and reports medians.
pub(crate) fn run(rounds: usize, bytes: u64, in_memory: bool) -> io::Result<()> {
    let load = FioLoad {
        requests: Requests::CheckedWrites,
        region: bytes / 2..bytes,
        rate: Some(40_000_000),
        depth: 16,
        runtime: Duration::from_secs(600),
    };
    let stage = Stage::loopback(bytes, load, QUIET, in_memory)?;
    println!(
        "{:<6} {:>6} {:>7} {:>11} {:>11} {:>12} {:>12} {:>9} {:>9}",
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
    let mut runs = Vec::new();
    for number in 0..rounds {
        let run = Measured::new(&stage.run(&format!("auto-{number}"), &["--sla", "auto"])?);
        println!(
            "{:<6} {:>6.1} {:>7} {:>11.0} {:>11.0} {:>12} {:>12} {:>8.2}% {:>8.2}%",
            number + 1,
            run.lm_seconds,
            run.pauses,
            run.before.iops,
            run.during.iops,
            run.before.p9999_us,
            run.during.p9999_us,
            run.breach_fraction_before * 100.0,
            run.breach_fraction * 100.0
        );
        runs.push(run);
    }
    let of = |pick: fn(&Measured) -> f64| median(&runs.iter().map(pick).collect::<Vec<_>>());
    let report = Report {
        in_memory,
        throughput_ratio: of(|run| run.throughput_ratio),
        p9999_ratio: of(|run| run.p9999_ratio),
        breach_fraction: of(|run| run.breach_fraction),
        breach_fraction_before: of(|run| run.breach_fraction_before),
        lm_seconds: of(|run| run.lm_seconds),
        runs,
    };
    println!(
        "medians: throughput {:.3} of before, p99.99 {:.2} times before, {:.2} % of the periods \
         breached ({:.2} % before)",
        report.throughput_ratio,
        report.p9999_ratio,
        report.breach_fraction * 100.0,
        report.breach_fraction_before * 100.0
    );
    println!(
        "{}",
        write_report_as("bench-sla", "auto.json", &report)?.display()
    );
    Ok(())
}

impl Measured {
    fn new(run: &Run) -> Self {
        let during = run.during();
        let length = run.lm.end - run.lm.start;
        let from = run.quiet.end.saturating_sub(length).max(run.quiet.start);
        let before = run.guest.window(from, run.quiet.end);
        let count = |name: &str| run.promise()[name].as_u64().unwrap_or(0) as f64;
        let limit = Duration::from_micros(count("limit_us") as u64);
        Self {
            throughput_ratio: during.iops / before.iops.max(1.0),
            p9999_ratio: during.p9999_us as f64 / (before.p9999_us as f64).max(1.0),
            breach_fraction: count("breached_periods") / count("periods").max(1.0),
            breach_fraction_before: run.guest.breached(from, run.quiet.end, PERIOD_MS, limit),
            lm_seconds: run.lm_seconds(),
            pauses: run.pauses(),
            promise: run.promise().clone(),
            before,
            during,
        }
    }
}
