//! Reports that the demo and the benchmarks leave behind.

use std::io;
use std::path::PathBuf;

use serde::Serialize;

use crate::process::target_dir;

/// Writes `target/NAME/report.json` and tells where it is.
///
/// # Errors
/// Those of the file.
pub fn write_report(name: &str, report: &impl Serialize) -> io::Result<PathBuf> {
    write_report_as(name, "report.json", report)
}

/// Writes `target/NAME/FILE` and tells where it is.
///
/// # Errors
/// Those of the file.
pub fn write_report_as(name: &str, file: &str, report: &impl Serialize) -> io::Result<PathBuf> {
    let dir = target_dir().join(name);
    std::fs::create_dir_all(&dir)?;
    let path = dir.join(file);
    std::fs::write(&path, serde_json::to_string_pretty(report)? + "\n")?;
    Ok(path)
}

/// The median; 0 of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}
