//! A table of runs with named figures, and its medians.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Runs;

/// The runs of a scene, one object each, and the medians of runs with the same keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Name of the table.
    pub name: String,
    /// Explanation below the heading, in a document.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// Fields that tell what ran.
    pub keys: Vec<String>,
    /// Names and units of the figures. `B` and `B/s` are shown in millions.
    pub figures: Vec<(String, String)>,
    /// Median, least and most of each figure, for each set of keys.
    #[serde(default)]
    pub medians: Vec<Value>,
    /// Every run. A figure may be null or missing; other fields are details.
    pub runs: Vec<Value>,
}

/// A shown column: one figure, or its values before and during a move.
struct Column<'a> {
    heading: String,
    figures: Vec<&'a str>,
    factor: f64,
}

impl Table {
    /// Returns an empty table. `keys` are names, and `figures` names with their units, separated by commas:
    /// `lm_seconds s, iops`.
    pub fn new(name: &str, keys: &str, figures: &str, about: &str) -> Self {
        let words = |list: &str| -> Vec<String> {
            list.split(", ")
                .filter(|word| !word.is_empty())
                .map(str::to_owned)
                .collect()
        };
        let figures = words(figures)
            .into_iter()
            .map(|figure| match figure.split_once(' ') {
                Some((name, unit)) => (name.to_owned(), unit.to_owned()),
                None => (figure, String::new()),
            });
        Self {
            name: name.to_owned(),
            about: about.to_owned(),
            keys: words(keys),
            figures: figures.collect(),
            medians: Vec::new(),
            runs: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, run: Value) {
        self.runs.push(run);
    }

    /// Returns true if any set of keys has several runs.
    pub(super) fn repeats(&self) -> bool {
        self.medians.len() < self.runs.len()
    }

    /// Computes the medians.
    pub(super) fn summarize(&mut self) {
        let groups = Runs(self.runs.iter().collect()).groups(&self.keys);
        let medians = groups.iter().map(|runs| {
            let mut row = Map::new();
            for key in &self.keys {
                row.insert(key.clone(), runs.first(key).clone());
            }
            row.insert("runs".to_owned(), runs.0.len().into());
            row.insert("noisy".to_owned(), runs.any("noisy").into());
            for (figure, _) in &self.figures {
                let spread = runs.median(figure).map(|median| {
                    json!({"median": median, "least": runs.least(figure), "most": runs.most(figure)})
                });
                row.insert(figure.clone(), spread.unwrap_or_default());
            }
            Value::Object(row)
        });
        self.medians = medians.collect();
    }

    fn columns(&self) -> Vec<Column<'_>> {
        let mut columns: Vec<Column<'_>> = Vec::new();
        for (figure, unit) in &self.figures {
            let (unit, factor) = match unit.as_str() {
                "B" => ("MB", 1e-6),
                "B/s" => ("MB/s", 1e-6),
                unit => (unit, 1.0),
            };
            let stem = figure.strip_suffix("_during");
            let before = stem.map(|stem| format!("{stem}_before"));
            let last = columns.last_mut();
            match last.filter(|last| before.as_deref() == last.figures.first().copied()) {
                Some(last) => {
                    last.heading = heading(stem.unwrap_or(figure), unit);
                    last.figures.push(figure);
                }
                None => columns.push(Column {
                    heading: heading(figure, unit),
                    figures: vec![figure],
                    factor,
                }),
            }
        }
        columns
    }

    fn headings(&self) -> Vec<String> {
        let keys = self.keys.iter().map(|key| key.replace('_', " "));
        let columns = self.columns().into_iter().map(|column| column.heading);
        keys.chain(columns).collect()
    }

    fn cells(&self, row: &Value, figure: impl Fn(&Value) -> Option<f64>) -> Vec<String> {
        let keys = self.keys.iter().map(|key| plain(&row[key]));
        let columns = self.columns().into_iter().map(|column| {
            let value = |name: &&str| figure(&row[*name]).map(|value| value * column.factor);
            let values = column.figures.iter().map(value);
            let shown: Vec<String> = values
                .map(|value| value.map_or_else(|| "-".to_owned(), number))
                .collect();
            shown.join(" → ")
        });
        keys.chain(columns).collect()
    }

