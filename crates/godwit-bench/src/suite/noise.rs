//! Decides if the machine was quiet enough for meaningful numbers.

use std::io;
use std::time::Duration;

use crate::common::interrupt;
use serde::Serialize;

use godwit_testkit::report::Report;

/// Largest fraction of the CPU time that a hypervisor may give to others.
const MOST_STOLEN: f64 = 0.05;
/// Largest fraction of the CPU time in use before a measurement, while the suite waits.
const MOST_BUSY: f64 = 0.25;
/// Largest fraction of the measured cells with repetitions that disagree.
const MOST_NOISY: f64 = 0.25;
/// Largest factor between repetitions when nothing moves under a guest's load.
pub(crate) const AGREE: f64 = 1.5;
/// Number of looks for a quiet machine before a measurement.
const WAITS: u32 = 240;
/// Duration of a look.
const WATCH: Duration = Duration::from_millis(500);

/// Conditions under which a run counts.
const CRITERION: &str = "a run counts when a hypervisor took at most 5 % of the CPU time, at most 25 % of the CPU time was \
    in use before each measurement, and at most 25 % of the cells have repetitions that disagree or guests that had much \
    less than others before the move, one in five left aside where there are as many";

/// The noise of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Noise {
    /// Fraction of the run's CPU time that a hypervisor gave to others.
    stolen: f64,
    /// Cells with repetitions that disagree.
    noisy_cells: usize,
    cells: usize,
    criterion: &'static str,
}

/// The times of `/proc/stat`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    all: u64,
    idle: u64,
    stolen: u64,
}

impl Noise {
    /// Returns the noise since the beginning of the run.
    pub(crate) fn since(beginning: Times, report: &Report) -> io::Result<Self> {
        let cells = || report.tables.iter().flat_map(|table| &table.medians);
        Ok(Self {
            stolen: Times::now()?.since(beginning).1,
            noisy_cells: cells().filter(|cell| cell["noisy"] == true).count(),
            cells: cells().count(),
            criterion: CRITERION,
        })
    }

    /// Checks that the run counts.
    pub(crate) fn judge(&self) -> io::Result<()> {
        let stolen = format!("others got {:.1} % of its CPU time", self.stolen * 100.0);
        let noisy = format!(
            "in {} of {} cells the repetitions disagree",
            self.noisy_cells, self.cells
        );
        let why = if self.stolen > MOST_STOLEN {
            stolen
        } else if self.noisy_cells as f64 > self.cells as f64 * MOST_NOISY {
            noisy
        } else {
            return Ok(());
        };
        Err(io::Error::other(format!(
            "the machine was too noisy: {why} ({CRITERION})"
        )))
    }
}

/// Waits until the machine is quiet.
pub(crate) fn await_quiet() -> io::Result<()> {
    let mut busy = 0.0;
    for _ in 0..WAITS {
        let from = Times::now()?;
        interrupt::sleep(WATCH)?;
        busy = Times::now()?.since(from).0;
        if busy <= MOST_BUSY {
            return Ok(());
        }
    }
    Err(io::Error::other(format!(
        "the machine was too noisy: {:.0} % of its CPU time was in use before a measurement, for {} \
         s; at most {:.0} % may be",
        busy * 100.0,
        (WATCH * WAITS).as_secs(),
        MOST_BUSY * 100.0
    )))
}

/// Returns the number of repetitions that may be outliers without moving the median far.
pub(crate) const fn outliers(repetitions: usize) -> usize {
    repetitions / 5
}

/// Returns true if repetitions disagree: the largest is more than `factor` of the smallest, no matter which
/// [`outliers`] are left out.
pub(crate) fn disagree(values: &[f64], factor: f64) -> bool {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let kept = sorted.len() - outliers(sorted.len());
    let far_apart =
        |kept: &[f64]| matches!(kept, [smallest, .., largest] if *largest > smallest * factor);
    kept > 1 && sorted.windows(kept).all(far_apart)
}

impl Times {
    pub(crate) fn now() -> io::Result<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat")?)
            .ok_or_else(|| io::Error::other("/proc/stat has no line about all CPUs"))
    }

    /// Parses the fields user nice system idle iowait irq softirq steal. Later fields are part of user and nice.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let times: Vec<u64> = line
            .split_whitespace()
            .take(8)
            .map_while(|field| field.parse().ok())
            .collect();
        Some(Self {
            all: times.iter().sum(),
            idle: times.get(3)? + times.get(4)?,
            stolen: *times.get(7)?,
        })
    }

    /// Returns the used and the stolen fraction.
    fn since(self, before: Self) -> (f64, f64) {
        let all = self.all.saturating_sub(before.all).max(1) as f64;
        let used = all - self.idle.saturating_sub(before.idle) as f64;
        let stolen = self.stolen.saturating_sub(before.stolen) as f64;
        (used / all, stolen / all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_all_cpus_are_read() {
        let before = Times::parse("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1 1 1 1").unwrap();
        let after = Times::parse("cpu  40 0 30 90 20 0 0 20 0 0\n").unwrap();
        let (used, stolen) = after.since(before);
        assert!((used - 0.7).abs() < 1e-9 && (stolen - 0.2).abs() < 1e-9);
        assert!(Times::parse("cpu0 1 2 3 4 5 6 7 8").is_none());
    }

    #[test]
    fn a_noisy_run_does_not_count() {
        let noise = |stolen, noisy_cells| Noise {
            stolen,
            noisy_cells,
            cells: 8,
            criterion: CRITERION,
        };
        assert!(noise(0.01, 2).judge().is_ok());
        assert!(noise(0.06, 0).judge().is_err());
        assert!(noise(0.0, 3).judge().is_err());
    }

    #[test]
    fn repetitions_disagree_beyond_a_factor() {
        assert!(!disagree(&[1.0, 1.2], 1.3));
        assert!(disagree(&[1.0, 1.2, 1.4], 1.3));
        assert!(!disagree(&[5.0], 1.3) && !disagree(&[], 1.3));
        assert!(disagree(&[9.0, 1.0, 1.0, 1.0], 1.3));
        assert!(!disagree(&[9.0, 1.2, 1.2, 1.1, 1.0], 1.3));
        assert!(!disagree(&[0.1, 1.2, 1.2, 1.1, 1.0], 1.3));
        assert!(disagree(&[9.0, 1.2, 0.1, 1.1, 1.0], 1.3));
        assert!(disagree(&[9.0, 1.4, 1.2, 1.1, 1.0], 1.3));
    }
}
