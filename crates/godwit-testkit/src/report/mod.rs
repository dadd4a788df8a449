//! Reports of the demos and the benchmarks: a header, tables of named figures, targets and notes, written as JSON and
//! shown as tables.

mod environment;
mod runs;
mod table;
mod target;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::environment::{Environment, Program};
pub use self::runs::{Runs, median, ratio};
pub use self::table::{Table, markdown, number};
pub use self::target::Target;
use crate::process::{run, target_dir};

/// The report of a scene.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Origin of the figures.
    pub header: Header,
    /// True once everything was measured.
    pub complete: bool,
    /// Reason for which the figures do not count.
    pub refused: Option<String>,
    /// Settings of the scene, and figures of the scene as a whole.
    pub facts: Map<String, Value>,
    /// Figures of the single runs, and their medians.
    pub tables: Vec<Table>,
    /// Figures beside their goals.
    pub targets: Vec<Target>,
    /// Remarks for the reader.
    pub notes: Vec<String>,
    /// Wrong results: a scene with one has failed.
    pub problems: Vec<String>,
    #[serde(skip)]
    path: PathBuf,
}

/// The origin of a report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Header {
    /// Commit of the source.
    pub commit: String,
    /// Start of the run, in UTC.
    pub date: String,
    /// The program's arguments.
    pub arguments: Vec<String>,
    /// The machine and its programs.
    pub environment: Environment,
}

impl Report {
    /// Returns a report to be written to `target/NAME/report.json`, with the versions of `godwit` and these programs.
    ///
    /// # Errors
    /// A program is missing, or the directory cannot be made.
    pub fn new(name: &str, programs: &[&str]) -> io::Result<Self> {
        Self::at(&target_dir().join(name).join("report.json"), programs)
    }

    /// Returns a report to be written to `path`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn at(path: &Path, programs: &[&str]) -> io::Result<Self> {
        let dir = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir)?;
        Ok(Self::of(Header::read(dir, programs)?, path))
    }

    /// Returns an empty report with this header.
    pub fn of(header: Header, path: &Path) -> Self {
        Self {
            header,
            complete: false,
            refused: None,
            facts: Map::new(),
            tables: Vec::new(),
            targets: Vec::new(),
            notes: Vec::new(),
            problems: Vec::new(),
            path: path.to_owned(),
        }
    }

    /// Reads a report that counts.
    ///
    /// # Errors
    /// I/O errors of the file, or a report that does not count.
    pub fn read(path: &Path) -> io::Result<Self> {
        let named = |error: String| io::Error::other(format!("{}: {error}", path.display()));
        let bytes = std::fs::read(path).map_err(|error| named(error.to_string()))?;
        let report: Self =
            serde_json::from_slice(&bytes).map_err(|error| named(error.to_string()))?;
        match (report.complete, &report.refused) {
            (true, None) if report.problems.is_empty() => Ok(report),
            (true, None) => {
                let problems = report.problems.join("; ");
                Err(named(format!("does not count: {problems}")))
            }
            (_, why) => {
                let why = why.as_deref().unwrap_or("its run did not end");
                Err(named(format!("does not count: {why}")))
            }
        }
    }

    /// Returns the directory of the report.
    pub fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Sets a setting, or a figure of the scene as a whole.
    pub fn fact(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.to_owned(), value.into());
    }

    /// Returns a setting or figure; null if there is none.
    pub fn known(&self, name: &str) -> &Value {
        self.facts.get(name).unwrap_or(&Value::Null)
    }

    /// Adds a problem unless `good`.
    pub fn check(&mut self, good: bool, problem: impl Into<String>) {
        if !good {
            self.problems.push(problem.into());
        }
    }

    /// Adds a table, with the arguments of [`Table::new`] and an explanation for a document.
    pub fn table(&mut self, name: &str, keys: &str, figures: &str, about: &str) {
        self.tables.push(Table::new(name, keys, figures, about));
    }

    /// Adds a run to a table, prints the run and saves the report, so that an interrupted scene keeps its results.
    ///
    /// # Errors
    /// I/O errors of the file, or no such table.
    pub fn add(&mut self, table: &str, run: Value) -> io::Result<()> {
        let found = self.tables.iter_mut().find(|one| one.name == table);
        let found = found.ok_or_else(|| io::Error::other(format!("no table '{table}'")))?;
        found.add(run);
        println!("{}", found.last_line());
        self.save()
    }

    /// Marks the runs of a table with the same keys as disturbed if they are noisy. `noisy` also gets all runs.
    pub fn mark_noisy(&mut self, table: &str, noisy: impl Fn(&Runs<'_>, &Runs<'_>) -> bool) {
        let Some(table) = self.tables.iter_mut().find(|one| one.name == table) else {
            return;
        };
        let all = Runs(table.runs.iter().collect());
        let cells = all.groups(&table.keys);
        let cells = cells.iter().filter(|cell| noisy(cell, &all));
        let marked: Vec<Value> = cells.map(|cell| cell.0[0].clone()).collect();
        for run in &mut table.runs {
            let same = |one: &Value| table.keys.iter().all(|key| one[key] == run[key]);
            if marked.iter().any(same) {
                run["noisy"] = true.into();
            }
        }
    }

    /// Returns all runs of a table.
    pub fn runs(&self, table: &str) -> Runs<'_> {
        let found = self.tables.iter().find(|one| one.name == table);
        Runs(found.map_or_else(Vec::new, |table| table.runs.iter().collect()))
    }

    /// Saves the report. A reader never sees half of one.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub fn save(&mut self) -> io::Result<()> {
        self.tables.iter_mut().for_each(Table::summarize);
        let unfinished = self.path.with_extension("json.new");
        std::fs::write(&unfinished, serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::rename(unfinished, &self.path)
    }

    /// Saves the report as one that does not count, and returns the error.
    ///
    /// # Errors
    /// Always: the reason, or an I/O error of the file.
    pub fn refuse(&mut self, why: &io::Error) -> io::Result<()> {
        self.targets.clear();
        self.refused = Some(why.to_string());
        self.save()?;
        Err(io::Error::other(format!("refusing to report: {why}")))
    }

    /// Ends a scene: saves the report as complete and prints medians, figures, targets and problems.
    ///
    /// # Errors
    /// I/O errors of the file, or the problems.
    pub fn conclude(&mut self) -> io::Result<()> {
        self.complete = true;
        self.save()?;
        for table in self.tables.iter().filter(|table| table.repeats()) {
            println!("\n{}: medians\n\n{}", table.name, table.markdown());
        }
        for (name, value) in &self.facts {
            if !value.is_object() && !value.is_array() {
                println!("{name}: {value}");
            }
        }
        for target in &self.targets {
            println!("{target}");
        }
        for note in &self.notes {
            println!("{note}");
        }
        println!("{}", self.path.display());
        match self.problems.as_slice() {
            [] => Ok(()),
            problems => Err(io::Error::other(format!(
                "problems were found:\n  - {}",
                problems.join("\n  - ")
            ))),
        }
    }
}