    /// Returns the last run as a line for the screen, with headings above the first run.
    pub(super) fn last_line(&self) -> String {
        let headings = self.headings();
        let line = |cells: &[String]| {
            let cells = cells.iter().zip(&headings).enumerate();
            let cells = cells.map(|(index, (cell, heading))| {
                let width = heading.chars().count().max(12);
                if index < self.keys.len() {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            });
            cells.collect::<Vec<_>>().join("  ")
        };
        let last = self.runs.last().unwrap_or(&Value::Null);
        let row = line(&self.cells(last, Value::as_f64));
        match self.runs.len() {
            1 => format!("\n{}\n{row}", line(&headings)),
            _ => row,
        }
    }

    /// Returns the medians as a table; after several runs, the first figure with its least and most.
    pub fn markdown(&self) -> String {
        let mut headings = self.headings();
        headings.insert(self.keys.len(), "runs".to_owned());
        let rows = self.medians.iter().map(|row| {
            let mut cells = self.cells(row, |figure| figure["median"].as_f64());
            if row["noisy"] == true {
                cells[self.keys.len() - 1] += " (noisy)";
            }
            if let Some((first, _)) = self.figures.first()
                && row["runs"].as_u64() > Some(1)
                && let (Some(least), Some(most)) =
                    (row[first]["least"].as_f64(), row[first]["most"].as_f64())
            {
                cells[self.keys.len()] += &format!(" ({}–{})", number(least), number(most));
            }
            cells.insert(self.keys.len(), plain(&row["runs"]));
            cells
        });
        markdown(&headings, &rows.collect::<Vec<_>>(), self.keys.len())
    }
}

fn heading(figure: &str, unit: &str) -> String {
    let suffix = match unit {
        "µs" => "_us",
        "ms" => "_ms",
        "s" => "_seconds",
        "MB" => "_bytes",
        _ => "",
    };
    let name = figure
        .strip_suffix(suffix)
        .unwrap_or(figure)
        .replace('_', " ");
    match unit {
        "" => name,
        unit => format!("{name}, {unit}"),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// Formats a number with three digits or more.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        least if least < 1.0 => 3,
        least if least < 10.0 => 2,
        least if least < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// Returns a table whose first `left` columns are text, readable on a screen and as Markdown.
pub fn markdown(headings: &[String], rows: &[Vec<String>], left: usize) -> String {
    let all = || std::iter::once(headings).chain(rows.iter().map(Vec::as_slice));
    let width = |column: usize| {
        let cells = all().filter_map(|row| row.get(column));
        cells
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
            .max(4)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |row: &[String]| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(index, (cell, &width))| match index < left {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
    };
    let rule = widths.iter().enumerate().map(|(index, &width)| {
        let end = if index < left { "-" } else { ":" };
        "-".repeat(width - 1) + end
    });
    let rule = line(&rule.collect::<Vec<_>>());
    let rows: String = rows.iter().map(|row| line(row)).collect();
    line(headings) + &rule + &rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_medians_with_their_spread() {
        let figures = "lm_seconds s, mbps_before MB/s, mbps_during MB/s, wire B";
        let mut table = Table::new("moves", "mover", figures, "");
        for seconds in [1.0, 3.0] {
            table.add(json!({
                "mover": "godwit", "lm_seconds": seconds, "mbps_before": 40.0, "mbps_during": 20.0, "noisy": seconds > 2.0,
            }));
        }
        table.add(json!({"mover": "peer", "lm_seconds": null, "wire": 2_000_000}));
        table.summarize();
        assert!(table.repeats() && table.last_line().contains("2.00"));
        let shown = table.markdown();
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[0].contains("lm, s") && lines[0].contains(" mbps, MB/s |"));
        assert!(lines[1].starts_with("| ----") && lines[1].ends_with("---: |"));
        assert!(lines[2].contains("godwit (noisy)") && lines[2].contains("2.00 (1.00–3.00)"));
        assert!(lines[2].contains("40.0 → 20.0"), "{shown}");
        assert!(
            lines[3].contains("peer") && lines[3].contains("2.00 |"),
            "{shown}"
        );
    }

    #[test]
    fn numbers_have_about_three_digits() {
        assert_eq!(
            [0.5, 1.5, 15.0, 1500.0, 0.0].map(number),
            ["0.500", "1.50", "15.0", "1500", "0"]
        );
    }
}
