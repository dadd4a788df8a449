//! Reports of the demo and the benchmarks.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

use crate::process::target_dir;

/// Writes `target/NAME/report.json` and returns its path.
pub fn write_report(name: &str, report: &impl Serialize) -> io::Result<PathBuf> {
    write_report_as(name, "report.json", report)
}

/// Writes `target/NAME/FILE` and returns its path.
pub fn write_report_as(name: &str, file: &str, report: &impl Serialize) -> io::Result<PathBuf> {
    let dir = target_dir().join(name);
    std::fs::create_dir_all(&dir)?;
    let path = dir.join(file);
    std::fs::write(&path, serde_json::to_string_pretty(report)? + "\n")?;
    Ok(path)
}

/// Ends a demo: writes the report, prints the path, and returns a failure unless `is_good`.
pub fn conclude(name: &str, report: &impl Serialize, is_good: bool) -> ExitCode {
    match write_report(name, report) {
        Ok(path) => println!("{}", path.display()),
        Err(error) => {
            eprintln!("cannot write the report: {error}");
            return ExitCode::FAILURE;
        }
    }
    if is_good {
        ExitCode::SUCCESS
    } else {
        eprintln!("\nThe demo found problems; see the report.");
        ExitCode::FAILURE
    }
}

/// A figure beside its upper limit.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    name: &'static str,
    goal: f64,
    value: f64,
    met: bool,
}

impl Target {
    /// Judges the figure and prints the verdict.
    pub fn judged(name: &'static str, goal: f64, value: f64) -> Self {
        let met = value <= goal;
        let word = if met { "met" } else { "NOT met" };
        println!("{name}: {value:.2}, at most {goal}: {word}");
        Self {
            name,
            goal,
            value,
            met,
        }
    }
}

/// Returns the median; 0 for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}
