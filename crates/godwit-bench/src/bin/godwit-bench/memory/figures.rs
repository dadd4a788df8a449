//! The figures of the zero-copy migration paper's evaluation.

use std::io;
use std::path::Path;

use godwit_bench::chart::{Chart, Line};

use crate::memory::method::Method;
use crate::memory::run::Run;
use crate::memory::summary::Summary;
use godwit_bench::spread::Spread;

/// Draws all figures and returns their file names. Figures 5 and 6 show the first round at the first write rate.
///
/// # Errors
/// I/O errors of the files.
pub(crate) fn draw(runs: &[Run], dirty_mib: u64, dir: &Path) -> io::Result<Vec<&'static str>> {
    let over_time = |pick: fn(&Run) -> &Vec<(f64, f64)>| {
        let first = |run: &&Run| run.round == 0 && run.dirty_mib == dirty_mib;
        let line = |run: &Run| Line {
            name: run.method.name().to_owned(),
            points: pick(run).clone(),
        };
        runs.iter().filter(first).map(line).collect::<Vec<_>>()
    };
    let summaries = Summary::all(runs);
    let over_rate = |pick: fn(&Summary) -> Option<Spread>| {
        let of = |method: Method| Line {
            name: method.name().to_owned(),
            points: summaries
                .iter()
                .filter(|summary| summary.method == method)
                .filter_map(|of| Some((of.dirty_mib as f64, pick(of)?.median)))
                .collect(),
        };
        let lines = Method::ALL.into_iter().map(of);
        lines
            .filter(|line| !line.points.is_empty())
            .collect::<Vec<_>>()
    };
    let since = "seconds since the memory began to move";
    let rate = "MiB of pages written each second";
    let chart = |title: &str, x: &str, y: &str, lines| Chart {
        title: title.to_owned(),
        x_label: x.to_owned(),
        y_label: y.to_owned(),
        logarithmic: true,
        lines,
        shaded: Vec::new(),
        level: None,
    };
    let charts = [
        (
            "latency.svg",
            chart(
                "Latency of a random pointer chase while its machine moves",
                since,
                "ns an access, mean of 100 ms",
                over_time(|run| &run.latencies_ns),
            ),
        ),
        (
            "throughput.svg",
            Chart {
                logarithmic: false,
                ..chart(
                    "Pages written by a writer with a nominal rate while its machine moves",
                    since,
                    "MiB of pages a second, in 100 ms",
                    over_time(|run| &run.rates_mib),
                )
            },
        ),
        (
            "total-time.svg",
            chart(
                "Time until all of the memory has moved",
                rate,
                "seconds",
                over_rate(|of| of.total_seconds),
            ),
        ),
        (
            "bytes-sent.svg",
            chart(
                "Memory sent over the network",
                rate,
                "bytes",
                over_rate(|of| of.bytes_over_network),
            ),
        ),
    ];
    let mut names = Vec::new();
    for (name, chart) in charts {
        chart.write(&dir.join(name))?;
        names.push(name);
    }
    Ok(names)
}
