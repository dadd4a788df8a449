//! The report while the suite runs: saved after every measured cell, so that an interrupted run keeps its results.

use std::io;
use std::path::{Path, PathBuf};

use crate::report::targets;
use crate::report::{Report, State};

/// A run of the suite.
#[derive(Debug)]
pub(crate) struct Suite {
    /// Measurements so far.
    pub(crate) report: Report,
    path: PathBuf,
}

impl Suite {
    /// Returns a run with its report at `path`.
    pub(crate) fn new(report: Report, path: &Path) -> Self {
        Self {
            report,
            path: path.to_owned(),
        }
    }

    /// Returns the path of the report.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Saves the measurements so far.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub(crate) fn save(&self) -> io::Result<()> {
        // Renames the complete file, so that a reader never sees half of a report.
        let unfinished = self.path.with_extension("json.new");
        std::fs::write(
            &unfinished,
            serde_json::to_string_pretty(&self.report)? + "\n",
        )?;
        std::fs::rename(unfinished, &self.path)
    }

    /// Judges the targets and saves the report as complete.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.report.targets = targets::all(&self.report);
        self.report.state = State::Complete;
        self.save()
    }

    /// Saves the report as one that does not count, without targets.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub(crate) fn refuse(&mut self, why: &io::Error) -> io::Result<()> {
        self.report.targets.clear();
        self.report.refused = Some(why.to_string());
        self.save()
    }
}
