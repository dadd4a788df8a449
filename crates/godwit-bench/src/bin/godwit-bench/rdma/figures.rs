//! The figures of the RDMA live-migration paper's evaluation.

use std::io;
use std::path::Path;

use godwit_bench::chart::{Chart, Line};
use godwit_testkit::report::median;

use crate::rdma::breakdown::{PARTS, Summary};
use crate::rdma::throughput;
use crate::rdma::waiting;

fn chart(title: &str, x: &str, y: &str, lines: Vec<Line>) -> Chart {
    Chart {
        title: title.to_owned(),
        x_label: x.to_owned(),
        y_label: y.to_owned(),
        logarithmic: false,
        lines,
        shaded: Vec::new(),
        level: None,
    }
}

/// Draws the measurements and returns the names of the files.
///
/// # Errors
/// I/O errors of the files.
pub(crate) fn draw(
    summaries: &[Summary],
    waiting: &[waiting::Run],
    throughput: &[throughput::Run],
    dir: &Path,
) -> io::Result<Vec<String>> {
    let mut charts = Vec::new();
    for side in ["sender", "receiver"] {
        for (pre_setup, how) in [(false, "without pre-setup"), (true, "with pre-setup")] {
            let chosen: Vec<&Summary> = summaries
                .iter()
                .filter(|one| one.side == side && one.pre_setup == pre_setup)
                .collect();
            let name = format!(
                "breakdown-{side}{}.svg",
                if pre_setup { "-pre-setup" } else { "" }
            );
            charts.push((name, breakdown(side, how, &chosen)));
        }
    }
    for (over, x) in [
        ("queue_pairs", "queue pairs"),
        ("message_bytes", "bytes of a message"),
        ("partners", "partners"),
    ] {
        let name = format!("waiting-{}.svg", over.replace('_', "-"));
        charts.push((name, wait(over, x, waiting)));
    }
    for run in throughput.iter().filter(|run| run.round == 0) {
        let ahead = if run.pre_setup { "-pre-setup" } else { "" };
        charts.push((
            format!("throughput-{}{ahead}.svg", run.side),
            over_time(run),
        ));
    }
    let mut names = Vec::new();
    for (name, chart) in charts {
        if chart.lines.iter().any(|line| !line.points.is_empty()) {
            chart.write(&dir.join(&name))?;
            names.push(name);
        }
    }
    Ok(names)
}

/// Draws a breakdown. Each line is the sum of a part and the parts before it, so the last line is the blackout.
fn breakdown(side: &str, how: &str, summaries: &[&Summary]) -> Chart {
    let upto = |last: usize| Line {
        name: format!("up to {}", PARTS[last]),
        points: summaries
            .iter()
            .filter_map(|one| {
                let parts = one.parts_ms[..=last].iter();
                let sum: Option<f64> = parts
                    .map(|(_, spread)| spread.map(|spread| spread.median))
                    .sum();
                Some((f64::from(one.qps), sum?))
            })
            .collect(),
    };
    chart(
        &format!("Blackout of a {side} that moves, {how}"),
        "queue pairs",
        "ms",
        (0..PARTS.len()).map(upto).collect(),
    )
}

fn wait(over: &str, x: &str, runs: &[waiting::Run]) -> Chart {
    let line = |name: &str, pick: fn(&waiting::Run) -> Option<f64>| {
        let chosen = || runs.iter().filter(|run| run.over == over);
        let mut places: Vec<u32> = chosen().map(waiting::Run::at).collect();
        places.sort_unstable();
        places.dedup();
        let point = |place: u32| {
            let values: Vec<f64> = chosen()
                .filter(|run| run.at() == place)
                .filter_map(pick)
                .collect();
            (!values.is_empty()).then(|| (f64::from(place), median(&values)))
        };
        Line {
            name: name.to_owned(),
            points: places.into_iter().filter_map(point).collect(),
        }
    };
    let mut made = chart(
        "Wait-before-stop beside the blackout that it is part of",
        x,
        "ms",
        vec![
            line("wait-before-stop", |run| run.wbs_ms),
            line("blackout", |run| run.blackout_ms),
        ],
    );
    made.logarithmic = true;
    made
}

fn over_time(run: &throughput::Run) -> Chart {
    let ahead = if run.pre_setup { "with" } else { "without" };
    let mut made = chart(
        &format!(
            "What the partner of a {} sees while that moves, {ahead} pre-setup",
            run.side
        ),
        "seconds",
        "MB/s in 100 ms",
        vec![Line {
            name: format!("{} queue pairs", run.qps),
            points: run
                .points
                .iter()
                .map(|(time, rate)| (*time, rate / 1e6))
                .collect(),
        }],
    );
    made.shaded = run
        .move_seconds
        .map(|(began, ended)| began..ended)
        .into_iter()
        .collect();
    made
}