impl Header {
    fn read(dir: &Path, programs: &[&str]) -> io::Result<Self> {
        let first_line = |command: &mut Command| {
            let output = run(command).ok()?;
            let text = String::from_utf8_lossy(&output.stdout);
            text.lines().next().map(str::to_owned)
        };
        let mut git = Command::new("git");
        git.args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "HEAD"]);
        let unknown = || String::from("unknown");
        Ok(Self {
            commit: first_line(&mut git).unwrap_or_else(unknown),
            date: first_line(Command::new("date").args(["-u", "+%FT%TZ"])).unwrap_or_else(unknown),
            arguments: std::env::args().skip(1).collect(),
            environment: Environment::read(dir, programs)?,
        })
    }
}

/// Adds the fields of an object to a run, with a suffix such as `_before`.
pub fn add_fields(run: &mut Value, fields: &impl Serialize, suffix: &str) {
    let fields = serde_json::to_value(fields).unwrap_or_default();
    for (name, value) in fields.as_object().into_iter().flatten() {
        run[format!("{name}{suffix}")] = value.clone();
    }
}

/// Prints the next step of a scene.
pub fn step(what: &str) {
    println!("• {what}");
}

/// Turns the end of a scene into the program's exit code, and prints the error.
pub fn exit_code(ended: io::Result<()>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_is_read_back_once_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        let mut report = Report::at(&path, &[]).unwrap();
        report.table("moves", "mover", "lm_seconds s", "");
        for seconds in [3.0, 1.0, 2.0] {
            let run = json!({"mover": "godwit", "lm_seconds": seconds});
            report.add("moves", run).unwrap();
        }
        let unfinished = Report::read(&path).unwrap_err().to_string();
        assert!(unfinished.contains("does not count"), "{unfinished}");
        report.conclude().unwrap();
        let found = Report::read(&path).unwrap();
        assert_eq!(found.runs("moves").median("lm_seconds"), Some(2.0));
        assert_eq!(found.tables[0].medians[0]["lm_seconds"]["most"], 3.0);
        report.check(false, "a byte is wrong");
        let failed = report.conclude().unwrap_err().to_string();
        assert!(failed.contains("a byte is wrong"), "{failed}");
        let wrong = Report::read(&path).unwrap_err().to_string();
        assert!(wrong.contains("does not count: a byte is wrong"), "{wrong}");
        report.refuse(&io::Error::other("too noisy")).unwrap_err();
        let refused = Report::read(&path).unwrap_err().to_string();
        assert!(refused.contains("does not count: too noisy"), "{refused}");
    }
}
