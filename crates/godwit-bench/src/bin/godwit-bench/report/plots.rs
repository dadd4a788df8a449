//! The plots of `docs/benchmarks.md`.

use std::io;
use std::path::Path;

use godwit_bench::chart::{Chart, Line};

use crate::report::{Migrate, Report};
use crate::scenes::migrate::targets::case;

/// A drawn plot.
#[derive(Debug)]
pub(crate) struct Plot {
    /// Name of the file.
    pub(crate) file: String,
    /// Title of the plot.
    pub(crate) title: String,
}

/// Workload of the plots over rates.
const WORKLOAD: &str = "randwrite";
/// Rates of the latency plots: paced and unpaced.
const RATES: [Option<f64>; 2] = [Some(40.0), None];

/// Draws every plot with enough numbers, each from one run.
///
/// # Errors
/// I/O errors of the files.
pub(crate) fn draw(runs: &[Report], dir: &Path) -> io::Result<Vec<Plot>> {
    let over_time = runs.iter().map(|run| latency_over_time(&run.migrate));
    let mut charts: Vec<(String, Chart)> = over_time.flatten().collect();
    let usual = runs.iter().map(|run| comparable(&run.migrate));
    let most = usual.max_by_key(Vec::len).unwrap_or_default();
    charts.extend(over_rate(
        &most,
        "lm-time.svg",
        "Time of a move, where it converged",
        "seconds",
        |cell| cell.lm_seconds,
    ));
    charts.extend(over_rate(
        &most,
        "cpu-per-gb.svg",
        "CPU time of a move, where it converged",
        "CPU seconds per GB of the image",
        |cell| {
            let gigabytes = cell.image_bytes as f64 / 1e9;
            cell.converged.then_some(cell.cpu_seconds / gigabytes)
        },
    ));
    let mut plots = Vec::new();
    for (file, chart) in charts {
        chart.write(&dir.join(&file))?;
        plots.push(Plot {
            file,
            title: chart.title,
        });
    }
    Ok(plots)
}

/// Returns one plot for each case with a series, one line for each mover.
fn latency_over_time(cells: &[Migrate]) -> Vec<(String, Chart)> {
    let drawn = |cell: &&Migrate| !cell.series.is_empty() && RATES.contains(&cell.rate_mbps);
    let mut cases: Vec<String> = Vec::new();
    for cell in cells.iter().filter(drawn) {
        if !cases.contains(&case(cell)) {
            cases.push(case(cell));
        }
    }
    let picture = |name: &String| {
        let of_case = cells.iter().filter(|cell| case(cell) == *name);
        let lines = of_case.map(|cell| Line {
            name: cell.mover.clone(),
            points: points(cell),
        });
        let chart = Chart {
            title: format!("Guest latency while the disk moves: {name}"),
            x_label: "seconds since the command".to_owned(),
            y_label: "longest latency in each quarter of a second, ms".to_owned(),
            logarithmic: true,
            lines: lines.collect(),
            shaded: Vec::new(),
            level: None,
        };
        (format!("latency-{}.svg", file_name(name)), chart)
    };
    cases.iter().map(picture).collect()
}

/// Returns the points of a line. A quarter of a second without an answer has no latency.
fn points(cell: &Migrate) -> Vec<(f64, f64)> {
    let answered = cell.series.iter().filter(|point| point.mbps > 0.0);
    answered
        .map(|point| (point.seconds, point.max_us / 1000.0))
        .collect()
}

fn over_rate(
    cells: &[&Migrate],
    file: &str,
    title: &str,
    unit: &str,
    pick: fn(&Migrate) -> Option<f64>,
) -> Option<(String, Chart)> {
    let mut lines: Vec<Line> = Vec::new();
    for cell in cells {
        let Some(point) = cell.rate_mbps.zip(pick(cell)) else {
            continue;
        };
        match lines.iter_mut().find(|line| line.name == cell.mover) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name: cell.mover.clone(),
                points: vec![point],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by(|one, two| one.0.total_cmp(&two.0));
    }
    // A single rate is no axis.
    let enough = lines.iter().any(|line| line.points.len() > 1);
    enough.then(|| {
        let chart = Chart {
            title: format!("{title}: random writes, uncapped link"),
            x_label: "MB/s that the guest writes".to_owned(),
            y_label: unit.to_owned(),
            logarithmic: false,
            lines,
            shaded: Vec::new(),
            level: None,
        };
        (file.to_owned(), chart)
    })
}

/// Returns the cells that differ only in rate and mover.
fn comparable(cells: &[Migrate]) -> Vec<&Migrate> {
    let usual = |cell: &&Migrate| {
        cell.workload == WORKLOAD
            && cell.link_gbps.is_none()
            && !cell.destination_in_memory
            && !cell.files
    };
    cells.iter().filter(usual).collect()
}

fn file_name(case: &str) -> String {
    let words = case.split(|letter: char| !letter.is_alphanumeric());
    words
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join("-")
        .to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenes::migrate::targets::tests::cell;

    #[test]
    fn a_picture_over_rates_has_one_link_workload_and_destination() {
        let usual = cell("godwit", Some(2.0), 40.0, 1000.0, 1.0);
        let mut others = vec![usual.clone(); 3];
        others[0].destination_in_memory = true;
        others[1].link_gbps = Some(1.0);
        others[2].workload = "zipf".to_owned();
        assert!(comparable(&others).is_empty());
        assert_eq!(comparable(&[usual]).len(), 1);
    }

    #[test]
    fn names_of_files_are_plain() {
        assert_eq!(file_name("zipf 40 MB/s, 1 Gb/s"), "zipf-40-mb-s-1-gb-s");
    }
}
