//! The output of a run: the report file and the text on the screen.

use std::io;

use godwit_testkit::report::{median, write_report};
use serde::Serialize;

use crate::policies::measure::Measured;
use crate::policies::scenes::thin::Moved;
use crate::policies::sizes::Sizes;
use crate::policies::targets::Target;

/// The part of the run that a measurement belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Cell {
    /// Policies beside each other.
    Table,
    /// Many machines at once.
    Many,
    /// The node's own choice.
    Choice,
}

#[derive(Clone, Debug, Serialize)]
struct Entry {
    cell: Cell,
    round: usize,
    /// Result of [`Measured::cost`].
    cost: f64,
    #[serde(flatten)]
    measured: Measured,
}

/// All measurements.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    sizes: Sizes,
    /// True if every requested measurement was taken.
    complete: bool,
    targets: Vec<Target>,
    medians: Vec<Medians>,
    entries: Vec<Entry>,
    thin: Vec<Moved>,
}

/// Medians over the rounds of equal measurements, with the least and the most of the time.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Medians {
    cell: Cell,
    load: crate::policies::load::Kind,
    machines: usize,
    policy: &'static str,
    rounds: usize,
    converged: bool,
    handed_over_seconds: Option<f64>,
    source_needed_seconds: Option<f64>,
    seconds: f64,
    seconds_of: [f64; 2],
    wire_bytes: f64,
    write: Option<f64>,
    read: Option<f64>,
    cost: f64,
    reason: Option<String>,
}

impl Report {
    pub(crate) fn new(sizes: &Sizes) -> Self {
        Self {
            sizes: sizes.clone(),
            complete: false,
            targets: Vec::new(),
            medians: Vec::new(),
            entries: Vec::new(),
            thin: Vec::new(),
        }
    }

    /// Adds a measurement and saves the report.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub(crate) fn add(&mut self, cell: Cell, round: usize, measured: Measured) -> io::Result<()> {
        println!("{}", line(&measured));
        self.entries.push(Entry {
            cell,
            round,
            cost: measured.cost(),
            measured,
        });
        write_report("bench-policies", self).map(drop)
    }

    /// Adds a move of a thin disk, or of the full one beside it.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub(crate) fn add_thin(&mut self, moved: Moved) -> io::Result<()> {
        println!(
            "{:<22} {:>8.2} s  {:>8.1} MB sent, {:>7.1} MB there of {:>7.1} MB",
            if moved.thin { "100 GiB, thin" } else { "full" },
            moved.seconds,
            moved.wire_bytes as f64 / 1e6,
            moved.allocated_at_destination as f64 / 1e6,
            moved.allocated_at_source as f64 / 1e6,
        );
        self.thin.push(moved);
        write_report("bench-policies", self).map(drop)
    }

    /// Returns the measurements of a part.
    pub(crate) fn measured(&self, cell: Cell) -> impl Iterator<Item = &Measured> {
        let of = self.entries.iter().filter(move |entry| entry.cell == cell);
        of.map(|entry| &entry.measured)
    }

    pub(crate) fn thin(&self) -> &[Moved] {
        &self.thin
    }

    /// Ends the run: adds medians and targets, prints both and saves the report.
    ///
    /// # Errors
    /// I/O errors of the file.
    pub(crate) fn conclude(&mut self, targets: Vec<Target>) -> io::Result<()> {
        self.complete = true;
        self.medians = medians(&self.entries);
        println!("\nMedians:\n{HEADING}");
        for row in &self.medians {
            println!("{}", row.line());
        }
        println!();
        for target in &targets {
            println!("{target}");
        }
        self.targets = targets;
        println!("\n{}", write_report("bench-policies", self)?.display());
        Ok(())
    }
}

const HEADING: &str = "load      machines policy        handed over s  source needed s   all s        MB  write MB/s   read MB/s    cost s";

fn medians(entries: &[Entry]) -> Vec<Medians> {
    let mut found: Vec<Medians> = Vec::new();
    for entry in entries {
        let it = &entry.measured;
        let alike = |other: &&Entry| {
            let that = &other.measured;
            other.cell == entry.cell
                && (that.load, that.machines, that.policy) == (it.load, it.machines, it.policy)
        };
        let known = |row: &Medians| {
            (row.cell, row.load, row.machines, row.policy)
                == (entry.cell, it.load, it.machines, it.policy)
        };
        if found.iter().any(known) {
            continue;
        }
        let all: Vec<_> = entries.iter().filter(alike).collect();
        let of = |value: &dyn Fn(&Measured) -> Option<f64>| {
            let values: Option<Vec<_>> = all.iter().map(|entry| value(&entry.measured)).collect();
            values.map(|values| median(&values))
        };
        let seconds = all.iter().map(|entry| entry.measured.seconds);
        found.push(Medians {
            cell: entry.cell,
            load: it.load,
            machines: it.machines,
            policy: it.policy,
            rounds: all.len(),
            converged: all.iter().all(|entry| entry.measured.converged),
            handed_over_seconds: of(&|it| it.handed_over_seconds),
            source_needed_seconds: of(&|it| it.source_needed_seconds),
            seconds: of(&|it| Some(it.seconds)).unwrap_or(0.0),
            seconds_of: [
                seconds.clone().fold(f64::INFINITY, f64::min),
                seconds.fold(0.0, f64::max),
            ],
            wire_bytes: of(&|it| Some(it.wire_bytes as f64)).unwrap_or(0.0),
            write: of(&|it| it.write),
            read: of(&|it| it.read),
            cost: of(&|it| Some(it.cost())).unwrap_or(0.0),
            reason: it.reason.clone(),
        });
    }
    found
}

impl Medians {
    fn line(&self) -> String {
        format!(
            "{:<10} {:>7} {:<13} {} {} {:>7.2} {:>9.1} {} {} {:>9.2}{}{}",
            self.load.name(),
            self.machines,
            self.policy,
            shown(self.handed_over_seconds, 13, 2),
            shown(self.source_needed_seconds, 16, 2),
            self.seconds,
            self.wire_bytes / 1e6,
            shown(self.write.map(|rate| rate / 1e6), 11, 1),
            shown(self.read.map(|rate| rate / 1e6), 11, 1),
            self.cost,
            given_up(self.policy, self.converged),
            self.reason
                .as_ref()
                .map(|why| format!("  ({why})"))
                .unwrap_or_default(),
        )
    }
}

fn line(it: &Measured) -> String {
    format!(
        "{:<10} {:>3} {:<13} {:>8.2} s, handed over after {} s  {:>8.1} MB sent, written {} MB/s{}",
        it.load.name(),
        it.machines,
        it.policy,
        it.seconds,
        shown(it.handed_over_seconds, 6, 2),
        it.wire_bytes as f64 / 1e6,
        shown(it.write.map(|rate| rate / 1e6), 7, 1),
        given_up(it.policy, it.converged),
    )
}

fn given_up(policy: &str, converged: bool) -> &'static str {
    match (policy, converged) {
        ("remote", _) => "  watched",
        (_, false) => "  given up",
        (_, true) => "",
    }
}

fn shown(value: Option<f64>, width: usize, digits: usize) -> String {
    value.map_or_else(
        || format!("{:>width$}", "-"),
        |value| format!("{value:>width$.digits$}"),
    )
}
