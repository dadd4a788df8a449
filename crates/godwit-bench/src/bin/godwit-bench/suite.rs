//! The report while the suite runs: written after every measured cell, so that an interrupted run
//! keeps what it has.

use std::io;
use std::path::{Path, PathBuf};

use crate::report::targets;
use crate::report::{Report, State};

/// A run of the suite.
#[derive(Debug)]
pub(crate) struct Suite {
    /// What was measured so far.
    pub(crate) report: Report,
    path: PathBuf,
}

impl Suite {
    /// A run whose report goes there.
    pub(crate) fn new(report: Report, path: &Path) -> Self {
        Self {
            report,
            path: path.to_owned(),
        }
    }

    /// Where the report is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what was measured so far.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn save(&self) -> io::Result<()> {
        // In one step, so that a reader never sees half of it.
        let unfinished = self.path.with_extension("json.new");
        std::fs::write(
            &unfinished,
            serde_json::to_string_pretty(&self.report)? + "\n",
        )?;
        std::fs::rename(unfinished, &self.path)
    }

    /// Compares with the targets and writes the report as one that counts.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.report.targets = targets::all(&self.report);
        self.report.state = State::Complete;
        self.save()
    }

    /// Writes the report as one that does not count: without a word about targets.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn refuse(&mut self, why: &io::Error) -> io::Result<()> {
        self.report.targets.clear();
        self.report.refused = Some(why.to_string());
        self.save()
    }
}
