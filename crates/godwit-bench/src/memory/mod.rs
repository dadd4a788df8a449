//! Measures the cost of a machine's move to the memory of its guest. One guest under one load moves with zero-copy
//! memory, with memory left in its pool, and in three ways that send the memory, in turns. Draws the counterparts of
//! figures 5, 6 and 7 of the zero-copy migration paper.

mod run;
mod targets;
mod timeline;

use std::io;

use clap::{Args, ValueEnum};
use godwit_testkit::report::{Report, Runs};
use serde_json::Value;

use self::run::Scene;
use crate::common::chart::{Chart, Line};
use crate::common::{in_turns, named};

/// Smallest guest memory in MiB with room for the kernel beside the loads.
const SMALLEST_GUEST_MIB: u64 = 256;

/// A guest under memory load that moves in each way, in turns
#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// A small guest, each way once, one write rate: less than four minutes
    #[arg(long)]
    quick: bool,
    /// MiB of memory of the guest, at least 256: its loads take nearly all of it; 1024, or 512 with --quick
    #[arg(long, value_parser = clap::value_parser!(u64).range(SMALLEST_GUEST_MIB..))]
    guest_mib: Option<u64>,
    /// Rounds, each with one turn of every way; 3, or 1 with --quick
    #[arg(long)]
    rounds: Option<usize>,
    /// MiB of pages for the guest's writer to write each second. All figures but the one over the rate use the first
    /// rate; the others take one turn only; 128,32,512, or 128 with --quick
    #[arg(long, value_delimiter = ',')]
    dirty_mib: Vec<u64>,
    /// Bytes a second for memory that is sent, such as 1250M; unlimited when left out
    #[arg(long)]
    max_bandwidth: Option<String>,
    /// Only this way, such as zero-copy; again for more. Targets that compare it with others are not judged then
    #[arg(long = "only")]
    only: Vec<Method>,
}

/// A way to move the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    /// Only processors and devices move; the memory follows while the guest runs.
    ZeroCopy,
    /// As [`Self::ZeroCopy`], but the memory stays in its pool.
    StayInPool,
    /// All memory is sent before the switchover, and dirty pages again.
    PreCopy,
    /// All memory is sent after the switchover.
    PostCopy,
    /// One pass before the switchover, the rest after.
    Hybrid,
}

impl Method {
    const fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero-copy",
            Self::StayInPool => "stay-in-pool",
            Self::PreCopy => "pre-copy",
            Self::PostCopy => "post-copy",
            Self::Hybrid => "hybrid",
        }
    }

    /// Returns the options of `godwit migrate`.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::ZeroCopy => &["--memory", "zero-copy"],
            Self::StayInPool => &["--memory", "zero-copy", "--stay-in-pool"],
            Self::PreCopy => &["--memory", "pre-copy"],
            Self::PostCopy => &["--memory", "post-copy"],
            Self::Hybrid => &["--memory", "hybrid"],
        }
    }

    /// Returns true if both nodes map the guest's memory. Other guests have local memory, as without a pool.
    const fn uses_pool(self) -> bool {
        matches!(self, Self::ZeroCopy | Self::StayInPool)
    }
}

const FIGURES: &str = "total_seconds s, blackout_ms ms, bytes_over_network B, latency_before_ns ns, \
    latency_worst_window_ns ns, rate_before_mib MiB/s, rate_moving_mib MiB/s, rate_following_mib \
    MiB/s, mover_bytes_per_second B/s";

pub(crate) fn bench(arguments: &Arguments) -> io::Result<()> {
    let quick = arguments.quick;
    let guest_mib = arguments
        .guest_mib
        .unwrap_or(if quick { 512 } else { 1024 });
    let rounds = arguments.rounds.unwrap_or(if quick { 1 } else { 3 });
    let dirty_mib = match (arguments.dirty_mib.as_slice(), quick) {
        ([], true) => vec![128],
        ([], false) => vec![128, 32, 512],
        (given, _) => given.to_vec(),
    };
    let methods = match arguments.only.as_slice() {
        [] => Method::value_variants(),
        only => only,
    };
    let mut report = Report::new("bench-memory", &["qemu-system-x86_64"])?;
    report.fact("quick", quick);
    report.fact("guest_mib", guest_mib);
    report.table("runs", "method, dirty_mib", FIGURES, "");
    for (place, &dirty_mib) in dirty_mib.iter().enumerate() {
        // Only the first rate is judged; the others are lines of a figure.
        let rounds = if place == 0 { rounds } else { 1 };
        in_turns(rounds, methods.len(), |round, turn| {
            let scene = Scene {
                method: methods[turn],
                round,
                guest_mib,
                dirty_mib,
                watch_seconds: if quick { 2.0 } else { 4.0 },
                longest_seconds: if quick { 15.0 } else { 30.0 },
                max_bandwidth: arguments.max_bandwidth.as_deref(),
            };
            let run = scene.play().map_err(named(scene.method.name()))?;
            report.add("runs", run)
        })?;
    }
    draw(&mut report, dirty_mib[0])?;
    let runs = report.runs("runs");
    let verified = runs.all("verified");
    report.targets = targets::of(&runs.only("dirty_mib", dirty_mib[0]));
    report.fact("verified", verified);
    report.check(verified, "a guest found damage");
    report.conclude()
}

/// Draws all figures. Figures 5 and 6 show the first round at the first write rate.
fn draw(report: &mut Report, dirty_mib: u64) -> io::Result<()> {
    let all = report.runs("runs");
    let first = all.only("dirty_mib", dirty_mib).only("round", 0);
    let over_time = |points: &str| -> Vec<Line> {
        let name = |run: &Value| run["method"].as_str().unwrap_or_default().to_owned();
        first
            .0
            .iter()
            .map(|run| Line::of_pairs(&name(run), &run[points]))
            .collect()
    };
    let over_rate = |runs: &Runs<'_>, figure: &str| Line::over(runs, "method", "dirty_mib", figure);
    let since = "seconds since the memory began to move";
    let rate = "MiB of pages written each second";
    let latency = "Latency of a random pointer chase while its machine moves";
    let pages = "Pages written by a writer with a nominal rate while its machine moves";
    let total = "Time until all of the memory has moved";
    let charts = [
        (
            "latency.svg",
            Chart::new(
                latency,
                since,
                "ns an access, mean of 100 ms",
                over_time("latencies_ns"),
            )
            .logarithmic(),
        ),
        (
            "throughput.svg",
            Chart::new(
                pages,
                since,
                "MiB of pages a second, in 100 ms",
                over_time("rates_mib"),
            ),
        ),
        (
            "total-time.svg",
            Chart::new(total, rate, "seconds", over_rate(&all, "total_seconds")).logarithmic(),
        ),
        (
            "bytes-sent.svg",
            Chart::new(
                "Memory sent over the network",
                rate,
                "bytes",
                over_rate(&all, "bytes_over_network"),
            )
            .logarithmic(),
        ),
    ];
    charts
        .iter()
        .try_for_each(|(file, chart)| chart.add(report, file))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_guest_too_small_for_its_loads_is_refused() {
        let said = |mib: &str| Line::try_parse_from(["memory", "--guest-mib", mib]);
        assert!(said("255").is_err());
        let taken = said("256").ok().map(|line| line.arguments.guest_mib);
        assert_eq!(taken, Some(Some(256)));
    }
}
