//! Joins several reports of one machine. A long benchmark can be measured in parts. Each part counts, or does not,
//! alone.

use std::io;
use std::path::{Path, PathBuf};

use crate::report::{Report, State};
use crate::scenes::migrate::targets::case;

/// Runs that count, from one machine with the same programs, without overlapping measurements.
#[derive(Debug)]
pub(crate) struct Runs(Vec<Report>);

impl Runs {
    /// Reads the reports.
    ///
    /// # Errors
    /// I/O errors of the files; no reports; a report that does not count; two reports of different machines or extents,
    /// or with the same measurement.
    pub(crate) fn read(paths: &[PathBuf]) -> io::Result<Self> {
        let reports = paths.iter().map(|path| read(path));
        let reports = reports.collect::<io::Result<Vec<_>>>()?;
        let mut taken: Vec<(String, &Path)> = Vec::new();
        for (path, report) in paths.iter().zip(&reports) {
            if report.environment != reports[0].environment || report.extent != reports[0].extent {
                return Err(io::Error::other(format!(
                    "{} and {} are not of one machine with the same programs, or one is of a quick run and \
                     the other of a full one: their numbers do not belong together",
                    paths[0].display(),
                    path.display()
                )));
            }
            for measured in measured(report) {
                if let Some((_, first)) = taken.iter().find(|(name, _)| *name == measured) {
                    return Err(io::Error::other(format!(
                        "{} and {} both measured {measured}: leave one of them out",
                        first.display(),
                        path.display()
                    )));
                }
                taken.push((measured, path));
            }
        }
        if reports.is_empty() {
            return Err(io::Error::other("no report"));
        }
        Ok(Self(reports))
    }

    /// Returns the runs, at least one.
    pub(crate) fn each(&self) -> &[Report] {
        &self.0
    }

    /// Returns all measurements as one report, without the noise of the later runs.
    pub(crate) fn joined(&self) -> Report {
        let mut joined = self.0[0].clone();
        for report in self.0[1..].iter().cloned() {
            joined.migrate.extend(report.migrate);
            joined.steady.extend(report.steady);
            joined.vm.extend(report.vm);
            joined.disk_limit.extend(report.disk_limit);
            joined.idle_copy = joined.idle_copy.or(report.idle_copy);
            joined.targets.extend(report.targets);
            joined
                .left_out
                .retain(|scene| report.left_out.contains(scene));
        }
        joined
    }
}

fn read(path: &Path) -> io::Result<Report> {
    let named = |error: String| io::Error::other(format!("{}: {error}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| named(error.to_string()))?;
    let report: Report =
        serde_json::from_slice(&bytes).map_err(|error| named(error.to_string()))?;
    if report.state != State::Complete {
        let why = report.refused.as_deref().unwrap_or("its run did not end");
        return Err(named(format!("does not count: {why}")));
    }
    Ok(report)
}

/// Returns the names of a report's measurements, which must be unique across reports.
pub(crate) fn measured(report: &Report) -> Vec<String> {
    let mut names: Vec<String> = report.migrate.iter().map(case).collect();
    names.dedup();
    let scenes = [
        ("steady", !report.steady.is_empty()),
        ("vm", !report.vm.is_empty()),
        ("disk-limit", !report.disk_limit.is_empty()),
        ("idle-copy", report.idle_copy.is_some()),
    ];
    let scenes = scenes.into_iter().filter(|(_, measured)| *measured);
    names.extend(scenes.map(|(name, _)| format!("scene {name}")));
    names
}

#[cfg(test)]
mod tests {
    use godwit_bench::environment::Environment;

    use super::*;
    use crate::options::Extent;
    use crate::scenes::migrate::targets::tests::cell;

    fn environment() -> Environment {
        Environment {
            cpu: "fast".to_owned(),
            cores: 2,
            memory_bytes: 24 << 30,
            kernel: "6.1.0-cloud".to_owned(),
            file_system: "ext4".to_owned(),
            programs: Vec::new(),
        }
    }

    /// Returns a report that counts, of randwrite at a rate.
    fn report(rate: f64) -> Report {
        let mut report = Report::new(Extent::Quick, environment());
        report.state = State::Complete;
        let mut cell = cell("godwit", Some(2.0), rate, 1000.0, 1.0);
        cell.rate_mbps = Some(rate);
        report.migrate.push(cell);
        report.left_out = vec!["steady".to_owned(), "vm".to_owned()];
        report
    }

    /// Writes the reports to files and reads them back.
    fn runs(reports: &[Report]) -> io::Result<Runs> {
        let dir = tempfile::tempdir()?;
        let write = |(index, report): (usize, &Report)| {
            let path = dir.path().join(format!("{index}.json"));
            std::fs::write(&path, serde_json::to_vec(report)?)?;
            Ok(path)
        };
        let paths = reports.iter().enumerate().map(write);
        Runs::read(&paths.collect::<io::Result<Vec<_>>>()?)
    }

    fn refused(reports: &[Report]) -> String {
        runs(reports).unwrap_err().to_string()
    }

    #[test]
    fn parts_of_one_machine_become_one_report() {
        let mut vm_too = report(80.0);
        vm_too.left_out = vec!["steady".to_owned()];
        let runs = runs(&[report(40.0), vm_too]).unwrap();
        let joined = runs.joined();
        assert_eq!(joined.migrate.len(), 2);
        assert_eq!(joined.left_out, ["steady"]);
        assert_eq!(runs.each().len(), 2);
    }

    #[test]
    fn what_does_not_belong_together_is_refused() {
        assert!(refused(&[]).contains("no report"));
        let same = refused(&[report(40.0), report(80.0), report(40.0)]);
        assert!(same.contains("both measured randwrite 40 MB/s") && same.contains("0.json"));
        let mut other = report(80.0);
        other.environment.cores += 1;
        assert!(refused(&[report(40.0), other]).contains("not of one machine"));
        let mut full = report(80.0);
        full.extent = Extent::Full;
        assert!(refused(&[report(40.0), full]).contains("quick"));
        let mut noisy = report(80.0);
        noisy.state = State::Partial;
        noisy.refused = Some("too noisy".to_owned());
        assert!(refused(&[report(40.0), noisy]).contains("1.json: does not count: too noisy"));
    }
}
